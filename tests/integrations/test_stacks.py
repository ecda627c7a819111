"""Encoder-decoders and CLIP take whole batches, shard them inside, and are exact on ranks.

The reference is the same model on one device with transformers' own attention, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.clip import modeling_clip

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.results import Result, assert_means_are, run_whole_batch  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILD_LOCK,
    VOCAB,
    sequence_parallel,
)
from wf_transformers.families import table  # noqa: E402
from wf_transformers.families.table import TABLE  # noqa: E402
from wf_transformers.models import REGISTRY  # noqa: E402

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCAB}
SIZES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "init_std": 0.2, **HEADS}
TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
BART = {**SIZES, **TOKENS, "max_position_embeddings": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
T5 |= {"dropout_rate": 0.0, "initializer_factor": 1.0, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
WHISPER = {**SIZES, **TOKENS, "max_source_positions": 23, "num_mel_bins": 8}
TOWER = {"hidden_size": 32, "intermediate_size": 48}
TOWER |= {"num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TOWER, "vocab_size": VOCAB, "eos_token_id": VOCAB - 1}
TEXT |= {"bos_token_id": 1, "pad_token_id": 1}
VISION = {**TOWER, "image_size": 16, "patch_size": 4}  # 17 rows
CLIP = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
CLIP |= {"initializer_factor": 5.0}

GENERATOR = torch.Generator().manual_seed(3)


def token_ids(batch_size: int, seqlen: int, last: int | None = None) -> Tensor:
    ids = torch.randint(5, VOCAB - 1, (batch_size, seqlen), generator=GENERATOR)
    if last is not None:
        ids[:, -1] = last
    return ids


def random_normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def right_padding(seqlen: int, *lengths: int) -> Tensor:
    return (torch.arange(seqlen)[None] < torch.tensor(lengths)[:, None]).long()


# 23, 19 and 13 tokens, which 2 and 4 ranks cannot share equally: nothing is padded
SEQ2SEQ = {"input_ids": token_ids(2, 23), "labels": token_ids(2, 19)}
SOUND = {"input_features": random_normal(2, 8, 46), "labels": token_ids(2, 19)}
PAIRS = {
    "input_ids": token_ids(2, 13, last=VOCAB - 1),
    "pixel_values": random_normal(2, 3, 16, 16),
    "return_loss": True,
}
RAGGED = {"attention_mask": right_padding(23, 23, 9)}


@dataclass(frozen=True)
class Case:
    model: str
    config: Callable[[], Any]
    batch: dict[str, Any]
    implementation: str = "sdpa"
    """Of attention; "eager" for models that have no other."""


bart, mbart = partial(tf.BartConfig, **BART), partial(tf.MBartConfig, **BART)
t5, mt5, umt5 = (partial(config, **T5) for config in (tf.T5Config, tf.MT5Config, tf.UMT5Config))
clip = partial(tf.CLIPConfig, **CLIP)
CASES = {
    "bart": Case("BartForConditionalGeneration", bart, SEQ2SEQ),
    "bart_padded": Case("BartForConditionalGeneration", bart, SEQ2SEQ | RAGGED),
    "mbart": Case("MBartForConditionalGeneration", mbart, SEQ2SEQ),
    "t5": Case("T5ForConditionalGeneration", t5, SEQ2SEQ, "eager"),
    "t5_padded": Case("T5ForConditionalGeneration", t5, SEQ2SEQ | RAGGED, "eager"),
    "mt5": Case("MT5ForConditionalGeneration", mt5, SEQ2SEQ, "eager"),
    "umt5": Case("UMT5ForConditionalGeneration", umt5, SEQ2SEQ | RAGGED, "eager"),
    "whisper": Case("WhisperForConditionalGeneration", partial(tf.WhisperConfig, **WHISPER), SOUND),
    "clip": Case("CLIPModel", clip, PAIRS),
    "clip_mask_of_ones": Case(
        "CLIPModel", clip, PAIRS | {"attention_mask": right_padding(13, 13, 13)}
    ),
}


def build(case: Case, implementation: str | None = None) -> nn.Module:
    """A float64 model in training mode; random, the same every time."""
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = case.config()
        config._attn_implementation = implementation or case.implementation
        return getattr(tf, case.model)(config).double().train()


def run_on_one_device(case: Case, implementation: str | None = None) -> Result:
    with NoFloat32():
        return run_whole_batch(build(case, implementation), case.batch)


def run_attached(
    case: Case, size: int, fn: Callable[[Any, Any], Any], implementation: str | None = None
) -> list[Any]:
    """fn(model, handle) on each of `size` ranks."""
    models = [build(case, implementation) for _ in range(size)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            return fn(model, handle)

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_exact(name: str, size: int) -> None:
    case = CASES[name]
    results = run_attached(case, size, lambda model, _: run_whole_batch(model, case.batch))
    assert_means_are(run_on_one_device(case), results)


@pytest.mark.parametrize("name", ["bart_padded", "clip", "t5_padded"])
def test_recomputed_layers_with_eager_attention_are_exact(name: str) -> None:
    """Under the Trainer's hooks, which leave it to the model to shard the batch."""
    case = CASES[name]

    def run(model: Any, handle: Any) -> Result:
        model.gradient_checkpointing_enable(without_float32(handle.checkpoint_kwargs))
        wf_transformers.WholeBatchHooks(model, handle)
        return run_whole_batch(model, case.batch)

    results = run_attached(case, 2, run, "eager")
    assert_means_are(run_on_one_device(case, "eager"), results)


def without_float32(checkpoint_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Recompute under NoFloat32, too: the backward, which recomputes, is outside of its block."""
    context_fn = checkpoint_kwargs["context_fn"]

    @contextmanager
    def wide(recomputation: AbstractContextManager[None]) -> Iterator[None]:
        with recomputation, NoFloat32():
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, recomputation = context_fn()
        return forward, wide(recomputation)

    return checkpoint_kwargs | {"context_fn": contexts}


def verify_on_two_ranks(case: Case) -> Any:
    models = [build(case).float() for _ in range(2)]
    batch = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in case.batch.items()
    }

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        attach = partial(wf_transformers.attach, model, sp, verify=False)
        return wf_transformers.verify(model, sp, attach, "strict", batch=batch)

    return run_threads(2, rank)[0]


@pytest.mark.parametrize("name", CASES)
def test_verify_passes(name: str) -> None:
    assert verify_on_two_ranks(CASES[name]) is not None


@pytest.mark.skipif(hasattr(modeling_clip, REGISTRY), reason="this CLIP is not in the table")
def test_verify_finds_a_text_tower_that_is_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    not_causal = replace(TABLE["CLIPAttention"], attributes=lambda _: {"is_causal": False})
    monkeypatch.setattr(table, "TABLE", {**TABLE, "CLIPAttention": not_causal})
    with pytest.raises((NotImplementedError, ValueError), match="CLIPModel"):
        verify_on_two_ranks(CASES["clip"])


def test_a_shard_of_the_batch_is_refused() -> None:
    def check(model: Any, handle: Any) -> None:
        local = handle.sp.shard_batch({"input_ids": SEQ2SEQ["input_ids"]})
        with pytest.raises(ValueError, match="call it with the whole batch on every rank"):
            wf_transformers.forward_kwargs(model, local)

    run_attached(CASES["bart"], 2, check)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "clip"])
def test_hidden_states_of_a_rank_are_refused(name: str) -> None:
    def check(model: Any, _: Any) -> None:
        with pytest.raises(
            NotImplementedError, match="output_hidden_states=True: they would be of"
        ):
            model(**CASES[name].batch, output_hidden_states=True)

    run_attached(CASES[name], 2, check)


def test_a_sample_without_valid_tokens_is_refused() -> None:
    def check(model: Any, _: Any) -> None:
        with pytest.raises(ValueError, match=r"samples of lengths \[23, 0\]: leave out those"):
            model(**SEQ2SEQ, attention_mask=right_padding(23, 23, 0))

    run_attached(CASES["bart"], 2, check)


def test_padding_on_the_left_is_refused() -> None:
    left_padding = RAGGED["attention_mask"].flip(1)

    def check(model: Any, _: Any) -> None:
        with pytest.raises(ValueError, match="other keys than padding on the right"):
            model(**SEQ2SEQ, attention_mask=left_padding)

    run_attached(CASES["bart"], 2, check)
