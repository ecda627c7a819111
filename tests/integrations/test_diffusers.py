"""Transformers of diffusers on ranks compute the sample, loss and gradients of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no attention registry"
)

import wf_diffusers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations import diffusers_images as images  # noqa: E402
from tests.integrations.diffusers_images import randn  # noqa: E402
from tests.integrations.diffusers_models import (  # noqa: E402
    FAMILIES,
    TWO_TEXTS,
    attention_modules,
    build,
    one_rank,
)
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_diffusers.families import SD3, TEXT  # noqa: E402
from wf_diffusers.hooks import TransformerHooks  # noqa: E402
from wf_transformers import Handle  # noqa: E402


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def sample_of(model: Any, kwargs: dict[str, Any]) -> Tensor:
    """(b, ...); Z-Image gives a list of samples, LTX 2 audio too."""
    out = model(**kwargs)
    sample = out.sample
    if "audio_sample" in out:
        return torch.cat([sample, out.audio_sample], 1)
    return sample if isinstance(sample, Tensor) else torch.stack(sample)


def loss_of(sample: Tensor) -> Tensor:
    return (sample - randn(*sample.shape)).square().mean()


def assert_equal_to_one_device(
    family: str, size: int, layout: str = "zigzag", checkpointing: bool = False, **sizes: Any
) -> None:
    """Compare sample, loss, and every gradient's mean over the ranks, to 1e-9."""
    reference, kwargs = build(family, **sizes)
    expected_sample = sample_of(reference, kwargs)
    expected_loss = loss_of(expected_sample)
    expected_loss.backward()
    expected_grads = gradients(reference)

    def run_rank(comm: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = models[comm.rank]
        if checkpointing:
            model.enable_gradient_checkpointing()
        with wf_diffusers.attach(model, sequence_parallel(comm, layout)):
            sample = sample_of(model, kwargs)
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


def assert_samples_on_ranks(models: list[Any], kwargs: dict[str, Any], expected: Tensor) -> None:
    """Compare the sample of each rank, which has one of the models."""

    def run_rank(comm: Any) -> Tensor:
        with wf_diffusers.attach(models[comm.rank], sequence_parallel(comm)):
            return sample_of(models[comm.rank], kwargs)

    for sample in run_threads(len(models), run_rank):
        assert_close(sample, expected, "sample")


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_sample_loss_and_gradients_are_those_of_one_device(
    family: str, size: int, layout: str
) -> None:
    assert_equal_to_one_device(family, size, layout)


@pytest.mark.parametrize("family", TWO_TEXTS)
def test_samples_may_have_texts_of_different_lengths(family: str) -> None:
    """As both prompts of a guidance in one batch, or instance and class prompts in training."""
    recomputed = family != "hunyuan_image"  # diffusers' own TypeError
    assert_equal_to_one_device(family, 2, checkpointing=recomputed, table=TWO_TEXTS)


class MaskedSD3(diffusers.SD3Transformer2DModel):
    """With a mask of its text, as Qwen-Image has one since diffusers 0.37."""

    def forward(self, text_mask: Tensor, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


def test_residuals_of_a_controlnet_are_cut_for_each_of_two_texts() -> None:
    """The image's rows of a rank follow from the length of the sample's own text."""
    family = replace(SD3, text_masks=(("text_mask", TEXT),), last_stream_attends_alone=False)
    table = {"sd3": partial(images.sd3, dual_attention_layers=())}
    (reference, kwargs), *built = (build("sd3", table) for _ in range(4))
    kwargs["block_controlnet_hidden_states"] = [randn(2, 9, 32)] * 2
    expected = []
    for i, length in enumerate((9, 4)):
        sample = tree_map_only(Tensor, lambda x, i=i: x[i : i + 1], kwargs)
        expected.append(reference(**sample | {TEXT: sample[TEXT][:, :length]}).sample)

    def run_rank(comm: Any) -> Tensor:
        model, handle = built[comm.rank][0], Handle(sequence_parallel(comm))
        model.__class__ = MaskedSD3
        TransformerHooks(model, family, handle)
        with handle:
            return model(**kwargs, text_mask=torch.arange(9) < torch.tensor([[9], [4]])).sample

    for sample in run_threads(3, run_rank):
        assert_close(sample, torch.cat(expected), "sample")


def test_a_mask_of_ones_hides_nothing() -> None:
    """Diffusers' pipeline of Chroma always gives a mask, of numbers that are added to scores."""
    model, kwargs = build("chroma")
    kwargs["attention_mask"] = torch.ones(2, 21, dtype=torch.float64)
    models = [build("chroma")[0] for _ in range(2)]
    assert_samples_on_ranks(models, kwargs, sample_of(model, kwargs))


@pytest.mark.parametrize(("text", "image"), [(1, 16), (13, 4), (29, 12)])
def test_a_rank_may_have_no_text_or_no_image(text: int, image: int) -> None:
    assert_equal_to_one_device("flux", 4, "contiguous", text=text, image=image)


def test_learned_position_embeddings_are_sharded() -> None:
    assert_equal_to_one_device("cogvideox", 2, rotary=False)


@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() - {"hunyuan_image", "hunyuan_dit"})
)  # diffusers' own TypeError, and a model that recomputes nothing
def test_gradients_with_recomputed_blocks_are_those_of_one_device(family: str) -> None:
    assert_equal_to_one_device(family, 2, checkpointing=True)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_blocks_wrapped_before_attach_give_the_sample_of_one_device(family: str) -> None:
    """By torch's checkpoint_wrapper; torch.compile(block) is such a wrapper too."""
    (reference, kwargs), *built = (build(family) for _ in range(3))
    models = [model for model, _ in built]
    for model in models:
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("Block"))
    assert_samples_on_ranks(models, kwargs, sample_of(reference, kwargs))


def test_a_replaced_last_layer_gathers() -> None:
    """As an adapter that is loaded after attach puts another module there, around the old one."""
    reference, kwargs = build("flux")
    expected = 2 * sample_of(reference, kwargs)

    def run_rank(comm: Any) -> list[Tensor]:
        model = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            original = model.proj_out
            model.proj_out = Doubled(original)
            doubled = sample_of(model, kwargs)
            model.proj_out = original
            return [doubled, 2 * sample_of(model, kwargs)]

    models = [build("flux")[0] for _ in range(2)]
    for samples in run_threads(2, run_rank):
        for sample in samples:
            assert_close(sample, expected, "sample")


class Doubled(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.layer.weight.shape[0])
        return self.layer(x) + self.layer(x).view(shape)  # an adapter knows no other rows


SHORTER = {
    "cogvideox": {"hidden_states": randn(2, 1, 2, 6, 6), "image_rotary_emb": (randn(9, 16),) * 2},
    "framepack": {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]] * 2)},
    "kandinsky5": {
        "hidden_states": randn(1, 2, 6, 6, 2),
        "visual_rope_pos": (torch.arange(2), torch.arange(3), torch.arange(3)),
    },
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & SHORTER))
def test_recomputed_blocks_of_two_calls_get_the_rows_of_their_own_call(family: str) -> None:
    """Called for two lengths before one backward; two of them gather after their last block, which
    a reentrant checkpoint does again."""
    models = [build(family)[0] for _ in range(3)]
    _, kwargs = build(family)

    def grads_of(model: Any) -> dict[str, Tensor]:
        samples = [model(**kwargs).sample, model(**kwargs | SHORTER[family]).sample]
        sum(loss_of(sample) for sample in samples).backward()
        return gradients(model)

    def run_rank(comm: Any) -> dict[str, Tensor]:
        model = models[comm.rank]
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
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

    def bfloat16_sample(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sample_of(model.float(), kwargs).detach().float()

    def run_rank(comm: Any) -> tuple[Tensor, set[torch.dtype]]:
        sp, dtypes = sequence_parallel(comm), set[torch.dtype]()
        attend = sp.attention
        monkeypatch.setattr(
            sp, "attention", lambda q, *a, **k: dtypes.add(q.dtype) or attend(q, *a, **k)
        )
        with wf_diffusers.attach(models[comm.rank][0], sp):
            return bfloat16_sample(models[comm.rank][0]), dtypes

    expected = bfloat16_sample(expected_model)
    for sample, dtypes in run_threads(2, run_rank):
        assert dtypes == {torch.bfloat16}
        assert (sample - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_cache_that_skips_attention_by_the_step_gives_the_samples_of_one_device() -> None:
    """Every second step of Wan takes its attention from the step before."""

    def samples_of(model: Any) -> list[Tensor]:
        with torch.no_grad(), model.cache_context("denoising"):
            steps = [kwargs | {"hidden_states": kwargs["hidden_states"] * x} for x in range(1, 5)]
            return [model(**step).sample for step in steps]

    def run_rank(comm: Any) -> list[Tensor]:
        with wf_diffusers.attach(models[comm.rank], sequence_parallel(comm)):
            models[comm.rank].enable_cache(config)
            return samples_of(models[comm.rank])

    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1000),
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: 500,
    )
    models = [build("wan")[0] for _ in range(3)]
    _, kwargs = build("wan")
    uncached = samples_of(models[2])
    models[2].enable_cache(config)
    expected = samples_of(models[2])
    assert not torch.allclose(expected[-1], uncached[-1])
    for samples in run_threads(2, run_rank):
        for sample, expected_sample in zip(samples, expected, strict=True):
            assert_close(sample, expected_sample, "sample")


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_restores_the_model(family: str) -> None:
    model, kwargs = build(family)
    objects = [x for module in attention_modules(model) for x in (module, module.processor)]
    attributes = [dict(vars(x)) for x in objects]
    sample = sample_of(model, kwargs)
    with wf_diffusers.attach(model, one_rank()):
        assert [vars(x) for x in objects] != attributes
    assert [vars(x) for x in objects] == attributes
    assert torch.equal(sample_of(model, kwargs), sample)


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("wan", {"timestep": torch.tensor([[300]])}),
        ("sd3", {"skip_layers": [1]}),
        ("flux", {"joint_attention_kwargs": {"scale": 1.0}}),
    ],
    ids=["one timestep for all tokens", "skipped block", "scale of adapters"],
)
def test_an_argument_that_is_not_of_tokens_changes_nothing(
    family: str, argument: dict[str, Any]
) -> None:
    (reference, kwargs), *built = (build(family) for _ in range(3))
    kwargs |= argument
    assert_samples_on_ranks([model for model, _ in built], kwargs, sample_of(reference, kwargs))
