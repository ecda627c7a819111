"""HeteGen's second lab: two threads on two cores, nothing shaped. A part of benchmarks/hetegen.py.

One thread copies and stands for the accelerator, the other is the host. Rates are fitted in their
own runs: streaming, the host alone, and both at a time at a share that is not the best.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends.hetegen import Rates, ShapedDevice, dispatch_model
from wf_backends.hetegen.measure import measure_call

SLABS, PIECES = 3, 8  # slabs, and slabs that one linear fills
PASSES = 8
FAST = 1e13  # bytes a second: no time
FIT_ALPHA = 0.5  # of the run that has both threads work
ARMS = {"HeteGen": "auto", "streaming": 0.0, "host alone": 1.0}


class Stack(nn.Module):
    """Linears in a row, whose activations take no time."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoThreads(ShapedDevice):
    """Lanes that are not shaped; the accelerator's work is done in the link's thread."""

    def __init__(self, rates: Rates) -> None:
        super().__init__(rates.link, rates.host, rates.accelerator)
        self.fitted = rates

    def rates(self, dtype: torch.dtype) -> Rates:
        return self.fitted

    def submit(self, lane: str, *work: Any) -> Any:
        return super().submit("link" if lane == "accelerator" else lane, *work)

    def _seconds(self, lane: str, nbytes: int) -> float:
        return 0.0


def run(model: Stack, rates: Rates, alpha: float | str) -> tuple[float, dict]:
    """(the host's share, what `Handle.report` tells) of some decoding passes."""
    width = model.layers[0].in_features
    memory: dict[int | str, int | str] = {0: SLABS * (width // PIECES) * width * 4}
    x = torch.ones(1, width)
    with dispatch_model(model, memory, TwoThreads(rates), alpha=alpha) as handle:  # type: ignore[arg-type]
        with torch.inference_mode():
            for _ in range(PASSES):
                model(x)
        return handle.plan.splits[0].alpha("decode"), handle.report()


def fitted(model: Stack, guess: Rates) -> Rates:
    """Rates of the thread that copies and computes, of the host's, and of both at a time."""

    def rate(lane: str, alpha: float) -> float:
        told = run(model, guess, alpha)[1]["lanes"][lane]
        return told["bytes"] / told["busy_seconds"]  # the link's thread computes its rows, too

    link, host = rate("link", 0.0), rate("host", 1.0)
    beside = rate("link", FIT_ALPHA), rate("host", FIT_ALPHA)
    return Rates(
        link,
        host,
        FAST,
        memory=sum(beside),
        host_beside_link=min(beside[1], host),
        call_seconds=measure_call(TwoThreads(Rates(FAST, FAST, FAST))),
    )


def cores(layers: int = 10, width: int = 2560, rounds: int = 7) -> None:
    """Print a table. Rates are fitted anew in each round, and predict the round's other runs."""
    model = Stack(layers, width)
    rates = [Rates(FAST, FAST, FAST)]
    told: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        rates.append(fitted(model, rates[-1]))
        for name, alpha in ARMS.items():
            share, report = run(model, rates[-1], alpha)
            seen = report["decode"]
            told[name].append((share, seen["predicted_seconds"], seen["measured_seconds"]))

    def middle(name: str) -> float:
        return median(getattr(each, name) for each in rates[1:])

    print(
        "two threads, fitted GB/s: two copies and the GEMM of the one "
        f"{middle('link') / 1e9:.2f}, GEMM of the other {middle('host') / 1e9:.2f}; both at a time "
        f"{middle('memory') / 1e9:.2f}, of which the other {middle('host_beside_link') / 1e9:.2f}; "
        f"a call {1e6 * middle('call_seconds'):.0f} us; medians of {rounds} rounds\n"
    )
    print("| | alpha | predicted | measured | measured / predicted | in all rounds |")
    print("|---|---|---|---|---|---|")
    for name, runs in told.items():
        share, predicted, took = (median(each) for each in zip(*runs, strict=True))
        ratios = sorted(measured / guessed for _, guessed, measured in runs)
        print(
            f"| {name} | {share:.2f} | {predicted:.4f} | {took:.4f} | {median(ratios):.3f} "
            f"| {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
