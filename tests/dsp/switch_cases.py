"""Stages along a path of dimensions, switched over ranks and on one device; the bytes derived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wf_backends.dsp import chunk_sizes
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded


def whole_tensor(shape: Sequence[int]) -> Tensor:
    """float64, the same values at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mix(x: Tensor, dim: int) -> Tensor:
    """A function of all positions along `dim`, elementwise in the other dimensions."""
    return (x.cumsum(dim) / x.shape[dim]).tanh() + x.sin()


def dims_of_stages(path: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(the dimension that is cut before a stage and that the stage mixes, the one cut after it)."""
    return zip(path, (*path[1:], path[0]), strict=True)


def errors_and_bytes(group, shape, path) -> tuple[list[float], dict[str, int]]:
    """Stages along a path, over the ranks and on one device.

    Returns:
        The errors of the output and of x's gradient, and the bytes sent by label.
    """
    dsp = DynamicSequenceParallel(group)
    x = whole_tensor(shape).requires_grad_()
    held = dsp.split(x, path[0])
    for mixed, cut in dims_of_stages(path):
        held = dsp.switch(held, mixed, cut)
        held = Sharded(mix(held.tensor, mixed), held.dim, held.sizes)
    out = dsp.gather(held, held.dim)
    dout = torch.arange(x.numel(), dtype=torch.float64).view(shape).cos()
    (out * dout).sum().backward()
    expected_x = whole_tensor(shape).requires_grad_()
    expected = expected_x
    for mixed in path:
        expected = mix(expected, mixed)
    (expected * dout).sum().backward()
    errors = [(out - expected).abs().max().item(), (x.grad - expected_x.grad).abs().max().item()]
    return errors, dict(dsp.comm.sent)


def derived_bytes(shape, path, num_ranks: int, rank: int) -> dict[str, int]:
    """The bytes that a rank sends in `errors_and_bytes`, in float64, by label.

    A switch sends all of a shard but the part that the rank keeps.
    """
    total = 8 * torch.Size(shape).numel()
    share = [chunk_sizes(n, num_ranks)[rank] / n for n in shape]
    stages = list(dims_of_stages(path))
    gathered = total * share[path[0]] * (num_ranks - 1)
    sent = {
        "forward switch": sum(total * share[a] * (1 - share[b]) for a, b in stages),
        "backward switch": sum(total * share[b] * (1 - share[a]) for a, b in stages),
        "forward gather": gathered,
        "backward split": gathered,
    }
    return {label: round(num_bytes) for label, num_bytes in sent.items() if round(num_bytes)}
