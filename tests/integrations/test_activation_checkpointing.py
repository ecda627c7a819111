"""The key "activation_checkpointing": layers keep only their inputs, with "offload" on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

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
from wf_transformers import ModelOptions  # noqa: E402
from wf_transformers.attention.masks import MaskCheck  # noqa: E402
from wf_transformers.memory import checkpoints  # noqa: E402

OFFLOAD = {"offload": True}
DOCUMENTS = (0, 5, 16, 23)
Shapes = list[tuple[int, ...]]
HIDDEN_STATES = (1, 24, 32)  # (b, S, hidden size) of the batches of 24 tokens below


class RecordingSaveOnCpu(torch.autograd.graph.save_on_cpu):
    """torch's context, which also records the shapes of the tensors that it saves."""

    def __init__(self, shapes: Shapes, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        pack = self.pack_hook

        def record_and_pack(tensor: Tensor) -> Any:
            shapes.append(tuple(tensor.shape))
            return pack(tensor)

        self.pack_hook = record_and_pack


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """The shapes of the tensors that go to the host, in this order."""
    shapes: Shapes = []
    monkeypatch.setattr(
        checkpoints, "save_on_cpu", lambda **kwargs: RecordingSaveOnCpu(shapes, **kwargs)
    )
    return shapes


def train_step(
    model: nn.Module, handle: Any, labelled: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    local = handle.shard_batch(labelled)
    logits = model(**wf_transformers.forward_kwargs(model, local)).logits
    loss = handle.sp.loss(logits, local["labels"])
    loss.backward()
    return loss.detach(), {name: grad.clone() for name, grad in gradients(model).items()}


def one_rank() -> SequenceParallel:
    return SequenceParallel(SequenceParallelConfig(), World(1).comm(0))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox", "bert"])
@pytest.mark.parametrize("borders", [None, DOCUMENTS])
def test_loss_and_gradients_are_those_without_checkpointing(family: str, borders: Any) -> None:
    """On two ranks, each with the same attention: what is compared is the recomputation alone."""
    labelled = batch(cu_seqlens=borders) if borders else batch()

    def rank(comm: Any) -> None:
        def train_with(checkpointing: dict[str, Any] | None) -> tuple[Tensor, dict[str, Tensor]]:
            model, sp = build(family, "eager", {}), sequence_parallel(comm)
            with wf_transformers.attach(
                model, sp, activation_checkpointing=checkpointing
            ) as handle:
                return train_step(model, handle, labelled)

        expected_loss, expected_grads = train_with(None)
        for checkpointing in ({"offload": False}, OFFLOAD):
            loss, grads = train_with(checkpointing)
            assert_close(loss, expected_loss, f"loss with {checkpointing}")
            assert grads.keys() == expected_grads.keys()
            for name, grad in expected_grads.items():
                assert_close(grads[name], grad, f"{name} with {checkpointing}")

    run_threads(2, rank)


def test_only_the_inputs_of_layers_go_to_the_host(offloaded: Shapes) -> None:
    model = build("llama", "sdpa", {})
    with wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD) as handle:
        train_step(model, handle, batch(seqlen=24))
    assert [shape for shape in offloaded if len(shape) == 3] == [HIDDEN_STATES] * 2  # two layers
    # nothing of (tokens, tokens), of the intermediate size 48 or the vocabulary of 61
    assert all(max(shape) <= 32 for shape in offloaded)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, "checkpoint_kwargs"])
def test_checkpointing_that_is_enabled_after_attach_is_offloaded(
    kwargs: Any, offloaded: Shapes
) -> None:
    """A Trainer with gradient_checkpointing=True enables it when it starts to train."""
    model = build("llama", "sdpa", {})
    with wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD) as handle:
        model.enable_input_require_grads()  # the reentrant variant (None) needs it
        own = handle.checkpoint_kwargs if kwargs == "checkpoint_kwargs" else kwargs
        model.gradient_checkpointing_enable(own)
        train_step(model, handle, batch(seqlen=24))
    assert HIDDEN_STATES in offloaded


@pytest.mark.parametrize("key", [None, {"offload": False}], ids=["by_the_model", "by_the_key"])
def test_compiled_model_recomputes_its_layers(key: Any) -> None:
    results, counter = [], CompileCounter()
    for compiled in (False, True):
        model = build("llama", "sdpa", {}).train()
        handle = wf_transformers.attach(model, one_rank(), activation_checkpointing=key)
        if key is None:
            model.gradient_checkpointing_enable()
        if compiled:
            model.compile(backend=counter)
        results.append(train_step(model, handle, batch(cu_seqlens=DOCUMENTS)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    assert counter.frame_count > 0


def test_compiled_graphs_do_not_depend_on_an_earlier_mask() -> None:
    """Which may be freed while the compiler runs."""
    check, earlier = MaskCheck(), [torch.zeros(1, 1, 1, 1)]
    check(earlier[0], True, None)

    def backend(graph: Any, _: Any) -> Any:
        earlier.clear()
        return graph

    @torch.compile(backend=backend)
    def layer(x: Tensor, mask: Tensor) -> Tensor:
        x = x + 1
        check(mask, True, None)
        return x

    mask = earlier[0].clone()
    layer(torch.ones(2), mask)
    assert not earlier


def test_checkpointing_that_is_disabled_after_attach_offloads_nothing(offloaded: Shapes) -> None:
    model = build("llama", "sdpa", {})
    with wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD) as handle:
        model.gradient_checkpointing_disable()
        train_step(model, handle, batch(seqlen=24))
    assert not offloaded


@pytest.mark.parametrize("enabled_before", [False, True])
def test_remove_restores_the_checkpointing_of_the_model(
    enabled_before: bool, offloaded: Shapes
) -> None:
    def checkpointing_of(model: Any) -> list[Any]:
        attributes = vars(model.model)
        return [
            attributes.get(name)
            for name in ("gradient_checkpointing", "_gradient_checkpointing_func")
        ]

    model = build("llama", "sdpa", {})
    if enabled_before:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = checkpointing_of(model)
    handle = wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD)
    train_step(model, handle, batch())
    assert offloaded
    handle.remove()
    assert checkpointing_of(model) == before
    offloaded.clear()
    model(**batch()).loss.backward()
    assert not offloaded


def test_the_key_is_split_from_those_of_sequence_parallelism() -> None:
    config = {"sequence_parallel_size": 2, "activation_checkpointing": OFFLOAD}
    model_keys = ModelOptions(checkpoints.Checkpointing(offload=True))
    assert ModelOptions.split(config) == ({"sequence_parallel_size": 2}, model_keys)
    assert ModelOptions.split({"route": "ring"}) == ({"route": "ring"}, ModelOptions())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, '"activation_checkpointing" must be a block such as .*, got True'),
        ({"ofload": True}, '"activation_checkpointing.ofload" is an unknown key; did you mean'),
        ({"offload": "cpu"}, '"activation_checkpointing.offload" must be true or false, got'),
        ({"offload": 1}, "must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_refused_before_the_model_changes(value: Any, message: str) -> None:
    model = build("llama", "sdpa", {})
    with pytest.raises(ValueError, match=message):
        wf_transformers.attach(model, one_rank(), activation_checkpointing=value)
    assert model.config._attn_implementation == "sdpa" and not model.model.gradient_checkpointing


def test_a_module_that_is_no_hugging_face_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="Sequential is none: leave it out"):
        wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD)


def test_a_model_that_does_not_support_checkpointing_is_refused_before_it_changes() -> None:
    model = build("llama", "sdpa", {})
    model.supports_gradient_checkpointing = False
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM is none"):
        wf_transformers.attach(model, one_rank(), activation_checkpointing=OFFLOAD)
    assert model.config._attn_implementation == "sdpa"
