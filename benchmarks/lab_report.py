"""The lab's figures as Markdown, and whether the targets hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high
from typing import Any

from lab_schemes import AGAIN, AT_ONCE, AUTO, BASELINES, RING, UNTOLD

CALM = 0.04  # of the cores' time, that others may have while something is measured
CLOSE = 0.10  # how far a prediction may be from the measured time
NEAR_BEST = 1.05  # auto's time over that of the fastest scheme, at most
OVER_RING, OVER_BASELINES = 2.0, 1.2  # how much faster auto should be, at least

HEAD = """\
# The network lab: predicted beside measured

    python benchmarks/lab.py

Hosts are network namespaces of one machine, NICs are shaped by `tc tbf` (`benchmarks/lab_hosts.sh`
says how); no added delay, gloo. One NIC a host: its ranks
share it, and reach each other over the loopback. One NIC a rank: a rank's traffic to other hosts
goes through its own NIC, that to its own host over an unshaped link. A step is forward + backward,
float32, causal, zigzag, head_dim 64.

Named schemes are as a config names them: rank order, the same route in both passes, keys walking.
`auto` is the planner's choice of head split, routes, placements, walking side and of what stays in
memory from the forward to the backward ("keep_gathered": "auto"); `auto, gathers again` keeps
nothing. Packed documents are of drawn lengths, on the layout document_zigzag; `auto` is told of
which kind they are, `auto, one document` that there is one.

Predictions know what `bench-links` measures, and nothing else. The cores are a share of a machine
that others use, too. So the topology is measured before the schemes are chosen, and once more after
every round of them: the median of each figure is what predictions go by. `first ratio` is by what
was measured first alone, as a user's plan would be. What ran while others had more than
{calm:.0f} % of the cores' time ran again, up to twice, and the calmest counts; what they had in
those is said with each case.

Seconds are the slowest rank's, median of {repeats} after one step that is not counted, schemes
taking turns; spread is (largest - smallest) / median, ratio measured / predicted. MB go through the
busiest NIC, one way; measured ones are the NICs' counters, with headers and acknowledgements."""


def report(cases: Mapping[str, dict[str, Any]]) -> str:
    """All cases, then the targets."""
    if not cases:
        return "# The network lab\n\nNothing has run."
    first = next(iter(cases.values()))
    repeats = len(first["schemes"][0]["runs"])
    parts = [
        HEAD.format(repeats=repeats, calm=100 * CALM),
        "## Targets\n\n" + "\n".join(target_lines(cases)),
    ]
    parts += ["\n".join(case_lines(name, case)) for name, case in cases.items()]
    return "\n\n".join(parts)


def case_lines(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    """One case: what it is, and a row for each scheme, fastest first."""
    model, several = case["model"], case.get("documents", 0)
    packed = f" in {several - 1} documents" if several else ""
    yield f"## {name}\n"
    yield (
        f"{case['hosts']} hosts x {case['ranks_per_host']} ranks, one NIC a {case['nics']} at "
        f"{case['rate']}, {model['seqlen']} tokens{packed}, {model['heads']} heads. "
        f"{case['machine']}, load {case['load']:.1f} before; others had {stolen(case)}. "
        f"Topology, measured {len(case['topologies'])} times in at most "
        f"{case['measured_in_s']:.1f} s: {links(case)}.\n"
    )
    yield (
        "| scheme | predicted s | of it computing | measured s | spread | ratio | first ratio | "
        "MB predicted | MB measured |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    schemes = sorted(case["schemes"], key=seconds)
    for scheme in schemes:
        took, expected = seconds(scheme), scheme["predicted_s"]
        yield (
            f"| {scheme['name']} | {expected:.2f} | {scheme['predicted_compute_s']:.2f} | "
            f"{took:.2f} | {100 * spread(scheme):.0f} % | {took / expected:.2f} | "
            f"{took / scheme['predicted_first_s']:.2f} | "
            f"{scheme['predicted_nic_bytes'] / 1e6:.1f} | {megabytes(scheme):.1f} |"
        )
    for name in (AUTO, AGAIN, AT_ONCE, UNTOLD):
        if name in by_name(case):
            yield f"\n`{name}`: {by_name(case)[name]['plan']}"


def links(case: Mapping[str, Any]) -> str:
    """What was measured of a case's cluster: medians, and between what they lie."""
    between, inside = ("between", "gigabits_per_s"), ("inside", "gigabits_per_s")
    (kernel, _), *_ = case["topology"]["kernels"].items()
    return (
        f"{case['topology']['nics_per_host']} NICs a host, "
        f"{among(case, 1e3, *between)} Mbit/s and {among(case, 1, 'between', 'latency_us')} us "
        f"between hosts, {among(case, 1, *inside)} Gbit/s and "
        f"{among(case, 1, 'inside', 'latency_us')} us inside, {kernel} "
        f"{among(case, 1e3, 'kernels', kernel, 'forward_tflops')} and "
        f"{among(case, 1e3, 'kernels', kernel, 'backward_tflops')} GFLOP/s a rank"
    )


def among(case: Mapping[str, Any], scale: float, *path: str) -> str:
    """A figure of the topology: the median (the least to the largest)."""

    def at(words: Any) -> float:
        for key in path:
            words = words[key]
        return scale * words

    found = [at(words) for words in case["topologies"]]
    return f"{at(case['topology']):.3g} ({min(found):.3g} to {max(found):.3g})"


def target_lines(cases: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """A table of what each target's figure is in each case, and whether it holds."""
    yield (
        f"1. Every prediction within {100 * CLOSE:.0f} % of the measured time; after the comma: by "
        f"what was measured first. 2. `auto` within "
        f"{100 * NEAR_BEST - 100:.0f} % of the fastest scheme. Where heads are "
        f"fewer than ranks and every rank has a NIC:\n3. `auto` at least {OVER_RING} x as fast as "
        f"the ring, and 4. {OVER_BASELINES} x as fast as the best of USP and the double ring. "
        f"After the comma: `{AGAIN}`.\n"
    )
    yield (
        "| case | 1. furthest ratio | rows within | 2. auto / fastest | 3. over the ring | "
        "4. over USP, double ring |"
    )
    yield "|---|---|---|---|---|---|"
    for name, case in cases.items():
        if AUTO in by_name(case) and RING in by_name(case):
            yield f"| {name} | " + " | ".join(verdicts(case)) + " |"


def verdicts(case: Mapping[str, Any]) -> list[str]:
    """The figures of a case's targets."""
    found = by_name(case)
    times = {name: seconds(scheme) for name, scheme in found.items()}
    ratios = {name: times[name] / found[name]["predicted_s"] for name in found}
    off = max(ratios, key=lambda name: abs(ratios[name] - 1))
    inside = sum(abs(ratio - 1) <= CLOSE for ratio in ratios.values())
    at_first = sum(abs(times[n] / found[n]["predicted_first_s"] - 1) <= CLOSE for n in found)
    best = min(times, key=times.__getitem__)
    behind = times[AUTO] / times[best]
    others = {name: t for name, t in times.items() if name.startswith(BASELINES)}
    nearest = min(others, key=others.__getitem__)
    ring, gain = (t / times[AUTO] for t in (times[RING], others[nearest]))
    ring_again, gain_again = (t / times[AGAIN] for t in (times[RING], others[nearest]))
    few_heads = case["model"]["heads"] < len(ranks(case))
    counts = case["nics"] == "rank" and few_heads and not case.get("documents")
    return [
        f"{ratios[off]:.2f} ({off}): {holds(inside == len(ratios))}",
        f"{inside}, {at_first} of {len(ratios)}",
        f"{behind:.2f} ({best}): {holds(behind <= NEAR_BEST)}",
        f"{ring:.2f}, {ring_again:.2f}" + (f": {holds(ring >= OVER_RING)}" if counts else ""),
        f"{gain:.2f}, {gain_again:.2f} ({nearest})"
        + (f": {holds(gain >= OVER_BASELINES)}" if counts else ""),
    ]


def phase_lines(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    """Where a prediction goes wrong: seconds of every phase, predicted beside measured.

    What no message ends, such as the last step's tiles, is counted with the phase after it.
    """
    yield f"# {name}"
    for scheme in case["schemes"]:
        median = sorted(scheme["runs"], key=lambda run: run["seconds"])[len(scheme["runs"]) // 2]
        took, total = median["phases"], median["seconds"]
        yield f"{scheme['name']}: {scheme['plan']}"
        rows = together(scheme["predicted_phases"], took)
        for label, expected, spent in [("all", scheme["predicted_s"], total), *rows]:
            yield f"    {label:24}{expected:9.3f}{spent:9.3f}{spent - expected:9.3f}"


def together(
    expected: Mapping[str, float], took: Mapping[str, float]
) -> Iterator[tuple[str, float, float]]:
    """(label, predicted, measured) of the measured phases."""
    order, waiting = iter(sorted(expected, key=in_time)), 0.0
    left = dict(expected)
    for label, seconds in took.items():
        if label not in expected and label != "rest":
            yield label, 0.0, seconds
            continue
        for name in order:
            waiting += left.pop(name)
            if name == label:
                break
        yield label, waiting, seconds
        waiting = 0.0


def in_time(label: str) -> tuple[int, int, int]:
    """Where a phase stands in a step: the agreement, the forward, the backward."""
    way, last = label.split()[0], label.split()[-1]
    place = ("agreement", "forward", "backward").index(way)
    if "ulysses" in label:  # heads are traded first and last, in the backward the other way round
        first = (last == "qkv") == (way == "forward")
        return place, 0 if first else 9, 0
    return place, {"gather": 1, "home": 3}.get(last, 2), int(last) if last.isdigit() else 0


def by_name(case: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {scheme["name"]: scheme for scheme in case["schemes"]}


def ranks(case: Mapping[str, Any]) -> range:
    """The case's ranks."""
    return range(case["hosts"] * case["ranks_per_host"])


def seconds(scheme: Mapping[str, Any]) -> float:
    """The median of the measured times."""
    return median_high([run["seconds"] for run in scheme["runs"]])


def megabytes(scheme: Mapping[str, Any]) -> float:
    return median_high([run["nic_bytes"] for run in scheme["runs"]]) / 1e6


def spread(scheme: Mapping[str, Any]) -> float:
    """Largest time less smallest, over the median."""
    times = [run["seconds"] for run in scheme["runs"]]
    return (max(times) - min(times)) / seconds(scheme)


def stolen(case: Mapping[str, Any]) -> str:
    """What others had of the cores while the schemes ran: the median and the most."""
    shares = sorted(run["stolen"] for scheme in case["schemes"] for run in scheme["runs"])
    return f"{100 * median_high(shares):.0f} % of the cores, {100 * shares[-1]:.0f} % at most"


def holds(yes: bool) -> str:
    return "holds" if yes else "does not hold"
