"""Masks that transformers 4.53 to 4.57 make inside torch.vmap are captured.

The module here has their two functions; with transformers 4.57 itself
tests/integrations/test_hetegen.py and test_autochunk_options.py capture such models.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from wf_backends.autochunk import autochunk

TOKENS = 256


def vmap_for_bhqkv(mask_function, bh_indices=True):
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if i == axis else None for i in range(4))
        mask_function = torch.vmap(mask_function, in_dims=dims, out_dims=0)
    return mask_function


class Layer(nn.Module):
    """Attention under a causal mask and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, is_valid: Tensor) -> Tensor:
        masks = sys.modules["transformers.masking_utils"]
        x, (b, s, _) = self.project(x), x.shape
        samples, head, tokens = torch.arange(b), torch.arange(1), torch.arange(s)

        def seen(sample: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key <= row) & is_valid[sample, key]

        with masks.TransformGetItemToIndex():
            mask = masks._vmap_for_bhqkv(seen)(samples, head, tokens, tokens)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, 0], -1e9)
        return scores.softmax(-1) @ x


@pytest.fixture(autouse=True)
def masking_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("masking_utils")
    module._vmap_for_bhqkv = vmap_for_bhqkv
    module.TransformGetItemToIndex = TransformGetItemToIndex
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    return module


def test_a_mask_of_vmap_is_captured(masking_utils: ModuleType) -> None:
    torch.manual_seed(0)
    layer, x = Layer().double().eval(), torch.randn(2, TOKENS, 16).double()
    is_valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS // 2]])
    chunked = autochunk(layer, (x, is_valid), max_memory=0.7, max_slowdown=10.0)
    assert chunked.plan.regions
    assert masking_utils._vmap_for_bhqkv is vmap_for_bhqkv
    torch.testing.assert_close(chunked(x, is_valid), layer(x, is_valid), rtol=0, atol=1e-12)
