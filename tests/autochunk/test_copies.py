"""Masks and normed inputs are recomputed for each reader where that saves memory and is exact.

The reference is the unchunked model, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.autochunk.helpers import measured_peak, steps_of
from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.autochunk.graph import with_copies

TOKENS = 224
UNLIMITED = 1e9  # max_slowdown


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
def test_llama_runs_in_less_memory_than_its_mask(padded: bool) -> None:
    model, ids = llama(), torch.randint(96, (1, TOKENS))
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    if padded:
        last_five = TOKENS - 1 - torch.arange(5)
        kwargs["attention_mask"] = torch.ones_like(ids).index_fill_(1, last_five, 0)
    mask_bytes = TOKENS**2 * 8
    chunked = autochunk(model, (), kwargs, max_memory=mask_bytes - 1, max_slowdown=UNLIMITED)

    assert chunked.plan.copied and "recomputed for each reader" in chunked.explain()
    assert measured_peak(chunked, kwargs) == pytest.approx(chunked.plan.peak, rel=0.05)
    planned = autochunk(model, (), kwargs, plan=ChunkPlan.from_json(chunked.plan.to_json()))
    with torch.no_grad():
        logits = chunked(**kwargs).logits
        torch.testing.assert_close(logits, model(**kwargs).logits, rtol=1e-12, atol=1e-12)
        assert torch.equal(planned(**kwargs).logits, logits)


class PreNormAttention(nn.Module):
    """Two layers of attention whose queries, keys and values read one normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            normed = self.norm(x)
            k, v = self.k(normed).t(), self.v(normed)
            x = x + (self.q(normed) @ k).softmax(-1) @ v
        return x


def test_normed_input_is_recomputed_only_if_no_other_plan_fits() -> None:
    torch.manual_seed(0)
    model, x = PreNormAttention().double().eval(), torch.randn(512, 64, dtype=torch.float64)
    without_copies = autochunk(model, (x,), max_slowdown=UNLIMITED).plan
    budget = without_copies.peak - x.nbytes // 2
    chunked = autochunk(model, (x,), max_memory=budget, max_slowdown=UNLIMITED)

    assert without_copies.copied == "" and chunked.plan.copied == "norms"
    assert "normed inputs" in chunked.explain()
    planned = autochunk(model, (x,), plan=ChunkPlan.from_json(chunked.plan.to_json()))
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)
        assert torch.equal(planned(x), chunked(x))


class MaskedAttention(nn.Module):
    """Two layers of attention that read a mask. Between them the model writes to `written`: to the
    mask (through a view), or to the slope from which the mask was computed."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.full((len(x), 1), -1.0, dtype=x.dtype)
        mask = (torch.ones(len(x), len(x), dtype=x.dtype) * slope).triu(1)
        for _ in range(2):
            x = ((x @ x.t()) + mask).softmax(-1) @ x
            if self.written == "mask":
                mask[:8].mul_(x.mean())
            if self.written == "slope":
                slope.mul_(x.mean())
        return x


@pytest.mark.parametrize(("written", "copied"), [("nothing", "masks"), ("mask", ""), ("slope", "")])
def test_mask_is_recomputed_only_if_nothing_writes_to_it_or_its_source(
    written: str, copied: str
) -> None:
    model, x = MaskedAttention(written).eval(), torch.randn(128, 4, dtype=torch.float64)
    assert (with_copies(steps_of(model, x), "masks") is not None) == bool(copied)
    chunked = autochunk(model, (x,), max_slowdown=UNLIMITED)
    assert chunked.plan.copied == copied
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)
