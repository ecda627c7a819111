"""Modules besides attention that mix tokens are refused, inside a model and beside it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    run_registered,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402


@pytest.mark.parametrize("apply", [False, True])
def test_a_convolution_over_tokens_inside_a_model_is_refused(apply: bool) -> None:
    """By `apply`; without it by `forward_kwargs`. One over single tokens is accepted."""

    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {})
        local = sp.shard_batch({"input_ids": batch(seqlen=24)["input_ids"]})
        model.model.pointwise = nn.Conv1d(4, 4, 1)
        wf_transformers.forward_kwargs(model, local)
        model.model.mix = nn.Conv1d(4, 4, 3)
        with pytest.raises(NotImplementedError, match="model.mix is a convolution over tokens"):
            if apply:
                wf_transformers.apply(model, sp)
            wf_transformers.forward_kwargs(model, local)

    run_registered(2, rank)


class SomeIndexer(nn.Linear):
    """Named as those of DeepSeek V3.2 and others."""


class SomeCompressor(nn.Linear):
    """Named as that of DeepSeek V4."""


class ParallelHyenaFilter(nn.Linear):
    """Named as that of StripedHyena, which convolves by a function of torch."""


def attach_beside_a_llama(comm: Any, module: nn.Module) -> None:
    model = nn.Sequential(build("llama", "eager", {}), module)
    wf_transformers.attach(model, sequence_parallel(comm))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (SomeIndexer(4, 4), "Sequential.1 is an indexer, which chooses the keys of each query"),
        (SomeCompressor(4, 4), "Sequential.1 is a compressor, which makes one key of several"),
        (ParallelHyenaFilter(4, 4), "Sequential.1 is a Hyena filter, a convolution over all"),
        (nn.Conv1d(4, 4, 3), "Sequential.1 is a convolution over tokens, kernel_size 3"),
        (nn.Sequential(nn.LSTM(4, 4)), "Sequential.1.0 is a recurrence over tokens, LSTM"),
        (nn.MultiheadAttention(4, 2), "Sequential.1 is torch's own attention"),
        (nn.BatchNorm1d(4), "Sequential.1 is a mean over all tokens of a batch, BatchNorm1d"),
    ],
)
def test_a_module_beside_a_model_that_mixes_tokens_is_refused(
    module: nn.Module, message: str
) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match=message):
            attach_beside_a_llama(comm, module)

    run_threads(2, rank)


class OnlyConvolutions(tf.PreTrainedModel):
    """Without attention, as HyenaDNA is."""

    def __init__(self) -> None:
        super().__init__(tf.PretrainedConfig())
        self.mixer = nn.Conv1d(4, 4, 3)


def test_a_model_without_attention_is_refused_for_what_mixes_its_tokens() -> None:
    def rank(comm: Any) -> None:
        message = r"OnlyConvolutions.mixer is a convolution.* a method set_sequence_parallel\(sp\)"
        with pytest.raises(NotImplementedError, match=message):
            wf_transformers.attach(OnlyConvolutions(), sequence_parallel(comm))

    run_threads(2, rank)


class ShardedLSTM(nn.LSTM):
    """A recurrence that asks for `sp`, to handle shards itself."""

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        pass


@pytest.mark.parametrize("module", [nn.Conv1d(4, 4, 1), ShardedLSTM(4, 4)])
def test_a_module_beside_a_model_that_handles_shards_is_accepted(module: nn.Module) -> None:
    run_threads(2, attach_beside_a_llama, module)
