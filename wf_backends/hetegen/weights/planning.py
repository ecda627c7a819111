"""Makes the plan for a model: the fastest by simulation of three shares of the host.

The shares are the law's best alpha, 0 (all weights are streamed) and 1 (the host computes all).
"""

from __future__ import annotations

from dataclasses import replace
from math import floor, inf

from wf_backends.hetegen.weights.jobs import simulate
from wf_backends.hetegen.weights.law import (
    Rates,
    WeightUse,
    best_alpha,
    residency,
    seconds_per_byte,
)
from wf_backends.hetegen.weights.plan import PHASES, Linear, Plan, Request, Split

MIN_COPY_CALLS = 5  # a copy takes at least this many times call_seconds
SLABS_PER_LINEAR = 4  # slabs that the streamed rows of the largest linear fill


def make_plan(request: Request) -> Plan:
    """The plan with the fastest decoding pass; everything is resident if it fits.

    Raises:
        ValueError: if slabs of one row and the tensors that are not split exceed the accelerator's
            memory, or split weights and pinned memory exceed the host's.
    """
    if sum(linear.nbytes for linear in request.linears) <= request.linear_bytes:
        splits = tuple(Split(linear, linear.rows, 0, 0) for linear in request.linears)
        plan = Plan(request, splits, slab_bytes=0, slabs=0)
        streaming = plan
    else:
        _check_accelerator_bytes(request)
        streaming = split_plan(request, 0.0)
        alphas = (None, 0.0, 1.0) if request.alpha is None else (request.alpha,)
        plan = min((split_plan(request, alpha) for alpha in alphas), key=decode_seconds)
    if plan.host_bytes > request.host_bytes:
        raise ValueError(
            f'max_memory["cpu"] must be at least {plan.host_bytes} bytes, for the split weights '
            f"and pinned memory; got {request.host_bytes}"
        )
    return replace(
        plan,
        decode_seconds=decode_seconds(plan),
        prefill_seconds=simulate(plan, ["prefill"])[0][0],
        streaming_seconds=decode_seconds(streaming),
        host_seconds=decode_seconds(split_plan(request, 1.0)),
    )


def _check_accelerator_bytes(request: Request) -> None:
    need = request.other_bytes + request.slabs * _largest_row_bytes(request)
    if need > request.accelerator_bytes:
        raise ValueError(
            f"max_memory[0] must be at least {need} bytes, for tensors that are not split "
            f"({request.other_bytes} bytes) and {request.slabs} slabs of one row; "
            f"got {request.accelerator_bytes}"
        )


def decode_seconds(plan: Plan) -> float:
    """Predicted seconds of a decoding pass, with slabs filled by the passes before it."""
    return simulate(plan, ["decode", "decode", "decode"])[0][-1]


def _largest_row_bytes(request: Request) -> int:
    return max(linear.row_bytes for linear in request.linears)


def _slab_bytes(request: Request, alpha: float | None) -> int:
    """Bytes of a slab: whole rows of the widest linear, at least one; all slabs fit the memory."""
    rates = request.rates_at(request.linears[0], "decode")
    sizes = [linear.nbytes for linear in request.linears]
    resident = request.linear_bytes / sum(sizes)
    best = best_alpha(resident, rates, max(sizes))
    streamed = 1 - resident - (best if alpha is None else alpha)
    target = int(streamed * max(sizes) / SLABS_PER_LINEAR)
    min_bytes = int(MIN_COPY_CALLS * rates.call_seconds * rates.link)
    max_bytes = request.linear_bytes // request.slabs
    row_bytes = _largest_row_bytes(request)
    rows = max(row_bytes, min(max(target, min_bytes), max_bytes)) // row_bytes
    return rows * row_bytes


def split_plan(request: Request, alpha: float | None) -> Plan:
    """The plan in which the host computes the share `alpha` of every linear; None: the best."""
    slab_bytes = _slab_bytes(request, alpha)
    tokens = request.decode_tokens
    weights = [
        WeightUse(linear.nbytes, linear.use_probability(tokens), request.rates_at(linear, "decode"))
        for linear in request.linears
    ]
    resident_bytes = max(request.linear_bytes - request.slabs * slab_bytes, 0)
    shares = residency(weights, resident_bytes, alpha)
    splits: list[Split] = []
    for linear, share in zip(request.linears, shares, strict=True):
        resident = floor(share * linear.rows + 1e-9)
        host = (
            host_rows(linear, resident, request.rates_at(linear, phase), alpha) for phase in PHASES
        )
        splits.append(Split(linear, resident, *(linear.rows - resident - rows for rows in host)))
    if any(split.streamed_decode or split.streamed_prefill for split in splits):
        return Plan(request, tuple(splits), slab_bytes, request.slabs)
    return Plan(request, tuple(splits), slab_bytes=0, slabs=0)


def host_rows(linear: Linear, resident: int, rates: Rates, alpha: float | None) -> int:
    """How many of a linear's rows the host computes: nearest to `alpha`, or the best by the law."""
    rows, nbytes = linear.rows, linear.nbytes
    max_rows = rows - resident
    if alpha is not None:
        return min(round(alpha * rows), max_rows)
    shared = rates  # while the host and the link both work
    if rates.host_beside_link < inf:  # measured, and more exact than the law's third term
        shared = rates.contended(streams=True, host_works=True)

    def seconds(host: int) -> float:
        both_work = 0 < host < max_rows
        best_rates = shared if both_work else rates
        return seconds_per_byte(host / rows, resident / rows, best_rates, nbytes)

    best = floor(best_alpha(resident / rows, shared, nbytes) * rows)
    return min({best, min(best + 1, max_rows), max_rows, 0}, key=seconds)
