"""Attention on ranks as threads, in float64: equal to dense attention, forward and backward.

Every schedule, layout, mask, number of heads; each rank sends the bytes that lowering derives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, assert_exact, run_case, schedules
from tests.dense import dense_attention
from tests.slices import SEQLEN, SLICES, drawn_slices, sliced
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.lowering.program import OWN_MESSAGE_ROWS
from wf_backends.schedule.layout import contiguous, make_layout, zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask, make_mask
from wf_backends.schedule.ranges import join
from wf_backends.schedule.routes import concentric, mesh, ring

KERNELS = (ReferenceKernel(), SdpaKernel())
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(7, 0)),
    "two_sided": Mask(Band(3, 5)),
    "documents": Mask(FULL, (0, 11, 12, SEQLEN)),
    "causal_documents": Mask(CAUSAL, (0, 3, 4, 20, SEQLEN)),
}
IN_SLICES = {name: make_mask(**slices) for name, slices in SLICES.items()}
SMALL = [
    pytest.param(schedule, mask, id=f"{name}({n})-{mask_name}")
    for n in (1, 2, 3, 4, 6, 8)
    for name, schedule in schedules(n).items()
    for mask_name, mask in MASKS.items()
]
LARGE = [
    pytest.param(schedule, MASKS["causal"], id=f"{name}({n})")
    for n in (9, 12, 16)
    for name, schedule in schedules(n).items()
]


@pytest.mark.parametrize(("schedule", "mask"), SMALL)
def test_every_schedule_is_exact_under_every_mask(schedule, mask):
    """Keys walk in the forward and queries in the backward, then the other way around."""
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), mask)
    assert_exact(replace(case, queries_walk=True))
    assert_exact(replace(case, queries_walk_in_forward=True))


@pytest.mark.parametrize("name", ("all_gather", "concentric/2", "mesh/2x2", "ring"))
@pytest.mark.parametrize("queries_walk", (False, True))
def test_long_ranges_sent_as_messages_of_their_own_are_exact(name, queries_walk):
    """Such a range is neither packed nor unpacked."""
    layout = zigzag(4, 8 * OWN_MESSAGE_ROWS)
    route = schedules(4)[name]
    case = Case(route, route, layout, MASKS["causal"], queries_walk, heads=1, kv_heads=1)
    assert_exact(case)
    assert_exact(replace(case, keep=True))


@pytest.mark.parametrize("name", ("all_gather", "concentric/2", "mesh/2x2", "ring"))
def test_long_documents_on_sdpa_are_exact(name):
    """SDPA gets such tiles in parts; ranges that are messages of their own lie between them."""
    tokens, route = 10 * OWN_MESSAGE_ROWS, schedules(4)[name]
    mask = Mask(CAUSAL, (0, 700, 760, tokens))
    case = Case(route, route, zigzag(4, tokens), mask, heads=1, kv_heads=1, kernel=SdpaKernel())
    assert_exact(case)
    assert_exact(replace(case, queries_walk=True, mask=Mask(CAUSAL)))


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("n", (1, 2, 3, 4, 6, 8))
def test_slices_are_exact_on_every_schedule(name, n):
    """On 6 and 8 ranks on every second schedule.

    Layouts alternate, and so does the side that walks, and whether gathered rows are kept.
    """
    mask, mask_index = IN_SLICES[name], list(SLICES).index(name)
    for i, schedule in enumerate(schedules(n).values()):
        if n >= 6 and (i + mask_index) % 2:
            continue
        layout_name = ("zigzag", "contiguous", "balanced")[i % 3]
        layout = make_layout(layout_name, n, SEQLEN, None, mask.slices)
        walk = (i // 2 + n + mask_index) % 2 == 0
        case = Case(schedule, schedule, layout, mask, queries_walk=walk)
        assert_exact(replace(case, keep=any(schedule.gathers()) and (i // 2) % 2 == 0))
    assert_exact(replace(case, queries_walk_in_forward=True))


GATHERING = [
    pytest.param(schedule, mask, id=f"{name}({n})-{mask_name}")
    for n in (2, 4, 6, 8)
    for name, schedule in schedules(n).items()
    for mask_name, mask in MASKS.items()
    if any(schedule.gathers())
]


@pytest.mark.parametrize(("schedule", "mask"), GATHERING)
def test_keeping_gathered_rows_is_exact(schedule, mask):
    """In the backward keys or queries walk, by mask; both under the full mask."""
    layout = zigzag(schedule.num_ranks, SEQLEN)
    walk = list(MASKS.values()).index(mask) % 2 == 1
    case = Case(schedule, schedule, layout, mask, queries_walk=walk, keep=True)
    assert_exact(case)
    if schedule.num_ranks in (4, 6):
        assert_exact(replace(case, queries_walk_in_forward=True))
    if mask == MASKS["full"]:
        assert_exact(replace(case, queries_walk=True))
        assert bytes_gathered(case) < bytes_gathered(replace(case, keep=False))


def bytes_gathered(case):
    """Of all ranks, before the first step of the backward."""
    return sum(case.derived_bytes(r).get("backward gather", 0) for r in range(case.num_ranks))


@pytest.mark.parametrize("n", (2, 4, 8))
@pytest.mark.parametrize("mask", MASKS)
def test_contiguous_layout_is_exact(n, mask):
    for schedule in schedules(n).values():
        assert_exact(Case(schedule, schedule, contiguous(n, SEQLEN), MASKS[mask]))


@pytest.mark.parametrize(("schedule", "mask"), LARGE)
def test_many_ranks_are_exact(schedule, mask):
    assert_exact(Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), mask))


@pytest.mark.parametrize(("heads", "kv_heads"), ((1, 1), (4, 4), (4, 1), (6, 3), (8, 2)))
@pytest.mark.parametrize("batch", (1, 3))
def test_query_heads_that_share_key_heads_are_exact(heads, kv_heads, batch):
    layout = zigzag(4, SEQLEN)
    for queries_walk in (False, True):
        case = Case(concentric(4, 2), mesh(4, 2, 2), layout, MASKS["causal"], queries_walk)
        assert_exact(replace(case, heads=heads, kv_heads=kv_heads, batch=batch))


@pytest.mark.parametrize("head_dim", (16, 40, 64, 96, 128, 192, 256))
def test_head_dims_are_exact(head_dim):
    assert_exact(Case(ring(2), ring(2), zigzag(2, 24), MASKS["causal"], head_dim=head_dim))


@pytest.mark.parametrize("name", schedules(4))
@pytest.mark.parametrize("num_keys", (9, 61))
def test_cross_attention_is_exact(name, num_keys):
    schedule = schedules(4)[name]
    for queries_walk in (False, True):
        case = Case(schedule, schedule, zigzag(4, SEQLEN), queries_walk=queries_walk)
        assert_exact(replace(case, kv_layout=zigzag(4, num_keys)))


def test_forward_on_every_schedule_with_another_backward_is_exact():
    for forward in schedules(8).values():
        assert_exact(Case(forward, concentric(8, 2), zigzag(8, SEQLEN), MASKS["causal"]))


@st.composite
def cases(draw):
    """Drawn schedules, layout, mask, walking sides and heads."""
    n = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    pick = st.sampled_from(sorted(schedules(n)))
    forward, backward = (schedules(n)[draw(pick)] for _ in range(2))
    seqlen = draw(st.integers(2 * n, 50))
    bound = st.sampled_from((float("inf"), 0, 1, 4, 11))
    cuts = draw(st.none() | st.sets(st.integers(1, seqlen - 1), max_size=5))
    borders = None if cuts is None else (0, *sorted(cuts), seqlen)
    mask = Mask(Band(draw(bound), draw(bound)), borders)
    kv_heads = draw(st.integers(1, 3))
    return Case(
        forward,
        backward,
        draw(layouts(n, seqlen, borders or (0, seqlen))),
        mask,
        queries_walk=draw(st.booleans()),
        queries_walk_in_forward=draw(st.booleans()),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        batch=draw(st.integers(1, 2)),
    )


@st.composite
def layouts(draw, n, seqlen, borders):
    """A named layout, or any partition of the tokens in which every rank owns at least one."""
    name = draw(st.sampled_from(("contiguous", "zigzag", "document_zigzag", "partition")))
    if name != "partition":
        return make_layout(name, n, seqlen, borders)
    others = seqlen - n
    owners_of_others = draw(st.lists(st.integers(0, n - 1), min_size=others, max_size=others))
    owners = draw(st.permutations([*range(n), *owners_of_others]))
    return tuple(
        join((token, token + 1) for token, owner in enumerate(owners) if owner == rank)
        for rank in range(n)
    )


@pytest.mark.parametrize("n", (3, 6))
def test_walking_queries_after_a_step_without_any_are_exact(n):
    """Queries 0 and 1 see nothing: between two steps with queries a rank has one without."""
    mask = make_mask(**sliced((2, 12, 0, 12, "full")))
    for schedule in schedules(n).values():
        case = Case(schedule, schedule, contiguous(n, 12), mask, queries_walk=True)
        assert_exact(replace(case, kernel=SdpaKernel()))


@settings(max_examples=20)
@given(cases(), st.data())
def test_drawn_slices_are_exact(case, data):
    seqlen = sum(stop - start for shard in case.layout for start, stop in shard)
    mask = make_mask(**data.draw(drawn_slices(seqlen)))
    if data.draw(st.booleans()):
        balanced = make_layout("balanced", case.num_ranks, seqlen, slices=mask.slices)
        case = replace(case, layout=balanced)
    assert_exact(replace(case, mask=mask, kernel=data.draw(st.sampled_from(KERNELS))))


@settings(max_examples=40)
@given(cases())
def test_drawn_cases_are_exact(case):
    assert_exact(case)


@pytest.mark.parametrize("kernel", KERNELS, ids=("reference", "sdpa"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mask", ("causal", "window"))
def test_errors_in_narrow_dtypes_are_those_of_one_rank(kernel, dtype, mask):
    """The rms error of 8 ranks is at most 1.25 times that of one rank, same kernel and dtype."""
    for schedule in (ring(8), concentric(8, 2), mesh(8, 2, 4)):
        case = Case(
            schedule, schedule, zigzag(8, 256), MASKS[mask], heads=2, kv_heads=1, head_dim=32
        )
        case = replace(case, dtype=dtype, kernel=kernel, scale=32**-0.5)
        on_one_rank = replace(case, forward=ring(1), backward=ring(1), layout=contiguous(1, 256))
        rms, reference = run_case(case).rms, run_case(on_one_rank).rms
        assert all(rms[name] <= 1.25 * reference[name] for name in rms), (rms, reference)


def test_large_logits_stay_finite_and_exact():
    """1e-9: logits are 40 times as large."""
    for schedule in schedules(4).values():
        assert_exact(
            Case(schedule, schedule, zigzag(4, SEQLEN), MASKS["causal"], q_scale=40.0), 1e-9
        )


def test_float32_gradients_are_not_added_into_a_receive_buffer_twice():
    """Where the accumulators have the dtype of what is received, a buffer could serve as both."""
    case = Case(ring(3), ring(3), zigzag(3, SEQLEN), MASKS["causal"], dtype=torch.float32)
    assert run_case(case).worst < 1e-5


def test_a_row_that_sees_no_key_gives_zero():
    """As in the reference. Queries see only later keys: the last one sees none."""
    case = Case(ring(4), ring(4), contiguous(4, 16), Mask(Band(left=-1)))
    q, k, v, _ = case.tensors()
    assert dense_attention(q, k, v, case.mask, case.scale)[:, -1].abs().max() == 0
    assert run_case(case).worst < 1e-10
