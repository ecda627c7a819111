"""What a run on fake tensors counts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

from wf_backends.autochunk import autochunk
from wf_backends.graph import StorageTracker, capture, tensors, unchunked_peak

TOKENS = 1024  # a causal mask of them takes more than all activations


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=TOKENS)
        return GPT2Model(config).eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_fake_run_builds_no_mask_that_a_real_run_does_not(name: str) -> None:
    model = small(name)
    kwargs = {"input_ids": torch.randint(50, (1, TOKENS)), "use_cache": False}
    known = (*model.parameters(), *model.buffers(), kwargs["input_ids"])
    with torch.no_grad(), StorageTracker(known) as seen:
        model(**kwargs)
    assert unchunked_peak(model, (), kwargs) == pytest.approx(seen.peak, rel=0.01)


@pytest.mark.parametrize(("device", "copies"), [("cpu", 0), ("cuda", 1)])
def test_softmax_backward_multiplies_first_on_cuda(device: str, copies: int) -> None:
    with FakeTensorMode():
        grad = torch.empty(64, 128, device=device)
        with StorageTracker((grad,)) as seen:
            kept = torch.ops.aten._softmax_backward_data(grad, grad, -1, torch.float32)
    assert seen.live == kept.nbytes
    assert seen.peak == (1 + copies) * kept.nbytes


def test_the_safe_softmax_notes_what_is_masked() -> None:
    x = torch.randn(64, 128)
    with StorageTracker((x,)) as seen:
        kept = torch.ops.aten._safe_softmax(x, -1)
    assert seen.peak == kept.nbytes + x.numel()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_graph_has_no_mask_where_the_model_counts_positions(name: str) -> None:
    """Positions that are given may be packed: then transformers 5 has one."""
    model, ids = small(name), torch.randint(50, (1, TOKENS))
    graph = capture(model, (), {"input_ids": ids, "use_cache": False}).graph
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert not any(t.shape[-2:] == (TOKENS, TOKENS) for n in made for t in tensors(n))


def test_packed_positions_stay_packed() -> None:
    model, ids = small("llama"), torch.randint(50, (1, 64))
    packed = torch.cat((torch.arange(40), torch.arange(24)))[None]
    kwargs = {"input_ids": ids, "use_cache": False, "position_ids": packed}
    with torch.no_grad():
        expected = model(**kwargs).logits
        found = autochunk(model, (), kwargs, max_memory=0.8, max_slowdown=1e9)(**kwargs).logits
    torch.testing.assert_close(found, expected)
