"""Models that would silently train to another result on several ranks are found before a step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILDING,
    FAMILIES,
    build,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402
from wf_transformers import WholeBatchHooks, attach, attach_pretrained, verify  # noqa: E402
from wf_transformers.comparison.verify import Mode, Report  # noqa: E402
from wf_transformers.documents import Documents  # noqa: E402

DIFFERS = "does not give what it gives on one"


def found(
    make: Callable[[], Any], size: int = 2, mode: Mode = "strict", whole: bool = False
) -> list[Report | None]:
    """What `verify` says of a model on `size` ranks, in float32."""

    original = make().float()

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        return verify(model, sp, lambda: _attach(model, sp, whole), mode, whole_batches=whole)

    return run_threads(size, rank)


def _attach(model: nn.Module, sp: SequenceParallel, whole: bool) -> Any:
    """Without the checks that a door makes of a model that it looks at."""
    handle = attach_pretrained(wf_transformers.outermost(model), sp)
    if whole:
        WholeBatchHooks(model, handle)
    return handle


def llama(kind: type = tf.LlamaForCausalLM) -> Any:
    model = build("llama", "sdpa", {})
    model.__class__ = type(kind.__name__, (kind,), {})
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [False, True])
def test_models_that_are_right(family: str, whole: bool) -> None:
    for report in found(lambda: build(family, "sdpa", {}), 4, whole=whole):
        assert report is not None and report.compared >= 30 and report.largest < 1e-5


def test_a_layout_that_follows_from_documents() -> None:
    original = llama().float()

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm, "document_zigzag"), copy.deepcopy(original)
        return verify(model, sp, lambda: _attach(model, sp, True), "strict", whole_batches=True)

    assert all(report is not None and report.largest < 1e-5 for report in run_threads(2, rank))


class Wrapper(nn.Module):
    """Hugging Face's model inside one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "sdpa", {})
        self.mix = nn.Identity()

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        return self.mix(self.inner(input_ids=input_ids, **words).logits)


class Convolution(Wrapper):
    """Mixes neighbouring tokens behind the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(61, 61, 3, padding=1)

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        return self.conv(super().forward(input_ids, **words).mT).mT


class Recurrence(Wrapper):
    """A GRU behind the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(61, 61, batch_first=True)

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        return self.gru(super().forward(input_ids, **words))[0]


class TokenShift(tf.LlamaForCausalLM):
    """Each token's embedding with the one before, in a forward of its own."""

    def forward(self, input_ids: Any = None, **words: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=x + x.roll(1, dims=1), **words)


class LocalMean(Wrapper):
    """Subtracts the mean over the tokens that it sees."""

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        logits = super().forward(input_ids, **words)
        return logits - logits.mean(dim=1, keepdim=True)


class LocalPositions(Wrapper):
    """Counts positions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 61)

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        here = torch.arange(input_ids.shape[1])
        return super().forward(input_ids, **words) + self.places(here)


class LocalEntropy(Wrapper):
    """A loss of its own over the logits that it sees."""

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        return super().forward(input_ids, **words).log_softmax(-1).square().mean()


class BatchNorm(Wrapper):
    """Statistics of the tokens that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(61)

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        return self.norm(super().forward(input_ids, **words).mT).mT


class LocalGradient(Wrapper):
    """Right forward; a part of the gradient that depends on the tokens that it sees."""

    def forward(self, input_ids: Tensor, **words: Any) -> Tensor:
        logits = super().forward(input_ids, **words)
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad - grad.mean(dim=1, keepdim=True))
        return logits


@pytest.mark.parametrize(
    ("make", "where"),
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
def test_what_mixes_or_counts_the_tokens_of_a_rank(make: Any, where: str) -> None:
    with pytest.raises(NotImplementedError, match=f"on 2 ranks {DIFFERS}: {where} that differs"):
        found(make)


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    plain = nn.functional.cross_entropy(logits.float().flatten(0, 1), shifted)
    return plain + 1e-2 * logits.float().logsumexp(-1).square()[labels != -100].mean()


def with_z_loss() -> Any:
    model = build("llama", "sdpa", {})
    model.loss_function = z_loss
    return model


class OwnLoss(tf.LlamaForCausalLM):
    """Replaces the loss of its output."""

    def forward(self, *args: Any, **words: Any) -> Any:
        out = super().forward(*args, **words)
        if words.get("labels") is not None:
            out.loss = 2 * out.loss
        return out


OWN_LOSSES = pytest.mark.parametrize("make", [with_z_loss, lambda: llama(OwnLoss)])


@OWN_LOSSES
def test_a_loss_of_the_models_own(make: Any) -> None:
    """Two samples that need padding."""
    assert all(report is not None and report.largest < 1e-5 for report in found(make, whole=True))


@OWN_LOSSES
def test_a_loss_of_the_models_own_that_is_replaced(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be if the hooks did not look for one."""
    monkeypatch.setattr("wf_transformers.whole_batches.hooks.custom_loss_reason", lambda *_: None)
    with pytest.raises(NotImplementedError, match=f"{DIFFERS}: its loss is the first that differs"):
        found(make, whole=True)


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 8}
PATCHES = {"num_attention_heads": 2, "patch_size": 2, "num_channels": 1}


def vision(name: str) -> Any:
    config = getattr(tf, f"{name}Config")(**VISION, **PATCHES)
    config._attn_implementation = "sdpa"
    with BUILDING:
        torch.manual_seed(1)
        return getattr(tf, f"{name}Model")(config)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_vision_model_whose_patches_are_cut(layout: str) -> None:
    """By the door, which cuts a ViT's 17 rows: nothing is padded."""

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm, layout), vision("ViT")
        return verify(model, sp, lambda: attach(model, sp), "strict")

    assert all(report is not None and report.largest < 1e-5 for report in run_threads(2, rank))


@pytest.mark.parametrize("name", ["Dinov2", "DeiT", "SiglipVision"])
def test_a_vision_model_that_is_accepted_but_never_cut(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the check taken out that attention makes of its rows."""
    monkeypatch.setattr(Documents, "check_rows", lambda *_: None)
    with pytest.raises(
        NotImplementedError, match="no module of .* works on a part of the sequence"
    ):
        found(lambda: vision(name))


def test_the_model_is_as_before() -> None:
    """Also one in evaluation, with gradients, statistics of a norm, and dropout."""
    original = Convolution().float().eval()
    original.mix = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(61))
    original.norm = nn.BatchNorm1d(61)

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        model.inner.lm_head.weight.grad = torch.ones_like(model.inner.lm_head.weight)
        with pytest.raises(NotImplementedError, match="the output of conv"):
            verify(model, sp, lambda: _attach(model, sp, False), "strict")
        assert not model.training and not sp.report()
        assert model.inner.config._attn_implementation == "sdpa"
        return model

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    for model in run_threads(2, rank):
        for name, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        gradients = {n for n, p in model.named_parameters() if p.grad is not None}
        assert gradients == {"inner.lm_head.weight"}
        assert bool((model.inner.lm_head.weight.grad == 1).all())
    assert torch.equal(torch.random.get_rng_state(), before)


class Other(nn.Module):
    """Takes what nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "sdpa", {})

    def forward(self, dialogue: Tensor) -> Tensor:
        return self.inner(input_ids=dialogue).logits


def test_a_model_that_needs_other_inputs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert found(Other, mode=True) == [None, None]
    assert [record.message for record in caplog.records if "verif" in record.message] == [
        "Other was not verified: what inputs it takes is not known. wf_transformers.verify(model, "
        "sp, attach, batch=...) takes a batch of yours"
    ]
    with pytest.raises(ValueError, match="Other was not verified: what inputs"):
        found(Other)
    assert found(Other, mode=False) == [None, None]
    with pytest.raises(ValueError, match='"verify" must be true, false or "strict", got 3'):
        found(Other, mode=3)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(tf, "NeoMMEConfig"), reason="this transformers has none")
def test_a_config_whose_windows_differ_by_layer() -> None:
    """Transformers 5 refuses to tell its window, and a batch is drawn all the same."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}
    config = tf.NeoMMEConfig(vocab_size=64, pad_token_id=0, **shape, **heads)
    with pytest.raises(NotImplementedError, match="asks for a sliding window of 17 without causal"):
        found(lambda: tf.NeoMMEForMaskedLM(config))


def test_ranks_that_hold_different_parameters() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {})
        with torch.no_grad():
            model.lm_head.weight += sp.rank
        with pytest.raises(ValueError, match="hold different parameters"):
            verify(model, sp, lambda: attach(model, sp), "strict")

    run_threads(2, rank)


@pytest.mark.parametrize("mode", [True, "strict"])
def test_in_narrow_dtypes_a_difference_is_no_proof(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    original = TokenShift(build("llama", "sdpa", {}).config).bfloat16()

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        return verify(model, sp, lambda: _attach(model, sp, False), mode)

    if mode == "strict":
        with pytest.raises(NotImplementedError, match=DIFFERS):
            run_threads(2, rank)
        return
    with caplog.at_level(logging.WARNING):
        run_threads(2, rank)
    assert DIFFERS in caplog.text and "rounding alone" in caplog.text


def test_attaching_compares_first() -> None:
    """`attach` itself, on a model that none of its own checks looks into."""
    original = LocalMean()

    def rank(comm: Any) -> None:
        model = copy.deepcopy(original)
        with pytest.raises(NotImplementedError, match=DIFFERS):
            wf_transformers.attach(model, sequence_parallel(comm))
        wf_transformers.attach(model, sequence_parallel(comm), verify=False)
        with pytest.raises(ValueError, match='"verify" must be true, false or "strict", got 1'):
            wf_transformers.attach(model, sequence_parallel(comm), verify=1)  # type: ignore[arg-type]

    run_threads(2, rank)
