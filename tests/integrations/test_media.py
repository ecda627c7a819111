"""Models that take images among tokens give on ranks what they give on one device."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import copied  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILDING,
    HEADS,
    SMALL,
    assert_close,
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_backends.comm import World  # noqa: E402
from wf_backends.parallel.data import prepare_batch  # noqa: E402
from wf_backends.parallel.loss import count_valid, token_loss  # noqa: E402
from wf_transformers import WholeBatchHooks  # noqa: E402

IMAGE, VIDEO, START = 58, 59, 57  # tokens
ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2}
WINDOWS = {"window_size": 8, "fullatt_block_indexes": [1], "intermediate_size": 24}
QWEN = {**SMALL, **HEADS, **ROPE, **TOKENS}
CLIP = {"num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}

GRIDS = [(1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 6, 4)]  # 4, 2, 2 and 6 tokens
VIDEO_GRID = (2, 4, 2)  # 4 tokens


def qwen2_vl() -> Any:
    vision = {**PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = tf.Qwen2VLConfig(**QWEN, vision_config=vision)
    return tf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    vision = {**PATCHES, **WINDOWS, "depth": 2, "hidden_size": 16, "out_hidden_size": 32}
    config = tf.Qwen2_5_VLConfig(**QWEN, vision_config=vision)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def llava() -> Any:
    text = tf.LlamaConfig(**SMALL, **HEADS)
    vision = tf.CLIPVisionConfig(**CLIP, hidden_size=16, intermediate_size=24)
    given = {"vision_config": vision, "text_config": text, "vision_feature_layer": -1}
    config = tf.LlavaConfig(**given, image_token_index=IMAGE)
    return tf.LlavaForConditionalGeneration(config)


MODELS = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "llava": llava}


def build(family: str, state: Any = None) -> Any:
    with BUILDING:
        torch.manual_seed(1)
        model = MODELS[family]()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.double().train()


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def qwen_batch(counts: tuple[int, ...] = (3, 1), video: bool = False) -> dict[str, Any]:
    """Two samples with `counts` of images, between words; the second with a video, too."""
    grids, rows = iter(GRIDS), []
    for at, count in enumerate(counts):
        row = [3 + at, 4, 5]
        for _ in range(count):
            t, h, w = next(grids)
            row += [START, *[IMAGE] * (t * h * w // 4), 7, 8]
        if video and at == len(counts) - 1:
            row += [START, *[VIDEO] * 4, 9]
        rows.append(row)
    used = GRIDS[: sum(counts)]
    patches = sum(t * h * w for t, h, w in used)
    found = {"pixel_values": draw(patches, 3 * 2 * 2 * 2), "image_grid_thw": torch.tensor(used)}
    if video:
        t, h, w = VIDEO_GRID
        found |= {
            "pixel_values_videos": draw(t * h * w, 24),
            "video_grid_thw": torch.tensor([VIDEO_GRID]),
        }
    return found | typed(padded(rows))


def typed(batch: dict[str, Any]) -> dict[str, Any]:
    """With the types of tokens that processors of transformers 5 give, and its models ask for."""
    asked = inspect.signature(tf.Qwen2VLForConditionalGeneration.forward).parameters
    ids = batch["input_ids"]
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return batch | ({"mm_token_type_ids": types} if "mm_token_type_ids" in asked else {})


def llava_batch(counts: tuple[int, ...] = (3, 1)) -> dict[str, Any]:
    rows = [[3 + at, 4, *([*[IMAGE] * 4, 7, 8] * count)] for at, count in enumerate(counts)]
    return {"pixel_values": draw(sum(counts), 3, 8, 8)} | padded(rows)


def padded(rows: list[list[int]]) -> dict[str, Any]:
    """Samples of the same length, with words at the end."""
    length = max(map(len, rows)) + 3
    ids = torch.tensor([row + [10 + at % 7 for at in range(length - len(row))] for row in rows])
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= START, -100)}


def one_device(family: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model = build(family)
    logits = model(**{k: v for k, v in given.items() if k != "labels"}, use_cache=False).logits
    labels = prepare_batch({k: given[k] for k in ("input_ids", "labels")}, multiple=1)["labels"]
    loss = token_loss(logits, labels, count_valid(labels))
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


def assert_equal(
    family: str, size: int, given: dict[str, Any], layout: str = "zigzag", twin: bool = False
) -> list[Any]:
    """Logits, loss and gradients to 1e-9. What of the media every rank encoded, by rank."""
    logits, loss, wanted = one_device(family, given)

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm, layout), build(family)
        with BUILDING:
            wf_transformers.attach_model(model, sp)
        model = copied(model) if twin else model
        local = wf_transformers.shard_media(model, sp, given)
        found = model(**wf_transformers.forward_kwargs(model, local)).logits
        share = sp.loss(found, local["labels"])
        share.backward()
        full = sp.unshard(found.detach())[:, : logits.shape[1]]
        return full, share.detach(), gradients(model), len(local.get("pixel_values", ()))

    found = run_threads(size, rank)
    assert_close(found[0][0], logits, "logits")
    assert_close(sum(share for _, share, *_ in found), loss, "loss")
    for name, grad in wanted.items():
        assert all(name in grads for *_, grads, _ in found), name
        assert_close(sum(grads[name] for *_, grads, _ in found), grad, name)
    return [encoded for *_, encoded in found]


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_images(family: str, size: int, layout: str) -> None:
    given = llava_batch() if family == "llava" else qwen_batch()
    assert_equal(family, size, given, layout)


@pytest.mark.parametrize("family", MODELS)
def test_a_copy_of_an_attached_model(family: str) -> None:
    assert_equal(family, 2, llava_batch() if family == "llava" else qwen_batch(), twin=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_whole_batches(family: str, size: int) -> None:
    """As the Trainer and accelerate call a model: the whole batch on every rank, and its loss."""
    given = llava_batch() if family == "llava" else qwen_batch(video=True)
    logits, loss, wanted = one_device(family, given)

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), build(family)
        with BUILDING:
            WholeBatchHooks(model, wf_transformers.attach_model(model, sp), whole_logits=True)
        output = model(**given)
        output.loss.backward()
        return output.logits.detach(), output.loss.detach(), gradients(model)

    for found, mean, _ in (ranks := run_threads(size, rank)):
        assert_close(found, logits, "logits")
        assert_close(mean, loss, "loss")
    for name, grad in wanted.items():
        assert_close(sum(grads[name] for *_, grads in ranks) / size, grad, name)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_images_and_a_video(family: str) -> None:
    assert_equal(family, 4, qwen_batch(video=True))


@pytest.mark.parametrize("family", MODELS)
def test_text_alone(family: str) -> None:
    given = {"input_ids": qwen_batch()["input_ids"].clamp(max=9)}
    assert_equal(family, 2, given | {"labels": given["input_ids"]})


def test_a_rank_encodes_the_media_that_it_has_tokens_of() -> None:
    """Of 16 + 8 + 8 + 24 patches: the last image stands in the second half of the second sample."""
    encoded = assert_equal("qwen2_vl", 2, qwen_batch(), "contiguous")
    assert all(0 < number < 56 for number in encoded)


def test_ranks_without_any_encode_one_for_nothing() -> None:
    """All images are in the first quarter; parameters of the encoder have gradients everywhere."""
    given = llava_batch((1,))
    words = torch.full((1, 40), 9)
    given |= {"input_ids": torch.cat([given["input_ids"], words], 1)}
    given["labels"] = given["input_ids"].masked_fill(given["input_ids"] == IMAGE, -100)
    assert assert_equal("llava", 4, given, "contiguous") == [1, 1, 1, 1]


def refused(family: str, given: dict[str, Any], match: str, error: type = ValueError) -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build(family)
        with BUILDING:
            wf_transformers.attach_model(model, sp)
        with pytest.raises(error, match=match):
            wf_transformers.shard_media(model, sp, given)

    run_threads(2, rank)


def test_tokens_and_features_that_differ_in_number() -> None:
    given = qwen_batch()
    given["image_grid_thw"][0, 1] = 8
    refused("qwen2_vl", given, "4 media of 18 features, and input_ids have 14 tokens of image_tok")


def test_packed_documents_need_positions() -> None:
    refused("qwen2_vl", qwen_batch((1,)) | {"cu_seqlens": (0, 5, 13)}, "position_ids .* restart")


def test_positions_of_another_shape() -> None:
    given = qwen_batch((1,))
    refused("qwen2_vl", given | {"position_ids": given["input_ids"]}, r"must be \(3, b, S\)")


def test_whole_media_beside_cut_tokens() -> None:
    def rank(comm: Any) -> None:
        sp, model, given = sequence_parallel(comm), build("llava"), llava_batch()
        with BUILDING:
            handle = wf_transformers.attach_model(model, sp)
        words = wf_transformers.forward_kwargs(
            model, sp.shard_batch({"input_ids": given["input_ids"]})
        )
        with pytest.raises(ValueError, match="whole pixel_values: cut the batch by"):
            model(**words, pixel_values=given["pixel_values"])
        labelled = wf_transformers.shard_media(model, sp, given)
        words = wf_transformers.forward_kwargs(model, labelled)
        with pytest.raises(ValueError, match="called with labels"):
            model(**words, labels=labelled["labels"])
        handle.remove()
        assert model(**{k: v for k, v in given.items() if k != "labels"}).logits.shape[1] == 23

    run_threads(2, rank)


def test_other_models_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="Linear is none of the models whose media"):
        wf_transformers.shard_media(torch.nn.Linear(1, 1), sequence_parallel(World(1).comm(0)), {})
