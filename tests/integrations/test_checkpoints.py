"""The words "activation_checkpointing": layers keep their inputs alone, on the host if wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_transformers import Checkpointing, ModelOptions, checkpoints  # noqa: E402

OFFLOAD = {"offload": True}
DOCUMENTS = (0, 5, 16, 23)


class Counted(torch.autograd.graph.save_on_cpu):
    """torch's own, which also writes down the shape of whatever it takes to the host."""

    def __init__(self, seen: list[tuple[int, ...]], **words: Any) -> None:
        super().__init__(**words)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: (seen.append(tuple(tensor.shape)), pack(tensor))[1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors that go to the host, in the order in which they go."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(checkpoints, "save_on_cpu", lambda **words: Counted(shapes, **words))
    return shapes


def train(model: nn.Module, handle: Any, given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    local = handle.shard_batch(given)
    logits = model(**wf_transformers.forward_kwargs(model, local)).logits
    loss = handle.sp.loss(logits, local["labels"])
    loss.backward()
    return loss.detach(), {name: grad.clone() for name, grad in gradients(model).items()}


def alone() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig(), World(1).comm(0))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox", "bert"])
@pytest.mark.parametrize("borders", [None, DOCUMENTS])
def test_loss_and_gradients_are_those_without(family: str, borders: Any) -> None:
    given = batch(cu_seqlens=borders) if borders else batch()

    def rank(comm: Any) -> None:
        found = []
        for words in (None, {"offload": False}, OFFLOAD):
            model, sp = build(family, "eager", {}), sequence_parallel(comm)
            with wf_transformers.attach(model, sp, activation_checkpointing=words) as handle:
                found.append(train(model, handle, given))
        (loss, grads), *others = found
        for other_loss, other_grads in others:
            assert_close(other_loss, loss, "loss")
            assert grads.keys() == other_grads.keys()
            for name, grad in grads.items():
                assert_close(other_grads[name], grad, name)

    run_threads(2, rank)


def test_the_inputs_of_layers_go_to_the_host_and_nothing_else(seen: Any) -> None:
    model = build("llama", "sdpa", {})
    with wf_transformers.attach(model, alone(), activation_checkpointing=OFFLOAD) as handle:
        train(model, handle, batch(seqlen=24))
    assert [shape for shape in seen if len(shape) == 3] == [(1, 24, 32)] * 2  # of both layers
    assert all(max(shape) <= 32 for shape in seen)  # nothing of (tokens, tokens) or the vocabulary


def test_whoever_enables_checkpointing_later_has_it_offloaded_too(seen: Any) -> None:
    """A Trainer with gradient_checkpointing=True does so when it starts to train."""
    model = build("llama", "sdpa", {})
    with wf_transformers.attach(model, alone(), activation_checkpointing=OFFLOAD) as handle:
        for words in (None, {"use_reentrant": False}, handle.checkpoint_kwargs):
            model.enable_input_require_grads()  # which the reentrant one needs
            model.gradient_checkpointing_enable(words)
            seen.clear()
            train(model, handle, batch(seqlen=24))
            assert (1, 24, 32) in seen
        model.gradient_checkpointing_disable()
        seen.clear()
        train(model, handle, batch(seqlen=24))
        assert not seen


@pytest.mark.parametrize("before", [False, True])
def test_remove_leaves_the_model_as_it_was(before: bool, seen: Any) -> None:
    model = build("llama", "sdpa", {})
    if before:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    had = vars(model.model).copy()
    handle = wf_transformers.attach(model, alone(), activation_checkpointing=OFFLOAD)
    train(model, handle, batch())
    handle.remove()
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    assert {n: vars(model.model).get(n) for n in names} == {n: had.get(n) for n in names}
    seen.clear()
    model(**batch()).loss.backward()
    assert not seen


def test_the_words_are_split_from_the_others() -> None:
    words = {"sequence_parallel_size": 2, "activation_checkpointing": OFFLOAD}
    run = ModelOptions(Checkpointing(offload=True))
    assert ModelOptions.split(words) == ({"sequence_parallel_size": 2}, run)
    assert ModelOptions.split({"route": "ring"}) == ({"route": "ring"}, ModelOptions())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (True, '"activation_checkpointing" must be a block such as .*, got True'),
        ({"ofload": True}, '"activation_checkpointing.ofload" is no known key; did you mean'),
        ({"offload": "cpu"}, '"activation_checkpointing.offload" must be true or false, got'),
        ({"offload": 1}, "must be true or false, got 1"),
    ],
)
def test_wrong_words_are_refused_before_the_model_changes(wrong: Any, named: str) -> None:
    model = build("llama", "sdpa", {})
    with pytest.raises(ValueError, match=named):
        wf_transformers.attach(model, alone(), activation_checkpointing=wrong)
    assert model.config._attn_implementation == "sdpa" and not model.model.gradient_checkpointing


def test_a_model_without_such_layers_is_refused_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="Sequential is none: leave it out"):
        wf_transformers.attach(model, alone(), activation_checkpointing=OFFLOAD)
    model = build("llama", "sdpa", {})
    model.supports_gradient_checkpointing = False
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM is none"):
        wf_transformers.attach(model, alone(), activation_checkpointing=OFFLOAD)
    assert model.config._attn_implementation == "sdpa"
