"""Models that take whole batches and are cut inside give what they give on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.clip import modeling_clip

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILDING,
    VOCAB,
    assert_close,
    gradients,
    sequence_parallel,
)
from wf_transformers.families import table  # noqa: E402
from wf_transformers.families.table import TABLE, file_uses_registry  # noqa: E402

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCAB}
SIZES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "init_std": 0.2, **HEADS}
TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
BART = {**SIZES, **TOKENS, "max_position_embeddings": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
T5 |= {"dropout_rate": 0.0, "initializer_factor": 1.0, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
WHISPER = {**SIZES, **TOKENS, "max_source_positions": 23, "num_mel_bins": 8}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    **CLIP,
    "vocab_size": VOCAB,
    "eos_token_id": VOCAB - 1,
    "bos_token_id": 1,
    "pad_token_id": 1,
}
PROJECTED = {"projection_dim": 16, "initializer_factor": 5.0}
VISION = {**CLIP, "image_size": 16, "patch_size": 4}  # 17 rows
DRAWING = torch.Generator().manual_seed(3)


def ids(size: int, seqlen: int, last: int | None = None) -> torch.Tensor:
    found = torch.randint(5, VOCAB - 1, (size, seqlen), generator=DRAWING)
    if last is not None:
        found[:, -1] = last
    return found


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAWING, dtype=torch.float64)


def padded(seqlen: int, *lengths: int) -> torch.Tensor:
    return (torch.arange(seqlen)[None] < torch.tensor(lengths)[:, None]).long()


FLOATS = ("input_features", "pixel_values")
SEQ2SEQ = {"input_ids": ids(2, 23), "labels": ids(2, 19)}
SOUND = {"input_features": floats(2, 8, 46)}
PAIRS = {"input_ids": ids(2, 13, VOCAB - 1), "pixel_values": floats(2, 3, 16, 16)}
PADDING = {"attention_mask": padded(23, 23, 9)}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", lambda: tf.BartConfig(**BART), SEQ2SEQ),
    "bart_padded": (
        "BartForConditionalGeneration",
        lambda: tf.BartConfig(**BART),
        SEQ2SEQ | PADDING,
    ),
    "mbart": ("MBartForConditionalGeneration", lambda: tf.MBartConfig(**BART), SEQ2SEQ),
    "t5": ("T5ForConditionalGeneration", lambda: tf.T5Config(**T5), SEQ2SEQ),
    "t5_padded": ("T5ForConditionalGeneration", lambda: tf.T5Config(**T5), SEQ2SEQ | PADDING),
    "mt5": ("MT5ForConditionalGeneration", lambda: tf.MT5Config(**T5), SEQ2SEQ),
    "umt5": ("UMT5ForConditionalGeneration", lambda: tf.UMT5Config(**T5), SEQ2SEQ | PADDING),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda: tf.WhisperConfig(**WHISPER),
        SOUND | {"labels": ids(2, 19)},
    ),
    "clip": (
        "CLIPModel",
        lambda: tf.CLIPConfig(text_config=TEXT, vision_config=VISION, **PROJECTED),
        PAIRS | {"return_loss": True},
    ),
    "clip_padded": (
        "CLIPModel",
        lambda: tf.CLIPConfig(text_config=TEXT, vision_config=VISION, **PROJECTED),
        PAIRS | {"return_loss": True, "attention_mask": padded(13, 13, 13)},
    ),
}

EAGER = ("t5", "t5_padded", "mt5", "umt5")
"""Models that have no other attention of their own."""


def build(name: str, implementation: str) -> nn.Module:
    kind, config, _ = CASES[name]
    with BUILDING:
        torch.manual_seed(1)
        words = config()
        words._attn_implementation = "eager" if name in EAGER else implementation
        return getattr(tf, kind)(words).double().train()


def on_ranks(name: str, size: int, implementation: str, step: Callable[..., Any]) -> list[Any]:
    models = [build(name, implementation) for _ in range(size)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            return step(model, handle)

    return run_threads(size, rank)


def trained(model: Any, _: Any, words: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    output = model(**words)
    output.loss.backward()
    logits = output.get("logits", output.get("logits_per_text"))
    return logits.detach(), output.loss.detach(), gradients(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name: str, size: int) -> None:
    words = CASES[name][2]
    with NoFloat32():
        logits, loss, wanted = trained(build(name, "sdpa"), None, words)
    found = on_ranks(name, size, "sdpa", lambda *given: trained(*given, words))
    for its_logits, its_loss, _ in found:
        assert_close(its_logits, logits, "logits")
        assert_close(its_loss, loss, "loss")
    for key, gradient in wanted.items():
        assert_close(sum(own[key] for _, _, own in found) / size, gradient, key)


def also_in_doubles(contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """A checkpoint's contexts; the backward, which computes again, is outside of any mode."""

    @contextmanager
    def again(context: Any) -> Iterator[None]:
        with context, NoFloat32():
            yield

    there, back = contexts()
    return there, again(back)


@pytest.mark.parametrize("name", ["bart_padded", "clip", "t5_padded"])
def test_recomputed_layers_and_eager_attention(name: str) -> None:
    words = CASES[name][2]
    with NoFloat32():
        logits, loss, wanted = trained(build(name, "eager"), None, words)

    def step(model: Any, handle: Any) -> Any:
        words_of = handle.checkpoint_kwargs
        contexts = partial(also_in_doubles, words_of["context_fn"])
        model.gradient_checkpointing_enable(words_of | {"context_fn": contexts})
        wf_transformers.WholeBatchHooks(model, handle)  # of the Trainer: nothing is cut before it
        return trained(model, handle, words)

    found = on_ranks(name, 2, "eager", step)
    assert_close(found[0][0], logits, "logits")
    assert_close(found[1][1], loss, "loss")
    for key, gradient in wanted.items():
        assert_close(sum(own[key] for _, _, own in found) / 2, gradient, key)


def verified(name: str) -> Any:
    models = [build(name, "sdpa").float() for _ in range(2)]
    given = {k: v.float() if k in FLOATS else v for k, v in CASES[name][2].items()}

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        attach = partial(wf_transformers.attach, model, sp, verify=False)
        return wf_transformers.verify(model, sp, attach, "strict", batch=given)

    return run_threads(2, rank)[0]


@pytest.mark.parametrize("name", CASES)
def test_verify_passes(name: str) -> None:
    assert verified(name) is not None


@pytest.mark.skipif(
    file_uses_registry(modeling_clip.CLIPAttention), reason="this CLIP needs no row"
)
def test_verify_finds_a_row_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text tower whose attention sees later tokens."""
    causeless = replace(TABLE["CLIPAttention"], attributes=lambda _: {"is_causal": False})
    monkeypatch.setattr(table, "TABLE", {**TABLE, "CLIPAttention": causeless})
    with pytest.raises((NotImplementedError, ValueError), match="CLIPModel"):
        verified("clip")


def test_parts_of_the_batch_are_refused() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("bart", "sdpa")
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch({"input_ids": SEQ2SEQ["input_ids"]})
            with pytest.raises(ValueError, match="call it with the whole batch on every rank"):
                wf_transformers.forward_kwargs(model, local)

    run_threads(2, rank)


def test_other_padding_is_refused() -> None:
    holes = SEQ2SEQ | {"attention_mask": padded(23, 23, 9).flip(1)}

    def step(model: Any, _: Any) -> None:
        with pytest.raises(ValueError, match="other keys than padding on the right"):
            model(**holes)

    on_ranks("bart", 2, "sdpa", step)
