"""What one layer would cost on the LSS paper's machine, in closed form: nothing here is measured.

    python benchmarks/lss_predict.py

The model is plain: seconds = FLOPs / rate + bytes sent / bandwidth, nothing overlaps. LSS spreads a
sequence over all ranks. Megatron-SP is there twice: over all ranks too, which would need as many
heads, and over as many as divide the heads, the others working on other sequences. Speeds are
tokens/s of the whole machine. Memory is what one rank keeps of one layer for the backward, with
attention that stores no scores, and 16 bytes for each of its parameters (Adam, half precision).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

HALF = 2  # bytes
STATE = 16  # bytes a parameter: fp16 weight and gradient, fp32 weight and two moments
KEPT = 34  # bytes a token and channel that a layer keeps, arXiv 2205.05198 section 4.1


@dataclass(frozen=True, slots=True)
class Machine:
    """Summit's node: 6 V100, two EDR links."""

    flops_per_s: float = 50e12  # of 125e12 at peak
    inside_bytes_per_s: float = 50e9
    between_bytes_per_s: float = 25e9 / 6  # a rank's part of its node's links
    ranks_per_host: int = 6

    def bandwidth(self, num_ranks: int) -> float:
        """Of one rank, for a group of consecutive ranks."""
        inside = num_ranks <= self.ranks_per_host
        return self.inside_bytes_per_s if inside else self.between_bytes_per_s


@dataclass(frozen=True, slots=True)
class Model:
    """A layer and a sequence; the paper's GPT has width 1,280 and 20 heads."""

    tokens: int
    dim: int = 1280
    heads: int = 20

    @property
    def flops(self) -> float:
        """Forward and backward of all tokens, causal."""
        return 3 * self.tokens * self.dim * (24 * self.dim + 2 * self.tokens)

    @property
    def parameters(self) -> int:
        return 12 * self.dim**2


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one layer, forward and backward, on all ranks."""

    ranks_per_sequence: int
    tokens_per_s: float
    sent_bytes: float
    memory_bytes: float


def lss(model: Model, machine: Machine, num_ranks: int) -> Prediction:
    """[K|V] there, [dK|dV] back, and the mean of the layer's gradients."""
    unit = model.tokens / num_ranks * model.dim * HALF
    gradients = 2 * (num_ranks - 1) / num_ranks * model.parameters * HALF
    sent = 4 * (num_ranks - 1) * unit + gradients
    seconds = model.flops / num_ranks / machine.flops_per_s + sent / machine.bandwidth(num_ranks)
    keys = 2 * model.tokens * model.dim * HALF
    memory = unit / HALF * KEPT + keys + STATE * model.parameters
    return Prediction(num_ranks, model.tokens / seconds, sent, memory)


def megatron(model: Model, machine: Machine, num_ranks: int, size: int) -> Prediction:
    """8 collectives a layer among the `size` ranks of a sequence, gradients between sequences."""
    unit, replicas = model.tokens / size * model.dim * HALF, num_ranks // size
    gradients = 2 * (replicas - 1) / replicas * model.parameters / size * HALF
    activations = 8 * (size - 1) * unit
    seconds = model.flops / size / machine.flops_per_s
    seconds += activations / machine.bandwidth(size) + gradients / machine.between_bytes_per_s
    memory = unit / HALF * KEPT + STATE * model.parameters / size
    return Prediction(size, replicas * model.tokens / seconds, activations + gradients, memory)


def predictions(model: Model, machine: Machine, num_ranks: int) -> dict[str, Prediction]:
    """All schemes by name."""
    fits = [d for d in range(1, model.heads + 1) if not (model.heads % d or num_ranks % d)]
    return {
        "LSS": lss(model, machine, num_ranks),
        "Megatron-SP, all": megatron(model, machine, num_ranks, num_ranks),
        "Megatron-SP, heads": megatron(model, machine, num_ranks, fits[-1]),
    }


def main() -> None:
    """One table for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50112)
    parser.add_argument("--ranks", type=int, nargs="+", default=[144, 3456])
    args = parser.parse_args()
    model, machine = Model(args.tokens), Machine()
    print(f"predicted, {args.tokens} tokens, width {model.dim}, {model.heads} heads; {machine}")
    print(
        f"{'ranks':>6} {'scheme':20}{'ranks/sequence':>15}{'tokens/s':>12}{'GB sent':>9}{'MB':>8}"
    )
    for num_ranks in args.ranks:
        for name, got in predictions(model, machine, num_ranks).items():
            print(
                f"{num_ranks:6} {name:20}{got.ranks_per_sequence:15}{got.tokens_per_s:12.3g}"
                f"{got.sent_bytes / 1e9:9.3f}{got.memory_bytes / 1e6:8.1f}"
            )


if __name__ == "__main__":
    main()
