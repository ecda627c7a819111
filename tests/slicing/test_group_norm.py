"""Group norm in two passes: the same numbers, and back to torch's own kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from wf_backends.slicing.group_norm import (
    group_normalize,
    group_statistics,
    join_group_norms,
    split_group_norms,
)

GROUP_NORM = torch.ops.aten.group_norm.default


def two_passes(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return group_normalize(x, group_statistics(x, groups, 1e-5), groups, weight, bias)


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (1, 4, 9), (3, 6, 2, 3, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_two_passes_are_group_norm_in_float64(shape: tuple[int, ...], affine: bool) -> None:
    x = 3 + torch.randn(shape, dtype=torch.float64)
    parameters = [torch.randn(shape[1], dtype=torch.float64) if affine else None for _ in "wb"]
    expected = torch.group_norm(x, 2, *parameters)
    ours = two_passes(x, 2, *parameters)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_is_normalized_with_statistics_in_float32() -> None:
    x = (50 + torch.randn(2, 8, 64, 64)).bfloat16()
    statistics = group_statistics(x, 4, 1e-5)
    assert statistics.dtype == torch.float32
    expected = torch.group_norm(x.double(), 4)
    ours = group_normalize(x, statistics, 4, None, None)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=2**-8)


def test_channels_last_is_normalized() -> None:
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    torch.testing.assert_close(two_passes(x, 3, None, None), torch.group_norm(x, 3))


def exported(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,), strict=False).module()


def count(module: fx.GraphModule, target: object) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_a_graph_is_split_and_joined_again() -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.GroupNorm(4, 4))
    module = exported(model, x)
    before = [dict(node.meta) for node in module.graph.nodes if node.target is GROUP_NORM]
    split_group_norms(module.graph)
    pairs = module.graph.find_nodes(op="call_function", target=group_normalize)
    assert count(module, GROUP_NORM) == 0 and len(pairs) == count(module, group_statistics) == 2
    assert [node.meta["nn_module_stack"] for node in pairs] == [
        meta["nn_module_stack"] for meta in before
    ]
    assert tuple(pairs[0].args[1].meta["val"].shape) == (2, 2, 2)
    module.recompile()
    torch.testing.assert_close(module(x), model(x))

    join_group_norms(module.graph)
    assert count(module, GROUP_NORM) == 2 and count(module, group_statistics) == 0
    module.recompile()
    assert torch.equal(module(x), model(x))
