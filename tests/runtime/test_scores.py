"""Options of attention on every schedule and in drawn cases: exact, and bytes as derived."""

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
EVERY_SCHEDULE = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 6, 8)
    for name, schedule in schedules(n).items()
]
# All options together on every schedule, each of them alone on every second one.
SCHEDULES_AND_OPTIONS = [
    pytest.param(*schedule.values, options, id=f"{options}-{schedule.id}")
    for i, options in enumerate(OPTIONS)
    for j, schedule in enumerate(EVERY_SCHEDULE)
    if options == "all" or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("schedule", "options"), SCHEDULES_AND_OPTIONS)
def test_options_are_exact(schedule, options):
    """Under one of three masks in turn; all options together on 3 and 4 ranks under each."""
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), **OPTIONS[options])
    masks = ["causal", "two_sided", "causal_documents"]
    if options != "all" or schedule.num_ranks not in (3, 4):
        masks = [masks[(list(OPTIONS).index(options) + len(schedule.hops)) % 3]]
    for mask in masks:
        assert_exact(replace(case, mask=MASKS[mask], queries_walk=mask == "two_sided"))
    if any(schedule.gathers()):
        assert_exact(replace(case, mask=MASKS["causal"], keep=True))


@st.composite
def cases_with_options(draw):
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
@given(cases_with_options())
def test_drawn_options_are_exact(case):
    assert_exact(case)


@pytest.mark.parametrize("value_dim", (1, 16, 40))
def test_values_of_another_width_are_exact_on_sdpa(value_dim):
    case = Case(ring(4), ring(4), zigzag(4, 400), MASKS["causal"], head_dim=24, kernel=SdpaKernel())
    case = replace(case, value_dim=value_dim)
    assert_exact(case)
    assert_exact(replace(case, mask=Mask(Band(30, 20)), queries_walk=True))


def test_sinks_are_exact_for_a_row_that_sees_no_key():
    """Queries see only later keys: the last one sees none."""
    assert_exact(Case(ring(4), ring(4), zigzag(4, 16), Mask(Band(left=-1)), sinks=True))


ALIBI_AND_SINKS = Case(ring(4), ring(4), zigzag(4, 32), MASKS["causal"], alibi=True, sinks=True)


def test_alibi_at_positions_of_the_buffer_is_an_error(monkeypatch):
    """In place of positions of the sequence."""
    monkeypatch.setattr(lowering_tiles, "globalize", lambda local, held: local)
    assert run_case(ALIBI_AND_SINKS).errors["out"] > 1e-3


def test_missing_sinks_are_an_error(monkeypatch):
    monkeypatch.setattr(executor, "with_sinks", lambda out, lse, sinks: (out, lse))
    assert run_case(ALIBI_AND_SINKS).errors["out"] > 1e-3


CAUSAL_8 = Case(ring(8), ring(8), zigzag(8, 256), MASKS["causal"], heads=2, kv_heads=1, head_dim=32)


@pytest.mark.parametrize("name", ("ring", "concentric/2", "mesh/2x4", "all_gather"))
@pytest.mark.parametrize("queries_walk", (False, True))
def test_partial_results_in_bfloat16_are_fewer_bytes_and_a_few_roundings_worse(name, queries_walk):
    """The rms error is at most 2.5 times that of partial results in float32."""
    schedule = schedules(8)[name]
    case = replace(
        CAUSAL_8,
        forward=schedule,
        backward=schedule,
        queries_walk=queries_walk,
        queries_walk_in_forward=queries_walk,
        dtype=torch.bfloat16,
        scale=32**-0.5,
    )
    narrow_case = replace(case, narrow=True)
    wide, narrow = run_case(case), run_case(narrow_case)
    for rank in range(8):
        assert narrow.sent[rank] == narrow_case.derived_bytes(rank)
        assert sum(narrow.sent[rank].values()) < sum(wide.sent[rank].values())
    assert all(narrow.rms[key] <= 2.5 * wide.rms[key] for key in wide.rms), (narrow.rms, wide.rms)
    assert narrow.rms != wide.rms  # or nothing was rounded


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_narrow_partial_results_of_float64_are_exact(schedule):
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), MASKS["causal"])
    assert_exact(replace(case, narrow=True, value_dim=6))
