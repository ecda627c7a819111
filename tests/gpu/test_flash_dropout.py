"""flash-attn 2's own dropout: the same for every number of ranks; emulated, and on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.gpu import emulation
from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.kernels import Dropout, KernelSpec, Scores, TileGrad, flash, select
from wf_backends.kernels.flash import FlashKernel
from wf_backends.schedule.mask import CAUSAL, FULL

HEADS, KV_HEADS, SEQLEN, DIM = 8, 4, 48, 16
CUDA = KernelSpec("cuda", torch.bfloat16, 64, HEADS, KV_HEADS, dropout=True, whole_sequence=True)
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
    """flash-attn 2 and a device's generator, emulated; the kernel takes tensors of CPUs."""
    found = emulation.PhiloxGenerator()
    module = emulation.flash_attn_2(found)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: found})
    monkeypatch.setattr(flash.metadata, "version", lambda name: "2.8.3")
    refuses = FlashKernel.refuses

    def on_cpus(self, spec):
        return refuses(self, replace(spec, device="cuda", dtype=torch.bfloat16))

    monkeypatch.setattr(FlashKernel, "refuses", on_cpus)
    return found


def tensors() -> list[torch.Tensor]:
    """Whole q, k, v and dout."""
    random = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(2, SEQLEN, n, DIM, generator=random) for n in heads]


def attend(comm, words, mask):
    """Whole out, dq, dk and dv."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    *qkv, dout = (sp.shard(x) for x in tensors())
    local = [x.requires_grad_() for x in qkv]
    out = sp.attention(*local, **mask, dropout_p=0.3, dropout_seed=5)
    grads = torch.autograd.grad(out, local, dout)
    return [sp.unshard(x).detach() for x in (out, *grads)]


def words(size: int, **more: object) -> dict[str, object]:
    return {"sequence_parallel_size": size, "kernel": "flash", "ulysses_degree": size, **more}


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("mask", MASKS)
def test_any_number_of_ranks_drops_what_one_drops(mask):
    """Heads traded for tokens, all at once and in chunks, more ranks than key heads."""
    (right,) = run_threads(1, attend, words(1), MASKS[mask])
    for size, more in ((2, {}), (2, {"ulysses_chunks": 2}), (4, {"layout": "contiguous"}), (8, {})):
        for found in run_threads(size, attend, words(size, **more), MASKS[mask]):
            for a, b in zip(found, right, strict=True):
                assert (a - b).abs().max() < 1e-5


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("mask", MASKS)
def test_the_backward_drops_what_the_forward_dropped(mask):
    """Out is linear in v: dv, summed with any v, is out summed with dout."""

    def both(comm):
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words(1)), comm)
        q, k, v, dout = tensors()
        out = sp.attention(q, k, v.requires_grad_(), **MASKS[mask], dropout_p=0.3, dropout_seed=5)
        (dv,) = torch.autograd.grad(out, v, dout)
        return (out * dout).sum(), (dv * v).sum()

    ((of_out, of_v),) = run_threads(1, both)
    assert abs(of_out - of_v) < 1e-3 * abs(of_out)


def test_samples_heads_tiles_and_seeds_are_dropped_apart_and_the_generator_is_left_alone(generator):
    kernel = select("flash", replace(CUDA, device="cpu"))
    generator.manual_seed(77)
    q = torch.zeros(2, SEQLEN, 2, SEQLEN)
    v = torch.eye(SEQLEN)[:, None].expand(2, SEQLEN, 2, SEQLEN)
    place = torch.arange(SEQLEN)
    seen = []
    for seed in (1, 2):
        for row, key in ((0, 0), (1000, 0), (0, 1000)):  # that a tile begins with
            scores = Scores(1.0, dropout=Dropout(0.5, seed, (0, 2))).at_positions(
                place + row, place + key
            )
            out, lse = kernel.forward(q, q, v, scores, FULL)
            assert torch.allclose(lse, torch.tensor(float(SEQLEN)).log())
            seen += [out[b, :, h] > 0 for b in range(2) for h in range(2)]
    for at, one in enumerate(seen):
        assert abs(one.double().mean() - 0.5) < 0.05
        for other in seen[:at]:
            assert abs((one == other).double().mean() - 0.5) < 0.05
    assert generator.state == (77, 0)


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    "more", ({"ulysses_degree": 1, "route": "ring"}, {"ulysses_degree": 2, "route": "ring"})
)
def test_a_route_on_which_tiles_differ_is_refused(more):
    with pytest.raises(ValueError, match=r"ulysses_degree = all ranks.*kernel \"reference\""):
        run_threads(4, attend, words(4, **more), {})


@pytest.mark.usefixtures("generator")
def test_auto_keeps_the_dropout_that_is_the_same_on_every_route():
    assert select("auto", replace(CUDA, device="cpu")).name == "reference"
    spec = replace(CUDA, device="cpu")
    assert select("flash", spec).runs(spec) == "flash-attn 2 and its own dropout"
    with pytest.raises(ValueError, match="without a soft cap"):
        select("flash", replace(CUDA, device="cpu", softcap=True))


@pytest.mark.gpu
@pytest.mark.parametrize("band", (FULL, CAUSAL), ids=str)
def test_on_a_gpu(band):
    """Weights are read off values that are a unit matrix; gradients follow from them."""
    try:
        kernel = select("flash", replace(CUDA, head_dim=128))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, dout = (torch.randn(2, 128, 4, 128, **options) for _ in range(3))
    v = torch.eye(128, **options)[None, :, None].expand(2, 128, 4, 128)
    place = torch.arange(128, device="cuda")
    scores = Scores(0.1, dropout=Dropout(0.25, 3, (4, 8))).at_positions(place, place)
    out, lse = kernel.forward(q, k, v, scores, band)
    factors = (out.transpose(1, 2) != 0) / 0.75
    half = Scores(0.1, dropout=Dropout(0.25, 3, (6, 8))).at_positions(place, place)
    part, _ = kernel.forward(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], half, band)
    assert torch.equal(part, out[:, :, 2:])  # heads draw alike however they are split
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    found = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), scores, band)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(128, 128, dtype=torch.bool, device="cuda")
    seen = seen.tril() if band == CAUSAL else seen
    x = torch.einsum("bihd,bjhd->bhij", *leaves[:2]) * 0.1
    weights = x.masked_fill(~seen, -torch.inf).softmax(-1) * factors
    expected = torch.einsum("bhij,bjhd->bihd", weights, leaves[2])
    right = [expected, *torch.autograd.grad(expected, leaves, dout.float())]
    for a, b in zip((out, *found), right, strict=True):
        assert (a.float() - b).norm() < 1.5e-2 * b.norm()
