"""Transformers of diffusers on ranks compute the sample, loss and gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no attention registry"
)

import wf_diffusers  # noqa: E402
from tests.docs.pages import blocks  # noqa: E402
from tests.helpers import run_processes, run_threads  # noqa: E402
from tests.integrations.diffusers_models import FAMILIES, build, randn  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_backends.comm import World  # noqa: E402
from wf_diffusers.attention import Attention  # noqa: E402

ModelAndKwargs = tuple[Any, dict[str, Any]]


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def one_rank() -> Any:
    return sequence_parallel(World(1).comm(0))


def attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "processor")]


def loss_of(sample: Tensor) -> Tensor:
    return (sample - randn(*sample.shape)).square().mean()


def assert_equal_to_one_device(
    family: str, size: int, layout: str = "zigzag", checkpointing: bool = False, **sizes: Any
) -> None:
    """Compare sample, loss, and every gradient's mean over the ranks, to 1e-9."""
    reference, kwargs = build(family, **sizes)
    expected_sample = reference(**kwargs).sample
    expected_loss = loss_of(expected_sample)
    expected_loss.backward()
    expected_grads = gradients(reference)

    def run_rank(comm: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = models[comm.rank]
        if checkpointing:
            model.enable_gradient_checkpointing()
        with wf_diffusers.attach(model, sequence_parallel(comm, layout)):
            sample = model(**kwargs).sample
            loss = loss_of(sample)
            loss.backward()
        return sample.detach(), loss.detach(), gradients(model)

    models = [build(family, **sizes)[0] for _ in range(size)]
    results = run_threads(size, run_rank)
    for sample, loss, grads in results:
        assert_close(sample, expected_sample, "sample")
        assert_close(loss, expected_loss, "loss")
        assert grads.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        assert_close(sum(grads[name] for *_, grads in results) / size, expected, name)


def assert_call_is_refused(
    models: list[ModelAndKwargs], error: type[Exception], message: str
) -> list[Exception]:
    """The call of each rank's model, attached, raises; the errors by rank."""

    def run_rank(comm: Any) -> Exception:
        model, kwargs = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            with pytest.raises(error, match=message) as raised:
                model(**kwargs)
        return raised.value

    return run_threads(len(models), run_rank)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_sample_loss_and_gradients_are_those_of_one_device(
    family: str, size: int, layout: str
) -> None:
    assert_equal_to_one_device(family, size, layout)


@pytest.mark.parametrize(("text", "image"), [(1, 16), (13, 4), (29, 12)])
def test_a_rank_may_have_no_text_or_no_image(text: int, image: int) -> None:
    assert_equal_to_one_device("flux", 4, "contiguous", text=text, image=image)


def test_learned_position_embeddings_are_sharded() -> None:
    assert_equal_to_one_device("cogvideox", 2, rotary=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_recomputed_blocks_are_those_of_one_device(family: str) -> None:
    assert_equal_to_one_device(family, 2, checkpointing=True)


def test_recomputed_blocks_of_two_calls_get_the_rows_of_their_own_call() -> None:
    """CogVideoX, called for two lengths before one backward."""
    models = [build("cogvideox")[0] for _ in range(3)]
    _, kwargs = build("cogvideox")
    shorter = {"hidden_states": randn(2, 1, 2, 6, 6), "image_rotary_emb": (randn(9, 16),) * 2}

    def grads_of(model: Any) -> dict[str, Tensor]:
        samples = [model(**kwargs).sample, model(**kwargs | shorter).sample]
        sum(loss_of(sample) for sample in samples).backward()
        return gradients(model)

    def run_rank(comm: Any) -> dict[str, Tensor]:
        model = models[comm.rank]
        model.enable_gradient_checkpointing()
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            return grads_of(model)

    results = run_threads(2, run_rank)
    for name, expected in grads_of(models[2]).items():
        assert_close(sum(grads[name] for grads in results) / 2, expected, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_under_autocast_is_in_its_dtype(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen-Image gives it queries and keys in float32 beside values in bfloat16."""
    monkeypatch.undo()  # float32 is meant here
    (expected_model, kwargs), *models = (build(family) for _ in range(3))
    kwargs = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, kwargs)

    def sample_of(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.float()(**kwargs).sample.detach().float()

    def run_rank(comm: Any) -> tuple[Tensor, set[torch.dtype]]:
        sp, dtypes = sequence_parallel(comm), set[torch.dtype]()
        attend = sp.attention
        monkeypatch.setattr(
            sp, "attention", lambda q, *a, **k: dtypes.add(q.dtype) or attend(q, *a, **k)
        )
        with wf_diffusers.attach(models[comm.rank][0], sp):
            return sample_of(models[comm.rank][0]), dtypes

    expected = sample_of(expected_model)
    for sample, dtypes in run_threads(2, run_rank):
        assert dtypes == {torch.bfloat16}
        assert (sample - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_restores_the_model(family: str) -> None:
    model, kwargs = build(family)
    objects = [x for module in attention_modules(model) for x in (module, module.processor)]
    attributes = [dict(vars(x)) for x in objects]
    sample = model(**kwargs).sample
    with wf_diffusers.attach(model, one_rank()):
        assert [vars(x) for x in objects] != attributes
    assert [vars(x) for x in objects] == attributes
    assert torch.equal(model(**kwargs).sample, sample)


def test_text_shorter_than_the_number_of_ranks_is_refused() -> None:
    models = [build("qwen_image", text=1) for _ in range(2)]
    message = r"streams of \[1, 16\] tokens are too short for 2 ranks"
    assert_call_is_refused(models, ValueError, message)


@pytest.mark.parametrize(
    ("family", "argument", "message"),
    [
        ("flux", {"controlnet_block_samples": [torch.ones(1)]}, "residuals of a ControlNet"),
        ("flux", {"joint_attention_kwargs": {"ip_adapter_masks": 1}}, "an IP-Adapter"),
        ("wan", {"timestep": torch.ones(1, 27)}, r"a timestep \(1, 27\)"),
    ],
    ids=["ControlNet", "IP-Adapter", "timesteps by token"],
)
def test_an_argument_that_cannot_be_sharded_is_refused(
    family: str, argument: dict[str, Any], message: str
) -> None:
    models = []
    for _ in range(2):
        model, kwargs = build(family)
        models.append((model, kwargs | argument))
    assert_call_is_refused(models, NotImplementedError, message)


def test_dropout_in_training_is_refused() -> None:
    models = [build("dit") for _ in range(2)]
    for model, _ in models:
        model.train().transformer_blocks[0].attn1.to_out[1].p = 0.5
    assert_call_is_refused(models, NotImplementedError, "has dropout")


def test_noise_that_differs_between_ranks_is_refused_with_advice() -> None:
    models = [build("wan") for _ in range(2)]
    for rank, (_, kwargs) in enumerate(models):
        kwargs["hidden_states"] = kwargs["hidden_states"] + rank
    for error in assert_call_is_refused(models, ValueError, "hidden_states"):
        assert "draw the same noise" in error.__notes__[0]


def test_a_model_of_an_unknown_class_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear is none of the models .* Flux"):
        wf_diffusers.attach(torch.nn.Linear(2, 2), one_rank())


class PassThroughProcessor:
    """A processor that does not look up attention in diffusers' registry."""

    def __call__(self, _: Any, rows: Any, text: Any = None, *args: Any) -> Any:
        return rows if text is None else (rows, text)


def test_processors_that_bypass_the_attention_registry_are_refused() -> None:
    def run_rank(comm: Any) -> None:
        model, kwargs = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            for module in attention_modules(model):
                module.set_processor(PassThroughProcessor())
            with pytest.raises(NotImplementedError, match="0 of the 4 attention modules"):
                model(**kwargs)

    models = [build("flux") for _ in range(2)]
    run_threads(2, run_rank)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"attn_mask": torch.ones(1, 2)}, "an attention mask"),
        ({"is_causal": True}, "causal attention"),
    ],
    ids=["mask", "causal"],
)
def test_masks_are_refused(argument: dict[str, Any], message: str) -> None:
    q, k, v = (torch.ones(1, 2, 1, 8) for _ in range(3))
    with pytest.raises(NotImplementedError, match=message):
        Attention(one_rank())(q, k, v, **argument)


def run_script_of_docs(_: Any) -> None:
    page = "docs/diffusers.md"
    (script,) = [block.text for block in blocks("python") if block.page == page]
    exec(compile(script, page, "exec", dont_inherit=True), {"__name__": "__main__"})


@pytest.mark.processes
def test_the_script_of_docs_diffusers_runs_on_four_processes() -> None:
    run_processes(4, run_script_of_docs)
