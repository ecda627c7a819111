"""Properties of the jobs, in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import pytest

from wf_backends.weights.jobs import JobMaker, SimulatedDevice, TimedJob, simulate, used_linears
from wf_backends.weights.law import Rates
from wf_backends.weights.plan import LANE_NAMES, Linear, Phase, Plan, Request
from wf_backends.weights.planning import decode_seconds, make_plan, split_plan


def draw_request(draw: random.Random) -> Request:
    linears = []
    for layer in range(draw.randint(1, 5)):
        for name in ("q", "o", "up", "down")[: draw.randint(1, 4)]:
            sizes = draw.choice([16, 40, 64, 130]), draw.choice([8, 32, 96])
            linears.append(Linear(f"{layer}.{name}", *sizes, itemsize=4))
        for expert in range(draw.choice([0, 0, 4])):
            sizes = 64, 32
            for name in ("w1", "w2"):
                label = f"{layer}.{expert}"
                linears.append(Linear(f"{label}.{name}", *sizes, 4, expert=label, routed=0.5))
    total, row = (f(x.nbytes if f is sum else x.row_bytes for x in linears) for f in (sum, max))
    prefetch = draw.randint(0, 3)
    rates = [10 ** draw.uniform(3, 6) for _ in range(3)]
    return Request(
        tuple(linears),
        Rates(*rates, accelerator_flops=10 ** draw.uniform(6, 8)),
        accelerator_bytes=(prefetch + 2) * row + int(draw.random() * 0.8 * total),
        slabs=prefetch + 2,
        alpha=draw.choice([None, None, 0.0, 0.4, 1.0]),
    )


@dataclass
class Call:
    """Of a linear, in virtual time."""

    linear: int
    begin: float
    end: float
    done: list[TimedJob]


def call_all(device: SimulatedDevice, order: Sequence[int], phase: Phase) -> list[Call]:
    """A pass, call by call."""
    calls = []
    for linear in order:
        begin, before = device.now, len(device.timed_jobs)
        device.run_pass([linear], phase)
        calls.append(Call(linear, begin, device.now, device.timed_jobs[before:]))
    return calls


def call_drawn(
    draw: random.Random, plan: Plan, passes: int = 4
) -> tuple[SimulatedDevice, list[Call]]:
    """Passes of both phases with experts drawn at random."""
    device, calls = SimulatedDevice(plan), list[Call]()
    linears = [split.linear for split in plan.splits]
    for number in range(passes):
        drawn = {x.expert: draw.random() < x.routed for x in linears}
        order = [i for i, x in enumerate(linears) if not x.expert or drawn[x.expert]]
        calls += call_all(device, order, "prefill" if number == 2 else "decode")
    return device, calls


@cache
def drawn(seed: int) -> tuple[Plan, SimulatedDevice, list[Call]]:
    """A plan, and passes of it."""
    draw = random.Random(seed)
    plan = make_plan(draw_request(draw))
    return plan, *call_drawn(draw, plan)


@pytest.mark.parametrize("seed", range(100))
def test_every_row_is_computed_once_and_no_slab_is_written_while_it_is_read(seed: int) -> None:
    plan, _, calls = drawn(seed)
    held: dict[int, TimedJob] = {}  # slab -> what was copied into it
    free: dict[int | None, float] = {}  # slab -> end of the last job that used it
    for call in calls:
        rows: list[int] = []
        for d in call.done:
            job = d.job
            assert d.start >= max(call.begin, free.get(job.slab, 0.0))
            if job.lane == "link":
                assert job.slab is not None
                assert plan.bytes_of(job) <= plan.slab_bytes
                held[job.slab] = d
            else:
                assert job.linear == call.linear and d.end <= call.end
                rows += range(job.start, job.stop)
            if job.lane == "accelerator" and job.slab is not None:
                copy = held[job.slab]
                assert replace(copy.job, lane="accelerator") == job and copy.end <= d.start
            if job.slab is not None:
                free[job.slab] = d.end
        assert sorted(rows) == list(range(plan.splits[call.linear].linear.rows))


@pytest.mark.parametrize("seed", range(100))
def test_no_pass_is_faster_than_its_bounds(seed: int) -> None:
    plan, device, _ = drawn(seed)
    for lane in LANE_NAMES:
        jobs = [d for d in device.timed_jobs if d.job.lane == lane]
        assert all(a.end <= b.start for a, b in zip(jobs, jobs[1:], strict=False))
        waited_for = [d for d in jobs if d.end <= device.now]  # copies may run on after the end
        assert sum(d.end - d.start for d in waited_for) <= device.now * (1 + 1e-9)
    assert plan.decode_seconds > 0


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_as_fast_as_each_lane_alone_and_its_memory_is_kept(seed: int) -> None:
    plan = drawn(seed)[0]
    request = plan.request
    assert plan.accelerator_bytes <= request.accelerator_bytes
    if request.alpha is None and plan.slabs:
        assert plan.decode_seconds <= plan.streaming_seconds * (1 + 1e-9)
        assert plan.decode_seconds <= plan.host_seconds * (1 + 1e-9)
    assert json.loads(json.dumps(asdict(plan)))["slabs"] == plan.slabs  # plain data


@pytest.mark.parametrize("seed", range(12))
def test_no_fixed_share_of_the_host_simulates_much_faster(seed: int) -> None:
    """What the law leaves out, beginnings of copies and whole rows, is within 5 % here."""
    draw = random.Random(seed)
    linears = tuple(Linear(f"{i}", 256, 64, 4) for i in range(12))
    rates = Rates(*(10 ** draw.uniform(5, 6.5) for _ in range(2)), accelerator=1e8)
    total = sum(x.nbytes for x in linears)
    request = Request(linears, rates, int(draw.uniform(0.1, 0.7) * total))
    plan = make_plan(request)
    shares = [i / 40 for i in range(41)]
    others = [decode_seconds(split_plan(request, a)) for a in shares]
    assert plan.decode_seconds <= 1.05 * min(others)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_call_waits_for_is_submitted_before_copies_for_others(seed: int) -> None:
    plan = drawn(seed)[0]
    maker = JobMaker(plan)
    for linear in 2 * used_linears(plan.request.linears, 1):
        jobs = maker.make_jobs(linear, "decode")
        others = [job.lane == "link" and job.linear != linear for job in jobs]
        assert others == sorted(others)


def test_copies_run_on_into_the_next_token() -> None:
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(4))
    request = Request(linears, Rates(1e5, 3e5, 1e8), 4096)
    device, calls = call_drawn(random.Random(0), make_plan(request), passes=2)
    later = [d for call in calls[-len(linears) + 1 :] for d in call.done if d.job.lane == "link"]
    for_the_next = next(d for d in later if d.job.linear == 0)
    assert for_the_next.start < device.now


def test_the_order_is_learned_from_the_calls() -> None:
    """Calls in another order than that of the model cost copies in vain in the first pass only."""
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(5))
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), 4096))
    device = SimulatedDevice(plan)
    straight = simulate(plan, ["decode"] * 3)[0]
    turned = [device.run_pass([0, 3, 1, 2, 4], "decode") for _ in range(3)]
    assert turned[0] > straight[0] and turned[2] == pytest.approx(straight[2], rel=1e-3)


def test_experts_that_no_token_is_routed_to_are_not_copied() -> None:
    linears = (
        Linear("o", 64, 16, 4),
        *(Linear(f"{e}.{n}", 64, 16, 4, expert=f"{e}", routed=0.25) for e in "abcd" for n in "12"),
        Linear("head", 64, 16, 4),
    )
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), 6000, alpha=0.0))
    device = SimulatedDevice(plan)
    for _ in range(5):
        device.run_pass([0, 5, 6, 9], "decode")
    assert {d.job.linear for d in device.timed_jobs if d.job.lane == "link"} == {0, 5, 6, 9}
    assert len(used_linears(linears, 1)) == 4  # one of four experts, between the first and the last


def test_what_fits_is_resident() -> None:
    linears = (Linear("a", 64, 16, 4),)
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), 5000))
    assert (plan.splits[0].resident, plan.slabs, plan.slab_bytes) == (64, 0, 0)


def test_too_little_memory_is_refused_linears() -> None:
    linears = (Linear("a", 64, 16, 4),)
    with pytest.raises(ValueError, match=r"max_memory\[0\] must be at least 1192 bytes.*got 1000"):
        make_plan(Request(linears, Rates(1e5, 1e5, 1e8), 1000, other_bytes=1000))
