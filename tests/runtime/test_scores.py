"""Options of attention beside the dense one: every schedule, and drawn cases; bytes as derived."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, assert_exact, run_case, schedules
from tests.runtime.test_exact import MASKS, SEQLEN, cases
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.lowering import tiles as lowering_tiles
from wf_backends.runtime import attention as executor
from wf_backends.schedule.layout import zigzag
from wf_backends.schedule.mask import Band, Mask
from wf_backends.schedule.routes import ring

OPTIONS = {
    "softcap": {"softcap": 0.7, "q_scale": 3.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "learned bias": {"bias_reach": 7},
    "narrow values": {"value_dim": 5},
    "wide values": {"value_dim": 11},
    "dropout": {"dropout_p": 0.3, "batch": 2},
    "all": {
        "dropout_p": 0.2,
        "value_dim": 6,
        "softcap": 1.5,
        "q_scale": 3.0,
        "alibi": True,
        "sinks": True,
        "bias_reach": 100,
    },
}
EVERY = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 6, 8)
    for name, schedule in schedules(n).items()
]
# All options together on every schedule; one alone on every second.
ALONE_OR_TOGETHER = [
    pytest.param(*schedule.values, options, id=f"{options}-{schedule.id}")
    for i, options in enumerate(OPTIONS)
    for j, schedule in enumerate(EVERY)
    if options == "all" or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("schedule", "options"), ALONE_OR_TOGETHER)
def test_on_every_schedule(schedule, options):
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), **OPTIONS[options])
    masks = ("causal", "two_sided", "causal_documents")
    at = list(OPTIONS).index(options) + len(schedule.hops)
    every = options == "all" and schedule.num_ranks in (3, 4)  # together under every mask
    for mask in masks if every else masks[at % 3 : at % 3 + 1]:
        assert_exact(replace(case, mask=MASKS[mask], queries_walk=mask == "two_sided"))
    if any(schedule.gathers()):
        assert_exact(replace(case, mask=MASKS["causal"], keep=True))


@st.composite
def with_options(draw):
    case = draw(cases())
    caps = st.sampled_from((0.0, 0.5, 5.0))
    return replace(
        case,
        softcap=draw(caps),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        bias_reach=draw(st.sampled_from((0, 1, 5, 60))),
        value_dim=draw(st.sampled_from((None, 1, 3, 8, 12))),
        dropout_p=draw(st.sampled_from((0.0, 0.4))),
        q_scale=2.0,
    )


@settings(max_examples=60)
@given(with_options())
def test_drawn_cases(case):
    assert_exact(case)


@pytest.mark.parametrize("value_dim", (1, 16, 40))
def test_values_of_another_width_on_the_kernel_of_cpus(value_dim):
    case = Case(ring(4), ring(4), zigzag(4, 400), MASKS["causal"], head_dim=24, kernel=SdpaKernel())
    case = replace(case, value_dim=value_dim)
    assert_exact(case)
    assert_exact(replace(case, mask=Mask(Band(30, 20)), queries_walk=True))


def test_a_row_that_sees_nothing_has_its_sink_alone():
    mask = Mask(Band(left=-1))  # only later keys: the last row sees none
    assert_exact(Case(ring(4), ring(4), zigzag(4, 16), mask, sinks=True))


@pytest.mark.parametrize("broken", ("positions", "sinks"))
def test_faults_are_noticed(monkeypatch, broken):
    case = Case(ring(4), ring(4), zigzag(4, 32), MASKS["causal"], alibi=True, sinks=True)
    if broken == "positions":  # of the buffer, not of the sequence
        monkeypatch.setattr(lowering_tiles, "_globalize", lambda local, held: local)
        assert run_case(case).errors["out"] > 1e-3
    else:
        monkeypatch.setattr(executor, "with_sinks", lambda out, lse, sinks: (out, lse))
        assert run_case(case).errors["out"] > 1e-3


NARROW = Case(ring(8), ring(8), zigzag(8, 256), MASKS["causal"], heads=2, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("name", ("ring", "concentric/2", "mesh/2x4", "all_gather"))
@pytest.mark.parametrize("queries_walk", (False, True))
def test_partial_results_in_16_bits_are_half_the_bytes_and_sums_of_float32(name, queries_walk):
    """Worse than partial results in float32, by no more than a few roundings."""
    route = schedules(8)[name]
    case = replace(NARROW, forward=route, backward=route, queries_walk=queries_walk)
    case = replace(case, dtype=torch.bfloat16, scale=32**-0.5, queries_walk_in_forward=queries_walk)
    wide, narrow = run_case(case), run_case(replace(case, narrow=True))
    for rank in range(8):
        assert narrow.sent[rank] == replace(case, narrow=True).derived_bytes(rank)
        assert sum(narrow.sent[rank].values()) < sum(wide.sent[rank].values())
    assert all(narrow.rms[key] <= 2.5 * wide.rms[key] for key in wide.rms), (narrow.rms, wide.rms)
    assert narrow.rms != wide.rms  # what travels is rounded


@pytest.mark.parametrize("schedule", EVERY)
def test_narrow_partial_results_of_float64_are_float64(schedule):
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), MASKS["causal"])
    assert_exact(replace(case, narrow=True, value_dim=6))
