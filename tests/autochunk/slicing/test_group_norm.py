"""Group norm in two passes, statistics and normalization, equals torch's; a graph that was split
into the two passes can be joined again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from wf_backends.autochunk.slicing.group_norm import (
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
def test_two_passes_equal_group_norm(shape: tuple[int, ...], affine: bool) -> None:
    x = 3 + torch.randn(shape, dtype=torch.float64)
    parameters = [torch.randn(shape[1], dtype=torch.float64) if affine else None for _ in "wb"]
    expected = torch.group_norm(x, 2, *parameters)
    actual = two_passes(x, 2, *parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_normalized_with_statistics_in_float32() -> None:
    """The tolerance is half a unit in the last place of bfloat16. With a mean of 50 and a deviation
    of 1, statistics in bfloat16 would give an error of 0.12."""
    x = (50 + torch.randn(2, 8, 64, 64)).bfloat16()
    statistics = group_statistics(x, 4, 1e-5)
    assert statistics.dtype == torch.float32
    expected = torch.group_norm(x.double(), 4)
    actual = group_normalize(x, statistics, 4, None, None)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2**-8)


def test_two_passes_equal_group_norm_in_channels_last() -> None:
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    torch.testing.assert_close(two_passes(x, 3, None, None), torch.group_norm(x, 3))


def exported(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,), strict=False).module()


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def test_splitting_and_joining_a_graph_keeps_its_outputs_and_module_stacks() -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.GroupNorm(4, 4))
    module = exported(model, x)
    module_stacks = [node.meta["nn_module_stack"] for node in calls(module, GROUP_NORM)]

    split_group_norms(module.graph)
    normalizations = calls(module, group_normalize)
    assert not calls(module, GROUP_NORM)
    assert len(normalizations) == len(calls(module, group_statistics)) == 2
    assert [node.meta["nn_module_stack"] for node in normalizations] == module_stacks
    assert tuple(normalizations[0].args[1].meta["val"].shape) == (2, 2, 2)
    module.recompile()
    torch.testing.assert_close(module(x), model(x))

    join_group_norms(module.graph)
    assert len(calls(module, GROUP_NORM)) == 2 and not calls(module, group_statistics)
    module.recompile()
    assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("running", [False, True])
def test_instance_norms_without_running_statistics_are_split(running: bool) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.InstanceNorm2d(4, affine=True, track_running_stats=running).eval()
    module = exported(model, x)
    split_group_norms(module.graph)
    assert len(calls(module, group_normalize)) == (not running)
    module.recompile()
    torch.testing.assert_close(module(x), model(x))
