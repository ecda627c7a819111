"""Gradients on several ranks beside those of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def assert_mean_gradients(
    rank_gradients: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
    tolerance: float = 1e-6,
    absolute: float = 1e-9,
) -> None:
    """The mean over the ranks, which DDP and ZeRO take, is one device's gradient, of each parameter
    that has one there, and no others have one on ranks.

    Args:
        rank_gradients: of each rank, by parameter. expected: of one device, by parameter.
        tolerance: relative to the largest element. Models in float64 round to float32 inside their
            norms, and gradients that ranks have in parts are rounded part by part.
        absolute: what is added to it: gradients of key biases are 0 but for rounding.
    """
    for gradients in rank_gradients:
        assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        mean = sum(gradients[name] for gradients in rank_gradients) / len(rank_gradients)
        error = (mean - gradient).abs().max()
        assert error < tolerance * gradient.abs().max() + absolute, f"{name}: error {error:.1e}"
