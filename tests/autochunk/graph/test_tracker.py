"""Predicted live bytes: a run on fake tensors counts what a real run needs, masks included."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

from wf_backends.autochunk import autochunk
from wf_backends.autochunk.graph import StorageTracker, capture, tensors, unchunked_peak

TOKENS = 1024  # a causal mask of them needs more memory than all activations of these models


def one_layer_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=TOKENS)
        return GPT2Model(config).eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_peak_of_a_fake_run_is_that_of_a_real_run(name: str) -> None:
    """In particular, the fake run makes no mask where the real run makes none."""
    model = one_layer_model(name)
    kwargs = {"input_ids": torch.randint(50, (1, TOKENS)), "use_cache": False}
    known = (*model.parameters(), *model.buffers(), kwargs["input_ids"])
    with torch.no_grad(), StorageTracker(known) as tracker:
        model(**kwargs)
    assert unchunked_peak(model, (), kwargs) == pytest.approx(tracker.peak, rel=0.01)


@pytest.mark.parametrize(("device", "num_temporaries"), [("cpu", 0), ("cuda", 1)])
def test_softmax_backward_has_a_temporary_on_cuda(device: str, num_temporaries: int) -> None:
    with FakeTensorMode():
        grad = torch.empty(64, 128, device=device)
        with StorageTracker((grad,)) as tracker:
            result = torch.ops.aten._softmax_backward_data(grad, grad, -1, torch.float32)
    assert tracker.live == result.nbytes
    assert tracker.peak == (1 + num_temporaries) * result.nbytes


def test_safe_softmax_has_a_temporary_of_one_byte_an_element() -> None:
    """The positions that are masked."""
    x = torch.randn(64, 128)
    with StorageTracker((x,)) as tracker:
        result = torch.ops.aten._safe_softmax(x, -1)
    assert tracker.peak == result.nbytes + x.numel()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_graph_without_position_ids_has_no_mask(name: str) -> None:
    """With position ids, which may be those of packed documents, transformers 5 makes a mask."""
    model, ids = one_layer_model(name), torch.randint(50, (1, TOKENS))
    graph = capture(model, (), {"input_ids": ids, "use_cache": False}).graph
    values = [t for node in graph.nodes if node.op == "call_function" for t in tensors(node)]
    assert values and not any(value.shape[-2:] == (TOKENS, TOKENS) for value in values)


def test_packed_position_ids_give_the_models_logits() -> None:
    model, ids = one_layer_model("llama"), torch.randint(50, (1, 64))
    packed = torch.cat((torch.arange(40), torch.arange(24)))[None]
    kwargs = {"input_ids": ids, "use_cache": False, "position_ids": packed}
    chunked = autochunk(model, (), kwargs, max_memory=0.8, max_slowdown=1e9)
    with torch.no_grad():
        torch.testing.assert_close(chunked(**kwargs).logits, model(**kwargs).logits)


def test_tensor_that_is_a_modules_attribute_is_no_activation() -> None:
    """As diffusers' tables of rotary frequencies, which are complex and so no buffers."""

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(4096, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[: len(x)]

    x = torch.randn(16, 8)
    assert unchunked_peak(Rotary(), (x,), {}) == x.nbytes
