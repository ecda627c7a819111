"""ALiBi as dimensions of queries and keys, on kernels that have none, beside dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, assert_exact, schedules
from tests.dense import largest
from tests.runtime.test_exact import MASKS, SEQLEN
from wf_backends.kernels import KernelSpec, Scores, TileGrad, select
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.schedule import CAUSAL, FULL
from wf_backends.schedule.layout import contiguous, zigzag
from wf_backends.schedule.mask import make_mask

CPU = KernelSpec("cpu", torch.float32, 64, 8, 2, alibi=True, looks_back=True)
EVERY = [
    pytest.param(schedule, id=f"{name}({n})")
    for n in (1, 2, 3, 4, 8)
    for name, schedule in schedules(n).items()
]


@pytest.mark.parametrize("schedule", EVERY)
def test_on_every_schedule(schedule):
    case = Case(schedule, schedule, zigzag(schedule.num_ranks, SEQLEN), alibi=True)
    case = replace(case, kernel=AlibiKernel(SdpaKernel()))
    for mask in ("causal", "causal_documents"):
        assert_exact(replace(case, mask=MASKS[mask], value_dim=6, sinks=True))
    rows = contiguous(schedule.num_ranks, SEQLEN)
    window = make_mask(causal=True, window_size=(11, 0))
    assert_exact(replace(case, layout=rows, mask=window, queries_walk=True))


def far(distance: int, rows: int, dtype: torch.dtype) -> tuple[Scores, TileGrad]:
    """A tile whose last key stands `distance` before its first row; 1 - rows is the diagonal."""
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, rows, heads, 64, generator=random).to(dtype) for heads in (8, 2, 2, 8)
    )
    slopes = 2.0 ** -torch.arange(1.0, 9)
    keys = torch.arange(rows) + 100_000
    scores = Scores(0.11, slopes=slopes).at_positions(keys + rows - 1 + distance, keys)
    band = CAUSAL if distance == 1 - rows else FULL
    out, lse = ReferenceKernel().forward(q.double(), k.double(), v.double(), scores, band)
    delta = (dout * out).sum(-1).transpose(1, 2)
    return scores, TileGrad(dout, q, k, v, out, lse, delta)


@pytest.mark.parametrize("distance", (-699, 1, 300))
def test_in_16_bits_it_is_as_exact_as_without(distance):
    """Errors of the same tile beside float64, with ALiBi and without."""

    def errors(kernel, scores, tile):
        band = CAUSAL if distance == -699 else FULL
        wide = TileGrad(*(x.double() for x in tile))
        right_out, right_lse = ReferenceKernel().forward(wide.q, wide.k, wide.v, scores, band)
        right = ReferenceKernel().backward(
            wide._replace(
                out=right_out, lse=right_lse, delta=(wide.dout * right_out).sum(-1).transpose(1, 2)
            ),
            scores,
            band,
        )
        out, lse = kernel.forward(tile.q, tile.k, tile.v, scores, band)
        delta = (tile.dout.double() * right_out).sum(-1).transpose(1, 2).float()
        given = tile._replace(out=right_out.to(out.dtype), lse=right_lse.float(), delta=delta)
        found = out, lse, *kernel.backward(given, scores, band)
        pairs = zip(found, (right_out, right_lse, *right), strict=True)
        return [float((a - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in pairs]

    scores, tile = far(distance, 700, torch.bfloat16)
    ours = errors(AlibiKernel(SdpaKernel()), scores, tile)
    plain = errors(SdpaKernel(), replace(scores, slopes=None), tile)
    assert largest((ours.pop(1), plain.pop(1))) < 1e-5  # lse, in float32
    assert all(a < 1.5 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


def test_it_is_chosen_where_no_row_sees_a_later_key():
    assert isinstance(select("auto", CPU), AlibiKernel)
    assert "ALiBi as dimensions of queries and keys" in select("sdpa", CPU).runs(CPU)
    others = ({"looks_back": False}, {"softcap": True}, {"dtype": torch.float16}, {"dropout": True})
    for words in others:
        assert isinstance(select("auto", replace(CPU, **words)), ReferenceKernel)
    assert isinstance(select("reference", CPU), ReferenceKernel)


def test_masks_that_look_back_are_told():
    back = [make_mask(causal=True), make_mask(window_size=(5, 0)), make_mask(True, (3, 3), [0, 9])]
    both = [make_mask(), make_mask(window_size=(5, 1)), make_mask(cu_seqlens=[0, 4, 9])]
    slices = {"q_ranges": [(0, 4), (4, 9)], "k_ranges": [(0, 4), (0, 4)]}
    back.append(make_mask(**slices, attn_mask_types=["causal", "full"]))
    both.append(make_mask(**slices, attn_mask_types=["full", "full"]))
    assert all(mask.looks_back for mask in back) and not any(mask.looks_back for mask in both)
