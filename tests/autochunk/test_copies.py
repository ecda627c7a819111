"""Values that are computed from little are computed anew for each reader, where that is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from wf_backends.autochunk import ChunkPlan, autochunk
from wf_backends.graph import Effects, StorageTracker, capture, read_steps, with_copies

TOKENS = 224


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("padded", [False, True])
def test_no_mask_of_all_queries_and_keys_is_left_of_a_llama(padded: bool) -> None:
    model, ids = llama(), torch.randint(96, (1, TOKENS))
    words = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    if padded:
        words["attention_mask"] = torch.ones_like(ids).index_fill_(
            1, TOKENS - 1 - torch.arange(5), 0
        )
    less_than_the_mask = TOKENS**2 * 8 - 1
    chunked = autochunk(model, (), words, less_than_the_mask, 1e9)
    assert chunked.plan.copied and "recomputed for each reader" in chunked.explain()
    with torch.no_grad():
        expected = model(**words).logits
        inputs = (x for x in words.values() if isinstance(x, Tensor))
        with StorageTracker((*model.parameters(), *model.buffers(), *inputs)) as seen:
            logits = chunked(**words).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert abs(seen.peak / chunked.plan.peak - 1) < 0.05
    again = autochunk(model, (), words, plan=ChunkPlan.from_json(chunked.plan.to_json()))
    with torch.no_grad():
        assert torch.equal(again(**words).logits, logits)


class Normed(nn.Module):
    """Attention whose queries, keys and values read one normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = self.norm(x)
            k, v = self.k(y).t(), self.v(y)
            x = x + (self.q(y) @ k).softmax(-1) @ v
        return x


def test_a_normed_input_is_computed_for_each_reader_where_nothing_else_fits() -> None:
    torch.manual_seed(0)
    model, x = Normed().double().eval(), torch.randn(512, 64, dtype=torch.float64)
    without = autochunk(model, (x,), max_slowdown=1e9).plan
    chunked = autochunk(model, (x,), None, without.peak - x.nbytes // 2, 1e9)
    assert without.copied == "" and chunked.plan.copied == "norms"
    assert "normed inputs" in chunked.explain()
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)
        again = autochunk(model, (x,), plan=ChunkPlan.from_json(chunked.plan.to_json()))
        assert torch.equal(again(x), chunked(x))


class Masked(nn.Module):
    """Two layers of attention that read a mask; `write` changes in between the mask, by a view, or
    what it is computed from."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.full((len(x), 1), -1.0, dtype=x.dtype)
        mask = (torch.ones(len(x), len(x), dtype=x.dtype) * slope).triu(1)
        for _ in range(2):
            x = ((x @ x.t()) + mask).softmax(-1) @ x
            if self.write == "mask":
                mask[:8].mul_(x.mean())
            if self.write == "slope":
                slope.mul_(x.mean())
        return x


@pytest.mark.parametrize("write", ["", "mask", "slope"])
def test_what_others_write_to_is_not_copied(write: str) -> None:
    model, x = Masked(write).eval(), torch.randn(128, 4, dtype=torch.float64)
    graph = capture(model, (x,), {}).graph
    copies = with_copies(read_steps(graph, Effects()), "masks")
    assert (copies is None) == bool(write)
    chunked = autochunk(model, (x,), max_slowdown=1e9)
    assert chunked.plan.copied == ("" if write else "masks")
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-12, atol=1e-12)
