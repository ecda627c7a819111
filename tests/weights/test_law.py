"""The law against brute force over alpha and residency."""

from __future__ import annotations

import random
from itertools import product

import pytest

from wf_backends.weights.law import (
    Rates,
    WeightUse,
    best_alpha,
    residency,
    resident_limits,
    seconds_per_byte,
)
from wf_backends.weights.plan import Linear, Request
from wf_backends.weights.planning import host_rows, make_plan

SETTINGS = 500
GRID = 200
LEVELS = 12


def draw_rates(draw: random.Random) -> Rates:
    link, host, accelerator = (10 ** draw.uniform(8, 11) for _ in range(3))
    memory = draw.choice([float("inf"), (link + host) * draw.uniform(0.5, 1.5)])
    return Rates(link, host, accelerator, memory=max(memory, link))


def test_no_alpha_of_a_grid_is_better() -> None:
    for seed in range(SETTINGS):
        draw = random.Random(seed)
        rates, resident = draw_rates(draw), draw.choice([0.0, draw.random()])
        alpha = best_alpha(resident, rates)
        least = min(
            seconds_per_byte((1 - resident) * i / GRID, resident, rates) for i in range(GRID + 1)
        )
        assert 0 <= alpha <= 1 - resident
        assert seconds_per_byte(alpha, resident, rates) <= least * (1 + 1e-12)


def test_of_whole_rows_the_best_are_taken() -> None:
    for seed in range(SETTINGS):
        draw = random.Random(seed)
        rates, rows = draw_rates(draw), draw.randint(1, 60)
        resident = draw.randint(0, rows)
        seconds = [
            seconds_per_byte(host / rows, resident / rows, rates)
            for host in range(rows - resident + 1)
        ]
        assert seconds[host_rows(rows, resident, rates, None)] == min(seconds)


def total(weights: list[WeightUse], shares: tuple[float, ...] | list[float]) -> float:
    return sum(
        w.nbytes * w.uses * seconds_per_byte(best_alpha(rho, w.rates), rho, w.rates)
        for w, rho in zip(weights, shares, strict=True)
    )


def test_no_residency_of_a_grid_is_better() -> None:
    for seed in range(SETTINGS):
        draw = random.Random(seed)
        rates, shared = draw_rates(draw), draw.random() < 0.7
        weights = [
            WeightUse(
                draw.randint(1, 50), draw.choice([1.0, 0.25]), rates if shared else draw_rates(draw)
            )
            for _ in range(3)
        ]
        budget = draw.random() * 1.1 * sum(w.nbytes for w in weights)
        shares = residency(weights, budget)
        used = sum(w.nbytes * rho for w, rho in zip(weights, shares, strict=True))
        assert used <= budget * (1 + 1e-9)
        levels = [i / LEVELS for i in range(LEVELS + 1)]
        least = min(
            total(weights, rho)
            for rho in product(levels, repeat=3)
            if sum(w.nbytes * r for w, r in zip(weights, rho, strict=True)) <= budget
        )
        assert total(weights, shares) <= least * (1 + 1e-9)


def test_the_headline_of_the_paper() -> None:
    """Where the host computes 3.17 times as fast as the link copies, it is +317 %."""
    rates = Rates(link=1e9, host=3.17e9, accelerator=1e12)
    alone = seconds_per_byte(0, 0, rates)
    assert alone / seconds_per_byte(best_alpha(0, rates), 0, rates) == pytest.approx(4.17, rel=1e-3)


def test_where_both_together_serve_less_than_the_host_it_computes_alone() -> None:
    """As on the host of an H100: its memory is read, written and read again for what is staged."""
    rates = Rates(link=40e9, host=100e9, accelerator=1e12, memory=50e9, host_beside_link=26e9)
    assert best_alpha(0, rates) == 1 and best_alpha(0.5, rates) == 0.5
    assert rates.contended(False, True).host == 100e9 and rates.contended(True, False).link == 40e9
    assert rates.contended(True, True).link == pytest.approx(24e9)
    linears = tuple(Linear(str(i), 1024, 1024, 2) for i in range(16))
    plan = make_plan(Request(linears, rates, accelerator_bytes=16 * 2**20))
    assert all(split.streamed_decode == 0 for split in plan.splits)
    assert plan.decode_seconds == pytest.approx(16 * 2**20 / 100e9, rel=0.05)


def test_many_tokens_leave_the_host_little() -> None:
    rates = Rates(2e10, 5e10, 5e11, host_flops=1e12, accelerator_flops=1e14)
    few, many = (best_alpha(0, rates.at(tokens, 2)) for tokens in (1, 2048))
    assert few == pytest.approx(5 / 7) and many < 0.03


def test_a_staged_copy_is_as_slow_as_its_slower_part() -> None:
    assert Rates(2e10, 1e10, 1e12, staging=5e9).at(1, 2).link == 5e9


def test_beyond_the_harmless_share_time_grows() -> None:
    rates = Rates(link=1.0, host=2.0, accelerator=8.0)
    useful, harmless = resident_limits(rates)
    at = [
        seconds_per_byte(best_alpha(rho, rates), rho, rates)
        for rho in (0, useful, harmless, harmless + 0.1)
    ]
    assert at[0] > at[1] and at[1] == pytest.approx(at[2]) and at[3] > at[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"link": 0}, "link must be a positive rate, got 0"),
        ({"host": float("inf")}, "host must be a finite rate, got inf"),
        ({"accelerator": float("nan")}, "accelerator must be a positive rate, got nan"),
        ({"call_seconds": -1}, "call_seconds must be at least 0 seconds, got -1"),
        ({"call_seconds": float("nan")}, "call_seconds must be at least 0 seconds, got nan"),
    ],
)
def test_bad_rates_are_refused(words: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rates(**{"link": 1, "host": 1, "accelerator": 1, **words})
