"""The law's best alpha and residency, against brute force and against formulas by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from wf_backends.hetegen.weights.law import (
    Rates,
    WeightUse,
    best_alpha,
    residency,
    resident_limits,
    seconds_per_byte,
)
from wf_backends.hetegen.weights.plan import Linear, Request
from wf_backends.hetegen.weights.planning import host_rows, make_plan

NUM_SEEDS = 500
ALPHA_STEPS = 200
RESIDENT_STEPS = 12


def draw_rates(rng: random.Random) -> Rates:
    link, host, accelerator = (10 ** rng.uniform(8, 11) for _ in range(3))
    memory = rng.choice([float("inf"), (link + host) * rng.uniform(0.5, 1.5)])
    return Rates(link, host, accelerator, memory=max(memory, link))


def draw_call(rng: random.Random, rates: Rates, nbytes: float) -> Rates:
    """The rates with a fixed time of the host's calls, in 7 of 10 cases: up to 2 times W / link."""
    share = rng.choice([0.0] * 3 + [10 ** rng.uniform(-3, 0.3) for _ in range(7)])
    return replace(rates, host_call_seconds=share * nbytes / rates.link)


def test_no_alpha_of_a_grid_is_faster_than_the_best_alpha() -> None:
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        nbytes, resident = rng.uniform(1, 1e9), rng.choice([0.0, rng.random()])
        rates = draw_call(rng, draw_rates(rng), nbytes)
        alphas = [(1 - resident) * i / ALPHA_STEPS for i in range(ALPHA_STEPS + 1)]
        fastest = min(seconds_per_byte(alpha, resident, rates, nbytes) for alpha in alphas)
        alpha = best_alpha(resident, rates, nbytes)
        assert 0 <= alpha <= 1 - resident, seed
        assert seconds_per_byte(alpha, resident, rates, nbytes) <= fastest * (1 + 1e-12), seed


def test_no_whole_number_of_host_rows_is_faster_than_the_plans() -> None:
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        linear = Linear("drawn", rows := rng.randint(1, 60), 1024, 2)
        rates = draw_call(rng, draw_rates(rng), linear.nbytes)
        resident = rng.randint(0, rows)
        seconds = [
            seconds_per_byte(host / rows, resident / rows, rates, linear.nbytes)
            for host in range(rows - resident + 1)
        ]
        assert seconds[host_rows(linear, resident, rates, None)] == min(seconds), seed


def draw_weights(rng: random.Random) -> list[WeightUse]:
    """Three weights, in 7 of 10 cases with the same rates."""
    rates, have_same_rates = draw_rates(rng), rng.random() < 0.7
    return [
        WeightUse(
            nbytes=rng.randint(1, 50),
            uses=rng.choice([1.0, 0.25]),
            rates=rates if have_same_rates else draw_rates(rng),
        )
        for _ in range(3)
    ]


def seconds_of(weight: WeightUse, share: float) -> float:
    alpha = best_alpha(share, weight.rates)
    return weight.nbytes * weight.uses * seconds_per_byte(alpha, share, weight.rates)


def total_seconds(weights: list[WeightUse], shares: Sequence[float]) -> float:
    return sum(map(seconds_of, weights, shares))


def resident_bytes(weights: list[WeightUse], shares: Sequence[float]) -> float:
    return sum(w.nbytes * share for w, share in zip(weights, shares, strict=True))


def test_no_resident_shares_of_a_grid_are_faster_than_residency() -> None:
    levels = [i / RESIDENT_STEPS for i in range(RESIDENT_STEPS + 1)]
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        weights = draw_weights(rng)
        budget = rng.random() * 1.1 * sum(w.nbytes for w in weights)
        shares = residency(weights, budget)
        choices = [[(w.nbytes * x, seconds_of(w, x)) for x in levels] for w in weights]
        totals = (map(sum, zip(*chosen, strict=True)) for chosen in product(*choices))
        fastest = min(seconds for nbytes, seconds in totals if nbytes <= budget)
        assert resident_bytes(weights, shares) <= budget * (1 + 1e-9), seed
        assert total_seconds(weights, shares) <= fastest * (1 + 1e-9), seed


def test_a_host_3_17_times_as_fast_as_the_link_gains_317_percent_as_in_the_paper() -> None:
    """HeteGen (arXiv 2403.01164) reports up to 317 % over streaming alone: 1 + host / link."""
    rates = Rates(link=1e9, host=3.17e9, accelerator=1e12)
    streaming = seconds_per_byte(0, 0, rates)
    with_host = seconds_per_byte(best_alpha(0, rates), 0, rates)
    assert streaming / with_host == pytest.approx(4.17, rel=1e-3)


def test_a_host_whose_call_takes_as_long_as_streaming_computes_nothing_of_a_small_weight() -> None:
    rates = Rates(link=1e9, host=2e9, accelerator=1e12, host_call_seconds=1e-3)
    assert best_alpha(0, rates, nbytes=1e6) == 0
    assert best_alpha(0, rates, nbytes=2e6) == pytest.approx(1 / 3)  # 2/3 of the time is left
    assert best_alpha(0, rates) == pytest.approx(2 / 3)


class TestContendedMemory:
    """The host of an H100: together with the link it is served 50 GB/s, alone 100 GB/s.

    What is staged for the link is read, written and read again in the host's memory.
    """

    rates = Rates(link=40e9, host=100e9, accelerator=1e12, memory=50e9, host_beside_link=26e9)

    def test_rates_are_reduced_only_while_host_and_link_both_work(self) -> None:
        assert self.rates.contended(streams=False, host_works=True).host == 100e9
        assert self.rates.contended(streams=True, host_works=False).link == 40e9
        both = self.rates.contended(streams=True, host_works=True)
        assert both.link == pytest.approx(24e9)  # 50 - 26

    def test_the_host_computes_all_that_is_not_resident(self) -> None:
        assert best_alpha(0, self.rates) == 1
        assert best_alpha(0.5, self.rates) == 0.5

    def test_a_plan_streams_nothing(self) -> None:
        linears = tuple(Linear(str(i), 1024, 1024, 2) for i in range(16))
        half = 16 * 2**20
        plan = make_plan(Request(linears, self.rates, accelerator_bytes=half))
        assert all(split.streamed_decode == 0 for split in plan.splits)
        assert plan.decode_seconds == pytest.approx(half / 100e9, rel=0.05)


def test_the_hosts_share_falls_from_5_sevenths_for_one_token_to_below_3_percent_for_2048() -> None:
    rates = Rates(2e10, 5e10, 5e11, host_flops=1e12, accelerator_flops=1e14)
    assert best_alpha(0, rates.at(tokens=1, itemsize=2)) == pytest.approx(5 / 7)
    assert best_alpha(0, rates.at(tokens=2048, itemsize=2)) < 0.03


def test_the_link_is_no_faster_than_staging() -> None:
    assert Rates(2e10, 1e10, 1e12, staging=5e9).at(tokens=1, itemsize=2).link == 5e9


def test_resident_bytes_save_time_up_to_the_first_limit_and_cost_time_above_the_second() -> None:
    rates = Rates(link=1.0, host=2.0, accelerator=8.0)
    useful, harmless = resident_limits(rates)

    def seconds(resident: float) -> float:
        return seconds_per_byte(best_alpha(resident, rates), resident, rates)

    assert seconds(0) > seconds(useful)
    assert seconds(useful) == pytest.approx(seconds(harmless))
    assert seconds(harmless) < seconds(harmless + 0.1)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"link": 0}, "link must be a positive rate, got 0"),
        ({"host": float("inf")}, "host must be a finite rate, got inf"),
        ({"accelerator": float("nan")}, "accelerator must be a positive rate, got nan"),
        ({"call_seconds": -1}, "call_seconds must be at least 0 seconds, got -1"),
        ({"call_seconds": float("nan")}, "call_seconds must be at least 0 seconds, got nan"),
    ],
)
def test_wrong_rates_are_refused(rates: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rates(**{"link": 1, "host": 1, "accelerator": 1, **rates})
