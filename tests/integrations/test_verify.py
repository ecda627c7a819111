"""`verify` finds, before the first step, a model that would train to another result on ranks.

It runs a random batch on one device and on the ranks, and names the first value that differs.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    FAMILIES,
    build,
    gradients,
    sequence_parallel,
)
from tests.integrations.verify_models import (  # noqa: E402
    DIFFERS,
    BatchNorm,
    Convolution,
    DoubledLoss,
    LocalEntropy,
    LocalGradient,
    LocalMean,
    LocalPositions,
    NeedsPositions,
    OwnModel,
    Recurrence,
    TokenShift,
    UnknownInput,
    attach_unchecked,
    llama,
    llama_with_z_loss,
    verify_on_ranks,
    vision_model,
)
from wf_backends import SequenceParallel  # noqa: E402
from wf_backends.autochunk.tiling import Tiles, tile_modules  # noqa: E402
from wf_backends.parallel import ChannelExchange  # noqa: E402
from wf_transformers import attach, verify  # noqa: E402
from wf_transformers.attention.documents import Documents  # noqa: E402
from wf_transformers.comparison.verify import Mode, Report, conclude  # noqa: E402

MAX_ROUNDING = 1e-5  # relative, of models in float32


def assert_passes(report: Report | None) -> None:
    assert report is not None and report.largest < MAX_ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole_batches", [False, True])
def test_exact_models_pass(family: str, whole_batches: bool) -> None:
    reports = verify_on_ranks(lambda: build(family, "sdpa", {}), 4, whole_batches=whole_batches)
    for report in reports:
        assert_passes(report)
        assert report is not None and report.compared >= 30  # outputs and gradients of modules


def test_a_causal_head_over_attention_that_is_not_causal_is_compared() -> None:
    """Its samples have one length: padding would be seen."""

    def decoder() -> Any:
        model = llama()
        model.encoder = nn.Identity()
        model.encoder.is_causal = False
        return model

    for report in verify_on_ranks(decoder):
        assert_passes(report)


def test_a_frozen_model_passes() -> None:
    """Such as the reference of a preference loss, which has no gradients to compare."""
    reports = verify_on_ranks(
        lambda: build("llama", "sdpa", {}).requires_grad_(False), whole_batches=True
    )
    assert_passes(reports[0])


def test_a_model_that_was_tiled_before_passes() -> None:
    """A tile of a rank's part has other rows than a tile of the whole."""

    def tiled() -> Any:
        model = llama()
        mlps = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
        tile_modules(model, [Tiles(name, 1, 2) for name in mlps])
        return model

    for report in verify_on_ranks(tiled):
        assert_passes(report)


def test_a_layout_that_follows_from_documents_passes() -> None:
    original = llama().float()

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm, "document_zigzag"), copy.deepcopy(original)
        return verify(
            model, sp, lambda: attach_unchecked(model, sp, True), "strict", whole_batches=True
        )

    for report in run_threads(2, rank):
        assert_passes(report)


@pytest.mark.parametrize(
    ("make_model", "difference"),
    [
        (Convolution, "the output of conv is the first"),
        (Recurrence, "the output of gru is the first"),
        (lambda: llama(TokenShift), "the output of model.layers.0.input_layernorm is the first"),
        (LocalMean, "its output is the first"),
        (LocalPositions, "the output of places is the first"),
        (LocalEntropy, "its output is the first"),
        (BatchNorm, "the output of norm is the first"),
        (LocalGradient, "the gradient of inner.model.embed_tokens.weight is the first"),
    ],
)
def test_models_that_mix_the_tokens_of_a_rank_are_refused(make_model: Any, difference: str) -> None:
    message = f"on 2 ranks {DIFFERS}: {difference} that differs"
    with pytest.raises(NotImplementedError, match=message):
        verify_on_ranks(make_model)


CUSTOM_LOSSES = pytest.mark.parametrize(
    "make_model", [llama_with_z_loss, lambda: llama(DoubledLoss)]
)


@CUSTOM_LOSSES
def test_a_models_custom_loss_passes(make_model: Any) -> None:
    for report in verify_on_ranks(make_model, whole_batches=True):
        assert_passes(report)


@CUSTOM_LOSSES
def test_hooks_that_replace_a_custom_loss_are_refused(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks replace it by the mean cross entropy if they do not recognise it."""
    monkeypatch.setattr("wf_transformers.whole_batches.hooks.custom_loss_reason", lambda *_: None)
    with pytest.raises(NotImplementedError, match=f"{DIFFERS}: its loss is the first that differs"):
        verify_on_ranks(make_model, whole_batches=True)


def test_the_error_names_the_rank_with_the_largest_difference() -> None:
    """Another rank's own difference may be within the tolerance."""

    def rank(comm: Any) -> str:
        errors = [("its loss", 0.5 * comm.rank, 1e-4)]
        comparison: Any = SimpleNamespace(
            model=nn.Linear(1, 1), sp=sequence_parallel(comm), errors=errors, cut=True
        )
        with pytest.raises(NotImplementedError) as error:
            conclude(comparison, None, "strict")
        return str(error.value)

    for message in run_threads(2, rank):
        assert "by 5.0e-01 of its largest element on rank 1, " in message


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_vit_whose_patches_are_sharded_passes(layout: str) -> None:
    """`attach` itself, which shards the ViT's 17 rows without padding."""

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm, layout), vision_model("ViT")
        return verify(model, sp, lambda: attach(model, sp), "strict")

    for report in run_threads(2, rank):
        assert_passes(report)


def test_a_vision_model_that_is_never_sharded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the number-of-rows check of attention, which would raise first."""
    monkeypatch.setattr(Documents, "check_rows", lambda *_: None)
    with pytest.raises(
        NotImplementedError, match="no module of .* works on a part of the sequence"
    ):
        verify_on_ranks(lambda: vision_model("DPT"))


def test_verify_leaves_the_model_and_the_generator_unchanged() -> None:
    """A model in evaluation mode with a gradient, dropout and running statistics of a norm."""
    original = Convolution().float().eval()
    original.mix = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(61))
    original.norm = nn.BatchNorm1d(61)

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        model.inner.lm_head.weight.grad = torch.ones_like(model.inner.lm_head.weight)
        with pytest.raises(NotImplementedError, match="the output of conv"):
            verify(model, sp, lambda: attach_unchecked(model, sp, False), "strict")
        assert not model.training and not sp.report()
        assert model.inner.config._attn_implementation == "sdpa"
        return model

    torch.manual_seed(7)
    rng_state = torch.random.get_rng_state()
    for model in run_threads(2, rank):
        for name, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        grads = gradients(model)
        assert grads.keys() == {"inner.lm_head.weight"}
        assert bool((grads["inner.lm_head.weight"] == 1).all())
    assert torch.equal(torch.random.get_rng_state(), rng_state)


NOT_VERIFIED = "UnknownInput was not verified: what inputs it takes is not known"


def test_a_model_whose_inputs_are_unknown_is_left_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert verify_on_ranks(UnknownInput, mode=True) == [None, None]
    assert [record.message for record in caplog.records if "verif" in record.message] == [
        f"{NOT_VERIFIED}. Of tokens, wrap it in a module whose argument is input_ids; for others "
        "wf_transformers.verify(model, sp, attach, batch=...) takes a batch of yours"
    ]


def test_a_model_whose_inputs_are_unknown_is_refused_by_strict() -> None:
    with pytest.raises(ValueError, match=NOT_VERIFIED):
        verify_on_ranks(UnknownInput)


def test_a_peer_that_ends_while_a_model_is_verified_is_named() -> None:
    original, errors = llama(), []

    def end(*_: Any) -> None:
        raise SystemExit

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        if comm.rank == 1:
            model.model.layers[1].register_forward_pre_hook(end)
        try:
            verify(model, sp, lambda: attach_unchecked(model, sp, whole_batches=False))
        except RuntimeError as error:
            errors.append(str(error))

    with pytest.raises(SystemExit):
        run_threads(2, rank)
    assert errors[0].startswith("LlamaForCausalLM was not verified: RuntimeError: rank 0 waits")


def test_verify_can_be_turned_off() -> None:
    assert verify_on_ranks(UnknownInput, mode=False) == [None, None]


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match='"verify" must be true, false or "strict", got 3'):
        verify_on_ranks(UnknownInput, mode=3)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(tf, "NeoMMEConfig"), reason="this transformers has none")
def test_a_batch_is_drawn_for_a_config_whose_windows_differ_by_layer() -> None:
    """Its `sliding_window` cannot be read in transformers 5."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
    config = tf.NeoMMEConfig(vocab_size=64, pad_token_id=0, **sizes, **heads)
    with pytest.raises(NotImplementedError, match="asks for a sliding window of 17 without causal"):
        verify_on_ranks(lambda: tf.NeoMMEForMaskedLM(config))


def test_ranks_with_different_parameters_are_refused() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {})
        with torch.no_grad():
            model.lm_head.weight += sp.rank
        with pytest.raises(ValueError, match="hold different parameters"):
            verify(model, sp, lambda: attach(model, sp), "strict")

    run_threads(2, rank)


def verify_in_bfloat16(mode: Mode) -> None:
    original = TokenShift(build("llama", "sdpa", {}).config).bfloat16()

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        verify(model, sp, lambda: attach_unchecked(model, sp, False), mode)

    run_threads(2, rank)


def test_a_difference_in_bfloat16_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It may be rounding."""
    with caplog.at_level(logging.WARNING):
        verify_in_bfloat16(True)
    assert DIFFERS in caplog.text and "rounding alone" in caplog.text


def test_a_difference_in_bfloat16_is_refused_by_strict() -> None:
    with pytest.raises(NotImplementedError, match=DIFFERS):
        verify_in_bfloat16("strict")


def test_attach_verifies_unless_told_not_to() -> None:
    """A model that `attach` accepts by its modules alone."""
    original = LocalMean()

    def rank(comm: Any) -> None:
        model = copy.deepcopy(original)
        with pytest.raises(NotImplementedError, match=DIFFERS):
            wf_transformers.attach(model, sequence_parallel(comm))
        wf_transformers.attach(model, sequence_parallel(comm), verify=False)

    run_threads(2, rank)


def test_attach_compares_a_model_without_documents_on_a_batch_without_padding() -> None:
    right, wrong = NeedsPositions(), OwnModel(counts_positions=True)
    ids = torch.arange(32)[None]

    def rank(comm: Any) -> None:
        handle = attach(copy.deepcopy(right), sequence_parallel(comm), verify="strict")
        handle.shard_batch({"input_ids": ids, "labels": ids})  # the first batch, compared too
        with pytest.raises(NotImplementedError, match=DIFFERS):
            attach(copy.deepcopy(wrong), sequence_parallel(comm))

    run_threads(2, rank)


class Filter(nn.Module):
    """A causal convolution of each channel: (b, S, c) and (c, 1, 3) -> (b, S, c)."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x.transpose(1, 2), (2, 0))
        return nn.functional.conv1d(x, weight, groups=len(weight)).transpose(1, 2)


class ExchangesChannels(nn.Module):
    """As a Hyena layer over ranks: the filter sees a rank's channels of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.filter = nn.Embedding(32, 8), Filter()
        self.weight = nn.Parameter(torch.randn(8, 1, 3))

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        self.exchange = ChannelExchange(sp)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        sp = self.exchange.sp
        by_rank = self.embedding(input_ids).unflatten(-1, (sp.size, -1))
        x = self.filter(self.exchange.gather(by_rank), self.weight.chunk(sp.size)[sp.rank])
        return self.exchange.bring_back(x).flatten(2)


def test_a_module_that_has_channels_of_all_tokens_passes() -> None:
    """Its number of channels is not taken for a number of rows."""
    original = ExchangesChannels()

    def rank(comm: Any) -> None:
        attach(copy.deepcopy(original), sequence_parallel(comm), verify="strict")

    run_threads(2, rank)


def test_attach_refuses_other_modes() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match='"verify" must be true, false or "strict", got 1'):
            wf_transformers.attach(LocalMean(), sequence_parallel(comm), verify=1)  # type: ignore[arg-type]

    run_threads(2, rank)
