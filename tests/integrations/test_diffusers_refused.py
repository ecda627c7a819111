"""Calls of transformers of diffusers that are refused, on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no attention registry"
)

from diffusers.hooks.smoothed_energy_guidance_utils import (  # noqa: E402
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)

import wf_diffusers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.diffusers_models import (  # noqa: E402
    FAMILIES,
    TWO_TEXTS,
    attention_modules,
    build,
    one_rank,
)
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from wf_diffusers.attention import TorchAttention  # noqa: E402

ModelAndKwargs = tuple[Any, dict[str, Any]]


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


def test_text_shorter_than_the_number_of_ranks_is_refused() -> None:
    models = [build("qwen_image", text=1) for _ in range(2)]
    message = r"streams of \[1, 16\] tokens are too short for 2 ranks"
    assert_call_is_refused(models, ValueError, message)


@pytest.mark.parametrize(
    ("family", "argument", "message"),
    [
        ("flux", {"joint_attention_kwargs": {"ip_adapter_masks": 1}}, "an IP-Adapter"),
        ("sd3", {"timestep": torch.ones(2, 9)}, r"a timestep \(2, 9\)"),
        ("sd3", {"skip_layers": [0]}, "the first block of the model did not run"),
        ("chroma", {"attention_mask": torch.ones(2, 21).tril()}, "a mask of text and image in one"),
        (
            "hunyuan_video",
            {"encoder_attention_mask": torch.ones(2, 7).triu(1)},
            r"encoder_attention_mask has padding before tokens of the text, .* \[6, 5\]",
        ),
    ],
    ids=[
        "IP-Adapter",
        "timesteps by token",
        "skipped block",
        "joint mask",
        "padding before the text",
    ],
)
def test_an_argument_that_cannot_be_sharded_is_refused(
    family: str, argument: dict[str, Any], message: str
) -> None:
    models = []
    for _ in range(2):
        model, kwargs = build(family)
        models.append((model, kwargs | argument))
    assert_call_is_refused(models, NotImplementedError, message)


def test_a_model_that_replaces_tokens_of_the_first_frame_is_refused() -> None:
    """HunyuanVideo's image to video: a block would take the first tokens of a rank for them."""
    models = [build("hunyuan_video", image_condition_type="token_replace") for _ in range(2)]
    assert_call_is_refused(models, NotImplementedError, "image_condition_type='token_replace'")


def test_a_cache_that_skips_blocks_by_the_values_of_tokens_is_refused() -> None:
    """Ranks would skip different blocks, and wait for each other for ever."""
    models = [build("flux") for _ in range(2)]
    for model, _ in models:
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1.3))
    assert_call_is_refused(models, NotImplementedError, "FBCHeadBlockHook of transformer_blocks.0")


def test_a_cache_beside_texts_of_different_lengths_is_refused() -> None:
    """It would take the samples, which are computed one after the other, for steps."""
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: 500,
    )
    models = [build("mochi", TWO_TEXTS) for _ in range(2)]
    for model, _ in models:
        model.enable_cache(config)
    assert_call_is_refused(models, NotImplementedError, "has a cache, and texts of different len")


@pytest.mark.skipif("glm_image" not in FAMILIES, reason="diffusers before 0.37")
def test_keys_of_given_images_are_refused_and_a_cache_that_is_skipped_is_not() -> None:
    """The pipeline of GLM-Image always gives a cache."""
    caches = SimpleNamespace(caches=[SimpleNamespace(mode=None)] * 2)
    models = [build("glm_image") for _ in range(2)]

    def run_rank(comm: Any) -> None:
        model, kwargs = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            expected = model(**kwargs).sample
            assert torch.equal(model(**kwargs, kv_caches=caches).sample, expected)

    run_threads(2, run_rank)
    for _, kwargs in models:
        kwargs["kv_caches"] = SimpleNamespace(caches=[SimpleNamespace(mode="read")] * 2)
    assert_call_is_refused(models, NotImplementedError, "keys of other images")


def test_parallelism_of_diffusers_itself_is_refused() -> None:
    models = [build("flux") for _ in range(2)]
    for model, _ in models:
        model._parallel_config = object()  # as enable_parallelism(config=...) sets it
    assert_call_is_refused(models, NotImplementedError, "diffusers' own parallelism")


def test_a_guidance_by_values_instead_of_attention_is_refused() -> None:
    """It would be ignored: perturbed attention, whose scores diffusers skips by a mode of torch."""
    models = [build("pixart") for _ in range(2)]
    scores = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
    config = diffusers.LayerSkipConfig(indices=[1], fqn="transformer_blocks", **scores)

    def run_rank(comm: Any) -> None:
        model, kwargs = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            diffusers.hooks.apply_layer_skip(model, config)
            with pytest.raises(NotImplementedError, match="AttentionProcessorSkipHook of"):
                model(**kwargs)

    run_threads(2, run_rank)


def test_a_guidance_that_smooths_queries_over_tokens_is_refused() -> None:
    models = [build("wan") for _ in range(2)]
    for model, _ in models:
        config = SmoothedEnergyGuidanceConfig(indices=[1], fqn="blocks")
        _apply_smoothed_energy_guidance_hook(model, config, 1.0)
    assert_call_is_refused(models, NotImplementedError, "SmoothedEnergyGuidanceHook of blocks.1")


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


def test_rotary_embeddings_that_differ_between_ranks_are_refused() -> None:
    models = [build("cogvideox") for _ in range(2)]
    for rank, (_, kwargs) in enumerate(models):
        cos, sin = kwargs["image_rotary_emb"]
        kwargs["image_rotary_emb"] = (cos, sin + rank)
    assert_call_is_refused(models, ValueError, r"image_rotary_emb\[1\]")


def test_a_model_of_an_unknown_class_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear is none of the models .* Flux"):
        wf_diffusers.attach(torch.nn.Linear(2, 2), one_rank())
    with pytest.raises(ValueError, match="sp must be a SequenceParallel, .*, got a dict"):
        wf_diffusers.attach(torch.nn.Linear(2, 2), {"sequence_parallel_size": 2})  # type: ignore
    sana = diffusers.SanaTransformer2DModel(num_layers=0, num_attention_heads=1)
    with pytest.raises(NotImplementedError, match=r"Sana.* \(linear attention sums .*\): .*Flux"):
        wf_diffusers.attach(sana, one_rank())
    compiled = torch.compile(build("dit")[0])
    with pytest.raises(NotImplementedError, match="Attach the DiT.* inside of it, its _orig_mod"):
        wf_diffusers.attach(compiled, one_rank())


def test_a_model_that_is_attached_already_is_refused() -> None:
    model, _ = build("flux")
    with wf_diffusers.attach(model, one_rank()):
        with pytest.raises(ValueError, match="attached already"):
            wf_diffusers.attach(model, one_rank())
    wf_diffusers.attach(model, one_rank())


def test_a_call_past_the_hooks_of_the_model_is_refused() -> None:
    """HunyuanVideo's padding of the text would be attended to."""
    models = [build("hunyuan_video") for _ in range(2)]

    def run_rank(comm: Any) -> None:
        model, kwargs = models[comm.rank]
        with wf_diffusers.attach(model, sequence_parallel(comm)):
            model(**kwargs)
            with pytest.raises(NotImplementedError, match=r"model.forward\(...\) was called"):
                model.forward(**kwargs)

    run_threads(2, run_rank)


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
            with pytest.raises(NotImplementedError, match="FluxAttention did not call WallFacer's"):
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
        TorchAttention(one_rank())(q, k, v, **argument)
