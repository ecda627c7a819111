"""The part "cores" of benchmarks/hetegen.py: two threads on two cores, at their real speed.

One thread copies and stands for the accelerator, the other is the host. Their rates are fitted in
separate runs: streaming alone, the host alone, and both at a time with an alpha that is not the
best.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from measure import print_head, print_row
from torch import Tensor, nn

from wf_backends.hetegen import Rates, ShapedDevice, dispatch_model
from wf_backends.hetegen.measure import measure_call

NUM_SLABS, SLABS_PER_LINEAR = 3, 8
PASSES = 8
UNLIMITED = 1e13  # bytes per second
FIT_ALPHA = 0.5  # of the run that fits the rates while both threads work
ALPHAS = {"HeteGen": "auto", "streaming": 0.0, "host alone": 1.0}


class Stack(nn.Module):
    """Linears one after another, with nothing between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoThreads(ShapedDevice):
    """A device of two threads that work as fast as they can: the link's and the host's.

    The link's thread also does the accelerator's work.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__(rates.link, rates.host, rates.accelerator)
        self.fitted = rates

    def rates(self, dtype: torch.dtype, pin_memory: bool | str = True) -> Rates:
        return self.fitted

    def submit(self, lane: str, *work: Any) -> Any:
        return super().submit("link" if lane == "accelerator" else lane, *work)

    def _seconds(self, lane: str, nbytes: int) -> float:
        return 0.0


def run(model: Stack, rates: Rates, alpha: float | str) -> tuple[float, dict[str, Any]]:
    """(the host's share, `Handle.report`) of PASSES decoding passes."""
    width = model.layers[0].in_features
    slab_bytes = width // SLABS_PER_LINEAR * width * 4
    memory: dict[int | str, int | str] = {0: NUM_SLABS * slab_bytes}
    x = torch.ones(1, width)
    with dispatch_model(model, memory, TwoThreads(rates), alpha=alpha) as handle:  # type: ignore[arg-type]
        with torch.inference_mode():
            for _ in range(PASSES):
                model(x)
        return handle.plan.splits[0].alpha("decode"), handle.report()


def fit_rates(model: Stack, planned_with: Rates) -> Rates:
    """The rates of both threads, each alone and both at a time; plans use `planned_with`."""

    def lane_rate(lane: str, alpha: float) -> float:
        figures = run(model, planned_with, alpha)[1]["lanes"][lane]
        return figures["bytes"] / figures["busy_seconds"]  # the link's thread also computes

    link, host = lane_rate("link", 0.0), lane_rate("host", 1.0)
    link_beside_host = lane_rate("link", FIT_ALPHA)
    host_beside_link = lane_rate("host", FIT_ALPHA)
    unlimited = TwoThreads(Rates(UNLIMITED, UNLIMITED, UNLIMITED))
    call_seconds, host_call_seconds = measure_call(unlimited)
    return Rates(
        link,
        host,
        UNLIMITED,
        memory=link_beside_host + host_beside_link,
        host_beside_link=min(host_beside_link, host),
        call_seconds=call_seconds,
        host_call_seconds=host_call_seconds,
    )


def cores_table(layers: int = 10, width: int = 2560, rounds: int = 7) -> None:
    """Print a table. Each round fits the rates again, and predicts its other runs by them."""
    model = Stack(layers, width)
    rates = Rates(UNLIMITED, UNLIMITED, UNLIMITED)
    fitted: list[Rates] = []
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ALPHAS}
    for _ in range(rounds):
        rates = fit_rates(model, rates)
        fitted.append(rates)
        for name, alpha in ALPHAS.items():
            share, report = run(model, rates, alpha)
            figures = report["decode"]
            runs[name].append((share, figures["predicted_seconds"], figures["measured_seconds"]))
    print_rates(fitted)
    print_head("", "alpha", "predicted", "measured", "measured / predicted", "in all rounds")
    for name, figures_of_rounds in runs.items():
        alpha, predicted, measured = map(median, zip(*figures_of_rounds, strict=True))
        ratios = [measured / predicted for _, predicted, measured in figures_of_rounds]
        cells = [f"{alpha:.2f}", f"{predicted:.4f}", f"{measured:.4f}", f"{median(ratios):.3f}"]
        print_row(name, *cells, f"{min(ratios):.3f} to {max(ratios):.3f}")


def print_rates(fitted: list[Rates]) -> None:
    """Print the median of each rate."""

    def median_of(rate: str) -> float:
        return median(getattr(rates, rate) for rates in fitted)

    both, host_beside_link = median_of("memory"), median_of("host_beside_link")
    print(
        "two threads, fitted GB/s: two copies and the GEMM of the one "
        f"{median_of('link') / 1e9:.2f}, GEMM of the other {median_of('host') / 1e9:.2f}; "
        f"both at a time {both / 1e9:.2f}, of which the other {host_beside_link / 1e9:.2f}; "
        f"a call {1e6 * median_of('call_seconds'):.0f} us, of the other "
        f"{1e6 * median_of('host_call_seconds'):.0f} us more; medians of {len(fitted)} rounds\n"
    )
