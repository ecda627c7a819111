"""Every schedule x layout x mask x heads, ranks as threads, float64: exact, bytes as derived."""

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
from wf_backends.runtime.surrogate_out import stand_in
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
IN_SLICES = {name: make_mask(**told) for name, told in SLICES.items()}
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
def test_keys_or_queries_walk_on_zigzag(schedule, mask):
    walks = hash(mask.band) % 2 == 0
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), mask, queries_walk=walks)
    assert_exact(case)
    if schedule.num_ranks in (4, 8):
        assert_exact(replace(case, queries_walk=not walks, queries_walk_in_forward=True))


@pytest.mark.parametrize("name", ("all_gather", "concentric/2", "mesh/2x2", "ring"))
@pytest.mark.parametrize("queries_walk", (False, True))
def test_long_ranges_are_messages_of_their_own(name, queries_walk):
    """What is sent as it lies and received where it belongs, beside what is packed."""
    long = zigzag(4, 8 * OWN_MESSAGE_ROWS)
    route = schedules(4)[name]
    case = Case(route, route, long, MASKS["causal"], queries_walk, heads=1, kv_heads=1)
    assert_exact(case)
    assert_exact(replace(case, keep=True))


@pytest.mark.parametrize("name", ("all_gather", "concentric/2", "mesh/2x2", "ring"))
def test_long_documents_on_the_kernel_of_cpus(name):
    """Tiles handed to a kernel in pieces, between ranges that are messages of their own."""
    tokens, route = 10 * OWN_MESSAGE_ROWS, schedules(4)[name]
    mask = Mask(CAUSAL, (0, 700, 760, tokens))
    case = Case(route, route, zigzag(4, tokens), mask, heads=1, kv_heads=1, kernel=SdpaKernel())
    assert_exact(case)
    assert_exact(replace(case, queries_walk=True, mask=Mask(CAUSAL)))


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("n", (1, 2, 3, 4, 6, 8))
def test_slices(name, n):
    """Every route, on many ranks every second; layout, what walks and what is kept by turns."""
    turn = list(SLICES).index(name)
    for at, schedule in enumerate(schedules(n).values()):
        if n >= 6 and (at + turn) % 2:
            continue
        slices = IN_SLICES[name].slices
        layout = make_layout(("zigzag", "contiguous", "balanced")[at % 3], n, SEQLEN, None, slices)
        walks = (at // 2 + n + turn) % 2 == 0
        case = Case(schedule, schedule, layout, IN_SLICES[name], queries_walk=walks)
        assert_exact(replace(case, keep=any(schedule.gathers()) and (at // 2) % 2 == 0))
    assert_exact(replace(case, queries_walk_in_forward=True))


GATHERING = [
    pytest.param(schedule, mask, id=f"{name}({n})-{mask_name}")
    for n in (2, 4, 6, 8)
    for name, schedule in schedules(n).items()
    for mask_name, mask in MASKS.items()
    if any(schedule.gathers())
]


@pytest.mark.parametrize(("schedule", "mask"), GATHERING)
def test_what_the_forward_gathered_may_be_kept(schedule, mask):
    """Keys or queries walk by turns, both ways under the full mask."""
    layout = zigzag(schedule.num_ranks, SEQLEN)
    walks = list(MASKS.values()).index(mask) % 2 == 1
    again = Case(schedule, schedule, layout, mask, queries_walk=walks)
    kept = replace(again, keep=True)
    assert_exact(kept)
    if schedule.num_ranks in (4, 6):
        assert_exact(replace(kept, queries_walk_in_forward=True))
    if mask == MASKS["full"]:
        assert bytes_gathered(kept) < bytes_gathered(again)
        assert_exact(replace(kept, queries_walk=True))


def bytes_gathered(case):
    """By all ranks before the backward."""
    return sum(case.derived_bytes(r).get("backward gather", 0) for r in range(case.num_ranks))


@pytest.mark.parametrize("n", (2, 4, 8))
@pytest.mark.parametrize("mask", MASKS)
def test_contiguous(n, mask):
    for schedule in schedules(n).values():
        assert_exact(Case(schedule, schedule, contiguous(n, SEQLEN), MASKS[mask]))


@pytest.mark.parametrize(("schedule", "mask"), LARGE)
def test_many_ranks(schedule, mask):
    assert_exact(Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), mask))


@pytest.mark.parametrize(("heads", "kv_heads"), ((1, 1), (4, 4), (4, 1), (6, 3), (8, 2)))
@pytest.mark.parametrize("batch", (1, 3))
def test_grouped_queries(heads, kv_heads, batch):
    layout = zigzag(4, SEQLEN)
    for queries_walk in (False, True):
        case = Case(concentric(4, 2), mesh(2, 2), layout, MASKS["causal"], queries_walk)
        assert_exact(replace(case, heads=heads, kv_heads=kv_heads, batch=batch))


@pytest.mark.parametrize("head_dim", (16, 40, 64, 96, 128, 192, 256))
def test_head_dims(head_dim):
    assert_exact(Case(ring(2), ring(2), zigzag(2, 24), MASKS["causal"], head_dim=head_dim))


@pytest.mark.parametrize("name", schedules(4))
@pytest.mark.parametrize("num_keys", (9, 61))
def test_cross_attention_with_another_number_of_keys(name, num_keys):
    schedule = schedules(4)[name]
    for queries_walk in (False, True):
        case = Case(schedule, schedule, zigzag(4, SEQLEN), queries_walk=queries_walk)
        assert_exact(replace(case, kv_layout=zigzag(4, num_keys)))


def test_forward_and_backward_may_differ():
    for forward in schedules(8).values():
        assert_exact(Case(forward, concentric(8, 2), zigzag(8, SEQLEN), MASKS["causal"]))


@st.composite
def cases(draw):
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
    """A named layout, or any partition of the tokens that gives every rank some."""
    name = draw(st.sampled_from(("contiguous", "zigzag", "document_zigzag", "any")))
    if name != "any":
        return make_layout(name, n, seqlen, borders)
    owners = draw(
        st.permutations(
            [
                *range(n),
                *draw(st.lists(st.integers(0, n - 1), min_size=seqlen - n, max_size=seqlen - n)),
            ]
        )
    )
    return tuple(
        join((p, p + 1) for p, owner in enumerate(owners) if owner == rank) for rank in range(n)
    )


@pytest.mark.parametrize("n", (3, 6))
def test_a_buffer_of_queries_may_be_filled_anew_after_a_step_without_any(n):
    """Rows 0 and 1 see nothing, so that a rank reads walkers in steps that are apart."""
    mask = make_mask(**sliced((2, 12, 0, 12, "full")))
    for schedule in schedules(n).values():
        case = Case(schedule, schedule, contiguous(n, 12), mask, queries_walk=True)
        assert_exact(replace(case, kernel=SdpaKernel()))


@settings(max_examples=40)
@given(cases(), st.data())
def test_drawn_slices(case, data):
    seqlen = sum(stop - start for shard in case.layout for start, stop in shard)
    mask = make_mask(**data.draw(drawn_slices(seqlen)))
    if data.draw(st.booleans()):
        balanced = make_layout("balanced", case.num_ranks, seqlen, slices=mask.slices)
        case = replace(case, layout=balanced)
    assert_exact(replace(case, mask=mask, kernel=data.draw(st.sampled_from(KERNELS))))


@settings(max_examples=80)
@given(cases())
def test_drawn_cases(case):
    assert_exact(case)


@pytest.mark.parametrize("kernel", KERNELS, ids=("reference", "sdpa"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mask", ("causal", "window"))
def test_narrow_dtypes_err_as_one_process_does(kernel, dtype, mask):
    """The yardstick: the same kernel on the whole sequence in the same dtype."""
    for schedule in (ring(8), concentric(8, 2), mesh(2, 4)):
        case = Case(
            schedule, schedule, zigzag(8, 256), MASKS[mask], heads=2, kv_heads=1, head_dim=32
        )
        case = replace(case, dtype=dtype, kernel=kernel, scale=32**-0.5)
        alone = replace(case, forward=ring(1), backward=ring(1), layout=contiguous(1, 256))
        many, one = run_case(case).rms, run_case(alone).rms
        assert all(many[name] <= 1.25 * one[name] for name in many), (many, one)


def test_large_logits_stay_finite_and_exact():
    for schedule in schedules(4).values():
        assert_exact(
            Case(schedule, schedule, zigzag(4, SEQLEN), MASKS["causal"], q_scale=40.0), 1e-9
        )


def test_gradients_do_not_alias_what_was_given():
    """float32 in, float32 accumulators: receive buffers must not be accumulated into twice."""
    case = Case(ring(3), ring(3), zigzag(3, SEQLEN), MASKS["causal"], dtype=torch.float32)
    assert run_case(case).worst < 1e-5


def test_rows_that_see_nothing_give_zero():
    mask = Mask(Band(left=-1))  # only later keys: the last row sees none
    case = Case(ring(4), ring(4), contiguous(4, 16), mask)
    assert run_case(case).worst < 1e-10
    q, k, v, _ = case.tensors()
    assert dense_attention(q, k, v, mask, 0.3)[:, -1].abs().max() == 0


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", (1e-30, 1.0, 1e18))
def test_the_stand_in_has_the_delta_it_is_given(dtype, size):
    random = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dout = (torch.randn(1, 5, 2, 16, generator=random) * size).to(dtype)
    dout[:, 3] = 0
    out = torch.randn(1, 5, 2, 16, generator=random).to(dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    got = (dout.to(wide) * stand_in(dout, delta).to(wide)).sum(-1).transpose(1, 2)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert ((got - delta).abs() <= tolerance * delta.abs()).all()
