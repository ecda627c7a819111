"""The jobs of the lanes: properties of drawn plans, simulated in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise

import pytest

from wf_backends.hetegen.weights.jobs import (
    JobMaker,
    SimulatedDevice,
    TimedJob,
    simulate,
    used_linears,
)
from wf_backends.hetegen.weights.law import Rates
from wf_backends.hetegen.weights.plan import LANE_NAMES, Linear, Phase, Plan, Request
from wf_backends.hetegen.weights.planning import decode_seconds, make_plan, split_plan

ROUNDING = 1 + 1e-9


def draw_linears(rng: random.Random) -> tuple[Linear, ...]:
    """1 to 5 layers of 1 to 4 linears, some with 4 experts."""
    linears = []
    for layer in range(rng.randint(1, 5)):
        for name in ("q", "o", "up", "down")[: rng.randint(1, 4)]:
            rows, columns = rng.choice([16, 40, 64, 130]), rng.choice([8, 32, 96])
            linears.append(Linear(f"{layer}.{name}", rows, columns, itemsize=4))
        for index in range(rng.choice([0, 0, 4])):
            expert = f"{layer}.{index}"
            for name in ("w1", "w2"):
                linears.append(Linear(f"{expert}.{name}", 64, 32, 4, expert=expert, routed=0.5))
    return tuple(linears)


def draw_request(rng: random.Random) -> Request:
    linears = draw_linears(rng)
    slabs = rng.randint(0, 3) + 2
    link, host, accelerator = (10 ** rng.uniform(3, 6) for _ in range(3))
    rates = Rates(link, host, accelerator, accelerator_flops=10 ** rng.uniform(6, 8))
    min_bytes = slabs * max(linear.row_bytes for linear in linears)
    total_bytes = sum(linear.nbytes for linear in linears)
    accelerator_bytes = min_bytes + int(rng.random() * 0.8 * total_bytes)
    alpha = rng.choice([None, None, 0.0, 0.4, 1.0])
    return Request(linears, rates, accelerator_bytes, slabs=slabs, alpha=alpha)


@dataclass
class Call:
    """A call of a linear in virtual time, and the jobs that it made."""

    linear: int
    start: float
    end: float
    timed_jobs: list[TimedJob]


def run_pass(device: SimulatedDevice, order: Sequence[int], phase: Phase) -> list[Call]:
    """One pass of the linears in `order`; its calls."""
    calls = []
    for linear in order:
        start, num_jobs = device.now, len(device.timed_jobs)
        device.run_pass([linear], phase)
        calls.append(Call(linear, start, device.now, device.timed_jobs[num_jobs:]))
    return calls


def run_passes(
    rng: random.Random, plan: Plan, passes: int = 4
) -> tuple[SimulatedDevice, list[Call]]:
    """Passes of which the third is a prefill, with experts drawn at random."""
    device, calls = SimulatedDevice(plan), list[Call]()
    linears = [split.linear for split in plan.splits]
    for number in range(passes):
        is_used = {linear.expert: rng.random() < linear.routed for linear in linears}
        order = [
            i for i, linear in enumerate(linears) if not linear.expert or is_used[linear.expert]
        ]
        calls += run_pass(device, order, "prefill" if number == 2 else "decode")
    return device, calls


@cache
def draw_run(seed: int) -> tuple[Plan, SimulatedDevice, list[Call]]:
    """A drawn plan, and the device and calls of its passes."""
    rng = random.Random(seed)
    plan = make_plan(draw_request(rng))
    return plan, *run_passes(rng, plan)


@pytest.mark.parametrize("seed", range(100))
def test_every_row_is_computed_once_in_a_call(seed: int) -> None:
    plan, _, calls = draw_run(seed)
    for call in calls:
        rows: list[int] = []
        for timed in call.timed_jobs:
            if timed.job.lane != "link":
                assert timed.job.linear == call.linear
                assert call.start <= timed.start and timed.end <= call.end
                rows += range(timed.job.start, timed.job.stop)
        assert sorted(rows) == list(range(plan.splits[call.linear].linear.rows))


@pytest.mark.parametrize("seed", range(100))
def test_rows_are_computed_from_the_slab_that_they_were_copied_to_and_no_slab_in_use_is_written(
    seed: int,
) -> None:
    plan, _, calls = draw_run(seed)
    copies: dict[int, TimedJob] = {}  # slab -> the last copy into it
    slab_ends: dict[int, float] = {}  # slab -> the end of the last job with it
    for call in calls:
        for timed in call.timed_jobs:
            job = timed.job
            if job.slab is None:
                assert job.lane != "link"
                continue
            assert timed.start >= max(call.start, slab_ends.get(job.slab, 0.0))
            slab_ends[job.slab] = timed.end
            if job.lane == "link":
                assert plan.bytes_of(job) <= plan.slab_bytes
                copies[job.slab] = timed
            else:
                copy = copies[job.slab]
                assert replace(copy.job, lane="accelerator") == job and copy.end <= timed.start


@pytest.mark.parametrize("seed", range(100))
def test_a_lane_does_one_job_at_a_time(seed: int) -> None:
    plan, device, _ = draw_run(seed)
    for lane in LANE_NAMES:
        jobs = [timed for timed in device.timed_jobs if timed.job.lane == lane]
        assert all(job.end <= next_job.start for job, next_job in pairwise(jobs))
        # Copies may end after the last call, which does not wait for them.
        busy_seconds = sum(timed.end - timed.start for timed in jobs if timed.end <= device.now)
        assert busy_seconds <= device.now * ROUNDING
    assert plan.decode_seconds > 0


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_keeps_within_the_accelerators_memory(seed: int) -> None:
    plan, _, _ = draw_run(seed)
    assert plan.accelerator_bytes <= plan.request.accelerator_bytes


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_with_the_best_alpha_is_as_fast_as_streaming_alone_and_as_the_host_alone(
    seed: int,
) -> None:
    plan, _, _ = draw_run(seed)
    if plan.request.alpha is None and plan.slabs:
        assert plan.decode_seconds <= plan.streaming_seconds * ROUNDING
        assert plan.decode_seconds <= plan.host_seconds * ROUNDING


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_plain_data(seed: int) -> None:
    plan, _, _ = draw_run(seed)
    assert json.loads(json.dumps(asdict(plan)))["slabs"] == plan.slabs


@pytest.mark.parametrize("seed", range(12))
def test_no_alpha_of_a_grid_simulates_more_than_5_percent_faster(seed: int) -> None:
    """The law leaves out the start of copies, and shares that are no whole rows."""
    rng = random.Random(seed)
    linears = tuple(Linear(f"{i}", 256, 64, 4) for i in range(12))
    link, host = (10 ** rng.uniform(5, 6.5) for _ in range(2))
    total_bytes = sum(linear.nbytes for linear in linears)
    accelerator_bytes = int(rng.uniform(0.1, 0.7) * total_bytes)
    request = Request(linears, Rates(link, host, accelerator=1e8), accelerator_bytes)
    alphas = [i / 40 for i in range(41)]
    fastest = min(decode_seconds(split_plan(request, alpha)) for alpha in alphas)
    assert make_plan(request).decode_seconds <= 1.05 * fastest


@pytest.mark.parametrize("seed", range(20))
def test_a_calls_own_jobs_come_before_copies_for_other_calls(seed: int) -> None:
    plan, _, _ = draw_run(seed)
    maker = JobMaker(plan)
    for linear in 2 * used_linears(plan.request.linears, 1):
        jobs = maker.make_jobs(linear, "decode")
        is_prefetch = [job.lane == "link" and job.linear != linear for job in jobs]
        assert is_prefetch == sorted(is_prefetch)


def test_the_link_is_never_idle_where_it_is_the_bottleneck() -> None:
    """A slab is refilled as soon as it was read, also with rows of the next linear or token."""
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(4))
    rates = Rates(link=1e5, host=3e5, accelerator=1e6, call_seconds=1e-3)
    plan = make_plan(Request(linears, rates, accelerator_bytes=4096, alpha=0.0))
    device, _ = run_passes(random.Random(0), plan, passes=2)
    copies = [timed for timed in device.timed_jobs if timed.job.lane == "link"]
    assert len(copies) > len(linears)
    for copy, next_copy in pairwise(copies):
        assert next_copy.start == pytest.approx(copy.end, abs=1e-12)


def test_a_pass_in_which_the_host_computes_all_takes_the_fixed_time_of_each_call() -> None:
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(4))
    rates = Rates(1e5, 3e5, 1e6, call_seconds=1e-3, host_call_seconds=2e-3)
    plan = make_plan(Request(linears, rates, accelerator_bytes=4096, alpha=1.0))
    computing = sum(linear.nbytes for linear in linears) / rates.host
    assert plan.decode_seconds == pytest.approx(computing + 4 * (1e-3 + 2e-3))


def test_copies_for_the_next_token_start_before_the_pass_ends() -> None:
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(4))
    plan = make_plan(Request(linears, Rates(1e5, 3e5, 1e8), accelerator_bytes=4096))
    device, calls = run_passes(random.Random(0), plan, passes=2)
    later_calls = calls[-len(linears) + 1 :]  # those of the last pass but its first
    copies = [t for call in later_calls for t in call.timed_jobs if t.job.lane == "link"]
    copy_for_next_token = next(timed for timed in copies if timed.job.linear == 0)
    assert copy_for_next_token.start < device.now


def test_calls_in_another_order_than_the_plans_are_slow_in_the_first_pass_only() -> None:
    """Prefetching learns the order from the calls."""
    linears = tuple(Linear(f"{i}", 64, 16, 4) for i in range(5))
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), accelerator_bytes=4096))
    device = SimulatedDevice(plan)
    in_order, _ = simulate(plan, ["decode"] * 3)
    reordered = [device.run_pass([0, 3, 1, 2, 4], "decode") for _ in range(3)]
    assert reordered[0] > in_order[0]
    assert reordered[2] == pytest.approx(in_order[2], rel=1e-3)


def four_experts_between_two_linears() -> tuple[Linear, ...]:
    experts = [
        Linear(f"{expert}.{name}", 64, 16, 4, expert=expert, routed=0.25)
        for expert in "abcd"
        for name in "12"
    ]
    return Linear("o", 64, 16, 4), *experts, Linear("head", 64, 16, 4)


def test_experts_without_tokens_are_not_copied() -> None:
    linears = four_experts_between_two_linears()
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), accelerator_bytes=6000, alpha=0.0))
    device, order = SimulatedDevice(plan), [0, 5, 6, 9]  # 5 and 6: the third expert
    for _ in range(5):
        device.run_pass(order, "decode")
    copied = {timed.job.linear for timed in device.timed_jobs if timed.job.lane == "link"}
    assert copied == set(order)


def test_of_four_experts_a_token_is_expected_to_use_one() -> None:
    assert len(used_linears(four_experts_between_two_linears(), tokens=1)) == 1 + 2 + 1


def test_a_weight_that_fits_is_resident() -> None:
    linears = (Linear("a", 64, 16, 4),)
    plan = make_plan(Request(linears, Rates(1e5, 1e5, 1e8), accelerator_bytes=5000))
    assert (plan.splits[0].resident, plan.slabs, plan.slab_bytes) == (64, 0, 0)


def test_too_little_memory_is_refused() -> None:
    linears = (Linear("a", 64, 16, 4),)
    request = Request(linears, Rates(1e5, 1e5, 1e8), accelerator_bytes=1000, other_bytes=1000)
    with pytest.raises(ValueError, match=r"max_memory\[0\] must be at least 1192 bytes.*got 1000"):
        make_plan(request)
