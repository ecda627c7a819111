"""Transformers of diffusers on ranks give what they give on one device: sample, loss, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no attention registry"
)

import wf_diffusers  # noqa: E402
from tests.docs.pages import blocks  # noqa: E402
from tests.helpers import run_processes, run_threads  # noqa: E402
from tests.integrations.diffusers_models import FAMILIES, build, random  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_backends.comm import World  # noqa: E402
from wf_diffusers.attention import Attention  # noqa: E402


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def loss_of(sample: Tensor) -> Tensor:
    return (sample - random(*sample.shape)).square().mean()


def assert_equal(
    family: str, size: int, layout: str = "zigzag", checkpoint: bool = False, **sizes: Any
) -> None:
    """The sample, the loss, and the mean over the ranks of every gradient, to 1e-9."""
    reference, given = build(family, **sizes)
    sample = reference(**given).sample
    loss = loss_of(sample)
    loss.backward()
    wanted = gradients(reference)

    def rank(comm: Any) -> Any:
        model = models[comm.rank]
        if checkpoint:
            model.enable_gradient_checkpointing()
        with wf_diffusers.attach(model, sequence_parallel(comm, layout)):
            found = model(**given).sample
            share = loss_of(found)
            share.backward()
        return found.detach(), share.detach(), gradients(model)

    models = [build(family, **sizes)[0] for _ in range(size)]
    results = run_threads(size, rank)
    for found, share, grads in results:
        assert_close(found, sample, "sample")
        assert_close(share, loss, "loss")
        assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert_close(sum(grads[name] for *_, grads in results) / size, grad, name)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_models(family: str, size: int, layout: str) -> None:
    assert_equal(family, size, layout)


@pytest.mark.parametrize(("text", "image"), [(1, 16), (13, 4), (29, 12)])
def test_ranks_without_text_and_ranks_without_image(text: int, image: int) -> None:
    assert_equal("flux", 4, "contiguous", text=text, image=image)


def test_learned_places_in_place_of_rotary_embeddings() -> None:
    assert_equal("cogvideox", 2, rotary=False)


def test_text_that_is_too_short_for_the_ranks_is_refused() -> None:
    def rank(comm: Any) -> None:
        model, given = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            with pytest.raises(
                ValueError, match=r"streams of \[1, 16\] tokens are too short for 2 ranks"
            ):
                model(**given)

    models = [build("qwen_image", text=1) for _ in range(2)]
    run_threads(2, rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_are_cut_again(family: str) -> None:
    assert_equal(family, 2, checkpoint=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_handle_leaves_the_model_as_it_was(family: str) -> None:
    model, given = build(family)
    modules = [x for m in attention_of(model) for x in (m, m.processor)]
    before = [dict(vars(x)) for x in modules]
    sample = model(**given).sample
    with wf_diffusers.attach(model, alone()):
        assert before != [vars(x) for x in modules]
    assert before == [vars(x) for x in modules]
    assert torch.equal(model(**given).sample, sample)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("flux", {"controlnet_block_samples": [torch.ones(1)]}, "residuals of a ControlNet"),
        ("flux", {"joint_attention_kwargs": {"ip_adapter_masks": 1}}, "an IP-Adapter"),
        ("wan", {"timestep": torch.ones(1, 27)}, r"a timestep \(1, 27\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(family: str, more: dict[str, Any], message: str) -> None:
    def rank(comm: Any) -> None:
        model, given = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            with pytest.raises(NotImplementedError, match=message):
                model(**given | more)

    models = [build(family) for _ in range(2)]
    run_threads(2, rank)


def test_models_that_are_not_in_the_table_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear is none of the models .* Flux"):
        wf_diffusers.attach(torch.nn.Linear(2, 2), alone())


def test_dropout_in_training_is_refused() -> None:
    def rank(comm: Any) -> None:
        model, given = models[comm.rank]
        model.train().transformer_blocks[0].attn1.to_out[1].p = 0.5
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            with pytest.raises(NotImplementedError, match="has dropout"):
                model(**given)

    models = [build("dit") for _ in range(2)]
    run_threads(2, rank)


class Own:
    """A processor that asks nobody."""

    def __call__(self, _: Any, rows: Any, text: Any = None, *more: Any) -> Any:
        return rows if text is None else (rows, text)


def test_a_processor_that_asks_nobody_is_an_error() -> None:
    def rank(comm: Any) -> None:
        model, given = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            for module in attention_of(model):
                module.set_processor(Own())
            with pytest.raises(NotImplementedError, match="0 of the 4 attention modules"):
                model(**given)

    models = [build("flux") for _ in range(2)]
    run_threads(2, rank)


def test_masks_are_refused() -> None:
    attend = Attention(alone())
    with pytest.raises(NotImplementedError, match="an attention mask"):
        attend(*[torch.ones(1, 2, 1, 8)] * 3, attn_mask=torch.ones(1, 2))
    with pytest.raises(NotImplementedError, match="causal attention"):
        attend(*[torch.ones(1, 2, 1, 8)] * 3, is_causal=True)


def test_ranks_with_other_noise_are_told() -> None:
    def rank(comm: Any) -> None:
        model, given = models[comm.rank]
        given["hidden_states"] = given["hidden_states"] + comm.rank
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            with pytest.raises(ValueError, match="hidden_states") as found:
                model(**given)
        assert "draw the same noise" in found.value.__notes__[0]

    models = [build("wan") for _ in range(2)]
    run_threads(2, rank)


def the_page(_: Any) -> None:
    """The script of docs/diffusers.md, on one rank."""
    (block,) = blocks_of("docs/diffusers.md")
    exec(compile(block, "docs/diffusers.md", "exec", dont_inherit=True), {"__name__": "__main__"})


def blocks_of(page: str) -> list[str]:
    return [block.text for block in blocks("python") if block.page == page]


@pytest.mark.processes
def test_the_script_of_the_page() -> None:
    run_processes(4, the_page)


def alone() -> Any:
    return sequence_parallel(World(1).comm(0))


def attention_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "processor")]
