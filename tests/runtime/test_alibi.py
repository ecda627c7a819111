"""ALiBi as further dimensions of queries and keys, for kernels that have none: errors, choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import Case, assert_exact, schedules
from tests.helpers import run_threads
from tests.runtime.test_exact import MASKS, SEQLEN
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, select
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.schedule import CAUSAL, FULL, Band
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import make_mask

CPU = KernelSpec("cpu", torch.float32, 64, 8, 2, alibi=True, looks_back=True)
EVERY_SCHEDULE = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 8)
    for name, schedule in schedules(n).items()
]


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_alibi_on_sdpa_is_exact_on_every_schedule(schedule):
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), alibi=True)
    case = replace(case, kernel=AlibiKernel(SdpaKernel()))
    for mask in ("causal", "causal_documents"):
        assert_exact(replace(case, mask=MASKS[mask], value_dim=6, sinks=True))
    layout = contiguous(schedule.num_ranks, SEQLEN)
    window = make_mask(causal=True, window_size=(11, 0))
    assert_exact(replace(case, layout=layout, mask=window, queries_walk=True))


ROWS = 700
ON_THE_DIAGONAL = 1 - ROWS


Tile = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and dout."""


def tile_at(distance: int) -> tuple[Tile, Scores, Band]:
    """A bfloat16 tile of 700 rows whose last key is `distance` tokens before its first row.

    Its positions are beyond 100,000.
    """
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, ROWS, heads, 64, generator=random).to(torch.bfloat16)
        for heads in (8, 2, 2, 8)
    )
    slopes = 2.0 ** -torch.arange(1.0, 9)
    keys = torch.arange(ROWS) + 100_000
    scores = Scores(0.11, slopes=slopes).at_positions(keys + ROWS - 1 + distance, keys)
    return (q, k, v, dout), scores, CAUSAL if distance == ON_THE_DIAGONAL else FULL


def relative_rms_errors(kernel: Kernel, tile: Tile, scores: Scores, band: Band) -> dict[str, float]:
    """Of out, lse, dq, dk and dv, against the reference kernel in float64.

    The backward gets the reference's out, lse and delta, rounded.
    """
    q, k, v, dout = (x.double() for x in tile)
    out, lse = ReferenceKernel().forward(q, k, v, scores, band)
    delta = (dout * out).sum(-1).transpose(1, 2)
    reference = TileGrad(dout, q, k, v, out, lse, delta)
    expected = out, lse, *ReferenceKernel().backward(reference, scores, band)
    q, k, v, dout = tile
    rounded = TileGrad(dout, q, k, v, out.to(q.dtype), lse.float(), delta.float())
    actual = *kernel.forward(q, k, v, scores, band), *kernel.backward(rounded, scores, band)
    return {
        name: float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True)
    }


@pytest.mark.parametrize("distance", (ON_THE_DIAGONAL, 1, 300))
def test_errors_in_bfloat16_are_those_of_the_same_tile_without_alibi(distance):
    """At most 1.5 times; lse, which is float32, below 1e-5."""
    tile, scores, band = tile_at(distance)
    alibi = relative_rms_errors(AlibiKernel(SdpaKernel()), tile, scores, band)
    plain = relative_rms_errors(SdpaKernel(), tile, replace(scores, slopes=None), band)
    assert alibi.pop("lse") < 1e-5 and plain.pop("lse") < 1e-5
    assert all(alibi[name] < 1.5 * plain[name] for name in plain), (alibi, plain)


def test_distances_of_more_than_three_digits_are_exact():
    """Keys 65,536 tokens apart: 700 of them span more than 2**24 tokens."""
    tile, scores, _ = tile_at(1)
    keys = torch.arange(ROWS) * (1 << 16)
    scores = replace(scores, slopes=scores.slopes / (1 << 16)).at_positions(keys[-1:] + 1, keys)
    tile = (tile[0][:, :1], *tile[1:3], tile[3][:, :1])
    errors = relative_rms_errors(AlibiKernel(SdpaKernel()), tile, scores, FULL)
    assert errors["lse"] < 1e-5 and errors["out"] < 0.01, errors


def test_errors_in_float32_do_not_grow_with_the_length_of_a_tile():
    """The first of 8,192 rows are as far from the tile's last key as any; their rounding is not.

    Without blocks of rows 8e-5 (out) and 3e-4 (lse).
    """
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 8192, 1, 8, generator=random)
    places, first = torch.arange(8192), slice(0, 256)
    scores = Scores(0.35, slopes=torch.tensor([0.8])).at_positions(places, places)
    out, lse = AlibiKernel(SdpaKernel()).forward(q, k, v, scores, CAUSAL)
    tile = (x[:, first].double() for x in (q, k, v))
    right = ReferenceKernel().forward(*tile, scores.part(first, first), CAUSAL)
    for actual, expected in ((out[:, first], right[0]), (lse[:, :, first], right[1])):
        assert float((actual - expected).square().mean().sqrt()) < 5e-5
    delta = (dout * out).sum(-1).transpose(1, 2)
    grad = TileGrad(dout, q, k, v, out, lse, delta)
    actual = AlibiKernel(SdpaKernel()).backward(grad, scores, CAUSAL)[0]
    grad = TileGrad(*(x.double() for x in grad)).part(first, first)
    expected = ReferenceKernel().backward(grad, scores.part(first, first), CAUSAL)[0]
    assert float((actual[:, first] - expected).square().mean().sqrt()) < 5e-5


def test_rows_of_a_tile_have_no_gap_between_them():
    """Elsewhere both chunks of a zigzag shard are one causal tile: the last key is far from the
    first rows, and biases are rounded to 2**-24 of that distance."""

    def rank(comm):
        config = SequenceParallelConfig(sequence_parallel_size=2, route="ring")
        q, k, v = (torch.randn(1, 8, 1, 8).requires_grad_() for _ in range(3))
        options = {"causal": True, "alibi_slopes": torch.ones(1)}
        call = SequenceParallel(config, comm).attention(q, k, v, **options).grad_fn.call
        steps = (*call.forward.steps, *call.backward.steps)
        tiles = [tile for step in steps for round_ in step.rounds for tile in round_.tiles]
        assert tiles and all(len(tile.positions[0]) == 1 for tile in tiles)

    run_threads(2, rank)


def test_alibi_kernel_is_selected_where_no_row_sees_a_later_key():
    assert isinstance(select("auto", CPU), AlibiKernel)
    assert "ALiBi as dimensions of queries and keys" in select("sdpa", CPU).runs(CPU)


@pytest.mark.parametrize(
    ("name", "change"),
    (
        ("auto", {"looks_back": False}),
        ("auto", {"softcap": True}),
        ("auto", {"dtype": torch.float16}),
        ("auto", {"dropout": True}),
        ("reference", {}),
    ),
)
def test_reference_kernel_is_selected_elsewhere(name, change):
    assert isinstance(select(name, replace(CPU, **change)), ReferenceKernel)


SLICES = {"q_ranges": [(0, 4), (4, 9)], "k_ranges": [(0, 4), (0, 4)]}


@pytest.mark.parametrize(
    ("mask", "looks_back"),
    (
        (make_mask(causal=True), True),
        (make_mask(window_size=(5, 0)), True),
        (make_mask(True, (3, 3), [0, 9]), True),
        (make_mask(**SLICES, attn_mask_types=["causal", "full"]), True),
        (make_mask(), False),
        (make_mask(window_size=(5, 1)), False),
        (make_mask(cu_seqlens=[0, 4, 9]), False),
        (make_mask(**SLICES, attn_mask_types=["full", "full"]), False),
    ),
    ids=(
        "causal",
        "left window",
        "causal with window and document",
        "causal slices",
        "full",
        "two-sided window",
        "documents",
        "full slices",
    ),
)
def test_a_mask_looks_back_where_no_query_sees_a_later_key(mask, looks_back):
    assert mask.looks_back == looks_back
