"""The report of the lab in Markdown: predicted and measured figures, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high
from typing import Any

from lab_schemes import AUTO, BASELINES, KEEPS_NOTHING, ONE_DOCUMENT, RING, WHOLE_HEADS
from measure import table_head, table_row

MAX_STEAL = 0.04  # largest share of steal time of a measurement that is not repeated
# Targets:
MAX_ERROR = 0.10  # of a prediction, relative to it
MAX_SLOWDOWN = 1.05  # time of auto / time of the fastest scheme
RING_SPEEDUP, BASELINE_SPEEDUP = 2.0, 1.2  # of auto, at least

HEAD = """\
# The network lab: predicted beside measured

    python benchmarks/lab.py

Hosts are network namespaces of one machine; NICs are shaped by `tc tbf` (`benchmarks/lab_hosts.sh`
says how), without added delay; gloo. One NIC a host: its ranks share it, and reach each other over
the loopback. One NIC a rank: messages to other hosts go through it, messages inside the host over
an unshaped link. A step is forward + backward, float32, causal, zigzag, head_dim 64.

Named schemes are as a config names them: rank order, the same route in both passes, keys walking.
`auto` is the planner's choice of head split, routes, placements, walking side and of what stays in
memory from the forward to the backward ("keep_gathered": "auto"); `auto, gathers again` keeps
nothing. Packed documents have random lengths and the layout document_zigzag; `auto` is planned for
documents of this kind, `auto, one document` as if there were one document.

Predictions use only what `bench-links` measures. The cores are shared with other virtual machines,
so the topology is measured before the schemes are chosen, and again after every round of them;
predictions use the median of each figure. `first ratio` uses the first measurement alone, as the
plan of a user would. A run in which others had more than {calm:.0f} % of the cores' time was
repeated, up to twice, and the run in which they had least counts; each case says how much they had.

Seconds are the slowest rank's, the median of {repeats} after one step that is not counted; schemes
take turns. Spread is (largest - smallest) / median, ratio is measured / predicted. MB go through
the busiest NIC in one direction; measured MB are the NIC's counters, with headers and
acknowledgements."""


def report(cases: Mapping[str, dict[str, Any]]) -> str:
    """The whole report: the targets, then all cases."""
    if not cases:
        return "# The network lab\n\nNothing has run."
    first = next(iter(cases.values()))
    repeats = len(first["schemes"][0]["runs"])
    parts = [
        HEAD.format(repeats=repeats, calm=100 * MAX_STEAL),
        "## Targets\n\n" + "\n".join(target_lines(cases)),
    ]
    parts += ["\n".join(case_lines(name, case)) for name, case in cases.items()]
    return "\n\n".join(parts)


def case_lines(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    """One case: its description, and a row for each scheme, fastest first."""
    model = case["model"]
    num_borders = case.get("documents", 0)
    packed = f" in {num_borders - 1} documents" if num_borders else ""
    yield f"## {name}\n"
    yield (
        f"{case['hosts']} hosts x {case['ranks_per_host']} ranks, one NIC a {case['nics']} at "
        f"{case['rate']}, {model['seqlen']} tokens{packed}, {model['heads']} heads. "
        f"{case['machine']}, load {case['load']:.1f} before; others had {steal_shares(case)}. "
        f"Topology, measured {len(case['topologies'])} times in at most "
        f"{case['measured_in_s']:.1f} s: {links(case)}.\n"
    )
    head = ("scheme", "predicted s", "of it computing", "measured s", "spread", "ratio")
    yield table_head(*head, "first ratio", "MB predicted", "MB measured")
    for scheme in sorted(case["schemes"], key=seconds):
        measured, predicted = seconds(scheme), scheme["predicted_s"]
        cells = [scheme["name"], f"{predicted:.2f}", f"{scheme['predicted_compute_s']:.2f}"]
        cells += [f"{measured:.2f}", f"{100 * spread(scheme):.0f} %"]
        cells += [f"{measured / predicted:.2f}", f"{measured / scheme['predicted_first_s']:.2f}"]
        cells += [f"{scheme['predicted_nic_bytes'] / 1e6:.1f}", f"{megabytes(scheme):.1f}"]
        yield table_row(*cells)
    for name in (AUTO, KEEPS_NOTHING, WHOLE_HEADS, ONE_DOCUMENT):
        if name in by_name(case):
            yield f"\n`{name}`: {by_name(case)[name]['plan']}"


def links(case: Mapping[str, Any]) -> str:
    """The measured cluster of a case: the median of each figure, and its range."""
    between, inside = ("between", "gigabits_per_s"), ("inside", "gigabits_per_s")
    (kernel, _), *_ = case["topology"]["kernels"].items()
    return (
        f"{case['topology']['nics_per_host']} NICs a host, "
        f"{ranged(case, 1e3, *between)} Mbit/s and {ranged(case, 1, 'between', 'latency_us')} us "
        f"between hosts, {ranged(case, 1, *inside)} Gbit/s and "
        f"{ranged(case, 1, 'inside', 'latency_us')} us inside, {kernel} "
        f"{ranged(case, 1e3, 'kernels', kernel, 'forward_tflops')} and "
        f"{ranged(case, 1e3, 'kernels', kernel, 'backward_tflops')} GFLOP/s a rank"
    )


def ranged(case: Mapping[str, Any], scale: float, *path: str) -> str:
    """A figure of the topology, scaled: median (minimum to maximum)."""

    def figure(topology: Any) -> float:
        for key in path:
            topology = topology[key]
        return scale * topology

    values = [figure(topology) for topology in case["topologies"]]
    return f"{figure(case['topology']):.3g} ({min(values):.3g} to {max(values):.3g})"


def target_lines(cases: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """A table of the targets: the figure of each case, and whether the target holds."""
    yield (
        f"1. Every prediction within {100 * MAX_ERROR:.0f} % of the measured time; after the "
        f"comma: by what was measured first. 2. `auto` within "
        f"{100 * MAX_SLOWDOWN - 100:.0f} % of the fastest scheme. Where heads are "
        f"fewer than ranks and every rank has a NIC:\n3. `auto` at least {RING_SPEEDUP} x as fast "
        f"as the ring, and 4. {BASELINE_SPEEDUP} x as fast as the best of USP and the double ring. "
        f"After the comma: `{KEEPS_NOTHING}`.\n"
    )
    head = ("case", "1. furthest ratio", "rows within", "2. auto / fastest", "3. over the ring")
    yield table_head(*head, "4. over USP, double ring")
    for name, case in cases.items():
        if AUTO in by_name(case) and RING in by_name(case):
            yield table_row(name, *verdicts(case))


def verdicts(case: Mapping[str, Any]) -> list[str]:
    """The cells of a case in the table of targets."""
    schemes = by_name(case)
    times = {name: seconds(scheme) for name, scheme in schemes.items()}
    ratios = {name: times[name] / schemes[name]["predicted_s"] for name in schemes}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    within = sum(abs(ratio - 1) <= MAX_ERROR for ratio in ratios.values())
    first_ratios = [times[name] / schemes[name]["predicted_first_s"] for name in schemes]
    first_within = sum(abs(ratio - 1) <= MAX_ERROR for ratio in first_ratios)
    best = min(times, key=times.__getitem__)
    slowdown = times[AUTO] / times[best]
    baselines = {name: time for name, time in times.items() if name.startswith(BASELINES)}
    baseline = min(baselines, key=baselines.__getitem__)
    ring_speedup, speedup = times[RING] / times[AUTO], times[baseline] / times[AUTO]
    plain_ring_speedup = times[RING] / times[KEEPS_NOTHING]
    plain_speedup = times[baseline] / times[KEEPS_NOTHING]
    few_heads = case["model"]["heads"] < case["hosts"] * case["ranks_per_host"]
    cells = [
        f"{ratios[worst]:.2f} ({worst}): {holds(within == len(ratios))}",
        f"{within}, {first_within} of {len(ratios)}",
        f"{slowdown:.2f} ({best}): {holds(slowdown <= MAX_SLOWDOWN)}",
        f"{ring_speedup:.2f}, {plain_ring_speedup:.2f}",
        f"{speedup:.2f}, {plain_speedup:.2f} ({baseline})",
    ]
    if case["nics"] == "rank" and few_heads and not case.get("documents"):
        cells[3] += f": {holds(ring_speedup >= RING_SPEEDUP)}"
        cells[4] += f": {holds(speedup >= BASELINE_SPEEDUP)}"
    return cells


def phase_lines(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    """Predicted and measured seconds of every phase, and the difference, for each scheme.

    Work that no message follows, such as the last step's tiles, counts in the next phase.
    """
    yield f"# {name}"
    for scheme in case["schemes"]:
        runs = sorted(scheme["runs"], key=lambda run: run["seconds"])
        median_run = runs[len(runs) // 2]
        total = ("all", scheme["predicted_s"], median_run["seconds"])
        yield f"{scheme['name']}: {scheme['plan']}"
        phases = align_phases(scheme["predicted_phases"], median_run["phases"])
        for label, predicted, measured in [total, *phases]:
            yield f"    {label:24}{predicted:9.3f}{measured:9.3f}{measured - predicted:9.3f}"


def align_phases(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> Iterator[tuple[str, float, float]]:
    """(label, predicted, measured seconds) of the measured phases.

    A predicted phase that was not measured counts in the next measured one.
    """
    order = iter(sorted(predicted, key=phase_order))
    waiting = 0.0  # predicted seconds of phases that were not measured
    left = dict(predicted)
    for label, seconds in measured.items():
        if label not in predicted and label != "rest":
            yield label, 0.0, seconds
            continue
        for name in order:
            waiting += left.pop(name)
            if name == label:
                break
        yield label, waiting, seconds
        waiting = 0.0


def phase_order(label: str) -> tuple[int, int, int]:
    """Sort key of a phase within a step: the agreement, the forward, the backward."""
    first_word, last_word = label.split()[0], label.split()[-1]
    part = ("agreement", "forward", "backward").index(first_word)
    if "ulysses" in label:  # forward: qkv first, out last; backward: the other way round
        comes_first = (last_word == "qkv") == (first_word == "forward")
        return part, 0 if comes_first else 9, 0
    step = int(last_word) if last_word.isdigit() else 0
    return part, {"gather": 1, "reduce": 3}.get(last_word, 2), step


def by_name(case: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {scheme["name"]: scheme for scheme in case["schemes"]}


def seconds(scheme: Mapping[str, Any]) -> float:
    """The median of the measured times."""
    return median_high([run["seconds"] for run in scheme["runs"]])


def megabytes(scheme: Mapping[str, Any]) -> float:
    return median_high([run["nic_bytes"] for run in scheme["runs"]]) / 1e6


def spread(scheme: Mapping[str, Any]) -> float:
    """(largest - smallest time) / median."""
    times = [run["seconds"] for run in scheme["runs"]]
    return (max(times) - min(times)) / seconds(scheme)


def steal_shares(case: Mapping[str, Any]) -> str:
    """Steal time while the schemes ran: the median and the maximum."""
    shares = sorted(run["stolen"] for scheme in case["schemes"] for run in scheme["runs"])
    return f"{100 * median_high(shares):.0f} % of the cores, {100 * shares[-1]:.0f} % at most"


def holds(met: bool) -> str:
    return "holds" if met else "does not hold"
