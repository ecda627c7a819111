"""flash-attn 2's own dropout: the same for every number of ranks; emulated, and on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.gpu import emulation
from tests.gpu.compare import relative_error
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.kernels import Dropout, Kernel, KernelSpec, Scores, TileGrad, flash, select
from wf_backends.kernels.flash import FlashKernel
from wf_backends.schedule.mask import CAUSAL, FULL

HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 8, 4, 48, 16
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 5}
SPEC = KernelSpec("cpu", torch.bfloat16, 64, HEADS, KV_HEADS, dropout=True, whole_sequence=True)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (9, 0)},
    "documents": {"causal": True, "cu_seqlens": [0, 7, 30, SEQLEN]},
    "prefix": {
        "q_ranges": [(0, 16), (16, SEQLEN)],
        "k_ranges": [(0, 16), (0, SEQLEN)],
        "attn_mask_types": ["full", "causal"],
    },
}


@pytest.fixture
def generator(monkeypatch) -> emulation.PhiloxGenerator:
    """flash-attn 2 and a GPU's generator, emulated; the kernel accepts tensors on the CPU."""
    generator = emulation.PhiloxGenerator()
    module = emulation.flash_attn_2(generator)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})
    monkeypatch.setattr(flash.metadata, "version", lambda name: "2.8.3")
    refuses = FlashKernel.refuses

    def refuses_as_on_a_gpu(self, spec):
        return refuses(self, replace(spec, device="cuda", dtype=torch.bfloat16))

    monkeypatch.setattr(FlashKernel, "refuses", refuses_as_on_a_gpu)
    return generator


def draw_tensors() -> list[Tensor]:
    """q, k, v and dout of the whole sequence."""
    random = torch.Generator().manual_seed(0)
    head_counts = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(2, SEQLEN, heads, HEAD_DIM, generator=random) for heads in head_counts]


def attend(comm, config, mask) -> list[Tensor]:
    """Out, dq, dk and dv of the whole sequence."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config), comm)
    *qkv, dout = (sp.shard(x) for x in draw_tensors())
    leaves = [x.requires_grad_() for x in qkv]
    out = sp.attention(*leaves, **mask, **DROPOUT)
    grads = torch.autograd.grad(out, leaves, dout)
    return [sp.unshard(x).detach() for x in (out, *grads)]


def flash_config(size: int, **options: object) -> dict[str, object]:
    """All ranks exchange heads for tokens, so that each computes the whole sequence."""
    return {"sequence_parallel_size": size, "kernel": "flash", "ulysses_degree": size, **options}


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("mask", MASKS)
def test_out_and_gradients_with_dropout_are_those_of_one_rank(mask):
    configs = (
        flash_config(2),
        flash_config(2, ulysses_chunks=2),
        flash_config(4, layout="contiguous"),
        flash_config(8),  # more ranks than key heads
    )
    (expected,) = run_threads(1, attend, flash_config(1), MASKS[mask])
    for config in configs:
        for actual in run_threads(config["sequence_parallel_size"], attend, config, MASKS[mask]):
            for x, y in zip(actual, expected, strict=True):
                assert (x - y).abs().max() < 1e-5, config


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("mask", MASKS)
def test_the_backward_drops_what_the_forward_dropped(mask):
    """out is linear in v, so that the sum of dv * v is the sum of dout * out."""

    def sums(comm) -> tuple[Tensor, Tensor]:
        sp = SequenceParallel(SequenceParallelConfig.from_dict(flash_config(1)), comm)
        q, k, v, dout = draw_tensors()
        out = sp.attention(q, k, v.requires_grad_(), **MASKS[mask], **DROPOUT)
        (dv,) = torch.autograd.grad(out, v, dout)
        return (dout * out).sum(), (dv * v).sum()

    ((dout_out, dv_v),) = run_threads(1, sums)
    assert abs(dout_out - dv_v) < 1e-3 * abs(dout_out)


def test_dropout_is_independent_between_samples_heads_tiles_and_seeds(generator):
    """All scores are 0 and v is a unit matrix, so that out shows which weights were kept."""
    kernel = select("flash", SPEC)
    generator.manual_seed(77)
    q = torch.zeros(2, SEQLEN, 2, SEQLEN)
    v = torch.eye(SEQLEN)[:, None].expand(2, SEQLEN, 2, SEQLEN)
    positions = torch.arange(SEQLEN)
    kept: list[Tensor] = []
    for seed in (1, 2):
        for first_row, first_key in ((0, 0), (1000, 0), (0, 1000)):
            scores = Scores(1.0, dropout=Dropout(0.5, seed, (0, 2))).at_positions(
                positions + first_row, positions + first_key
            )
            out, lse = kernel.forward(q, q, v, scores, FULL)
            assert torch.allclose(lse, torch.tensor(float(SEQLEN)).log())  # without dropout
            kept += [out[sample, :, head] > 0 for sample in range(2) for head in range(2)]
    for mask in kept:
        assert abs(mask.double().mean() - 0.5) < 0.05
    for mask, other in combinations(kept, 2):
        assert abs((mask == other).double().mean() - 0.5) < 0.05
    assert generator.state == (77, 0)  # that of the user's own draws is restored


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("ulysses_degree", (1, 2))
def test_a_route_whose_tiles_depend_on_the_number_of_ranks_is_refused(ulysses_degree):
    config = flash_config(4, ulysses_degree=ulysses_degree, route="ring")
    with pytest.raises(ValueError, match=r"ulysses_degree = all ranks.*kernel \"reference\""):
        run_threads(4, attend, config, {})


@pytest.mark.usefixtures("generator")
def test_auto_selects_the_kernel_whose_dropout_is_the_same_on_every_route():
    assert select("auto", SPEC).name == "reference"


@pytest.mark.usefixtures("generator")
def test_flash_reports_its_own_dropout():
    assert select("flash", SPEC).runs(SPEC) == "flash-attn 2 and its own dropout"


@pytest.mark.usefixtures("generator")
def test_dropout_with_a_soft_cap_is_refused():
    with pytest.raises(ValueError, match="without a soft cap"):
        select("flash", replace(SPEC, softcap=True))


def flash_or_skip() -> Kernel:
    try:
        return select("flash", replace(SPEC, device="cuda", head_dim=128))
    except ValueError as refusal:
        pytest.skip(str(refusal))


def dense_with_factors(q, k, v, dout, scale, seen, factors) -> list[Tensor]:
    """out, dq, dk, dv of float32, with the weights times `factors` (b, h, i, j)."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", *leaves[:2]) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1) * factors
    out = torch.einsum("bhij,bjhd->bihd", weights, leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]


@pytest.mark.gpu
@pytest.mark.parametrize("band", (FULL, CAUSAL), ids=str)
def test_on_a_gpu_dropout_is_that_of_dense_attention_however_heads_are_split(band):
    """v is a unit matrix, so that out shows which weights were dropped."""
    kernel = flash_or_skip()
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, dout = (torch.randn(2, 128, 4, 128, **options) for _ in range(3))
    v = torch.eye(128, **options)[None, :, None].expand(2, 128, 4, 128)
    positions = torch.arange(128, device="cuda")
    scores = Scores(0.1, dropout=Dropout(0.25, 3, (4, 8))).at_positions(positions, positions)
    out, lse = kernel.forward(q, k, v, scores, band)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    grads = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), scores, band)

    factors = (out.transpose(1, 2) != 0) / 0.75
    seen = torch.ones(128, 128, dtype=torch.bool, device="cuda")
    seen = seen.tril() if band == CAUSAL else seen
    expected = dense_with_factors(q, k, v, dout, 0.1, seen, factors)
    for x, y in zip((out, *grads), expected, strict=True):
        assert relative_error(x, y) < 1.5e-2

    last_heads = Scores(0.1, dropout=Dropout(0.25, 3, (6, 8))).at_positions(positions, positions)
    part, _ = kernel.forward(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], last_heads, band)
    assert torch.equal(part, out[:, :, 2:])
