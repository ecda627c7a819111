"""torch's cuDNN attention: what is said to it (anywhere), and what it does (on a GPU)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.cases import Case, run_case
from tests.dense import largest
from tests.gpu import emulation
from tests.gpu.test_flash_kernels import SCORES, compare
from wf_backends.kernels import TileGrad
from wf_backends.kernels.merge import Operators
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import (
    CUDNN,
    Machine,
    choose,
    cuda_tile,
    cudnn_backward,
    cudnn_forward,
    machine,
)
from wf_backends.schedule.layout import zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask
from wf_backends.schedule.routes import concentric, ring

HOPPER = Machine((2, 13), 91900, (9, 0), enabled=True, deterministic=False)
FOR_CUDNN = [
    (128, 128, FULL),
    (128, 128, CAUSAL),
    (256, 256, Band(left=300, right=0)),
    (256, 128, FULL),
    (128, 384, Band(right=383)),
]
FOR_FLASH = [
    (128, 256, Band(right=128)),
    (256, 128, CAUSAL),
    (128, 128, Band(left=0)),
    (128, 128, Band(20, 0)),
    (128, 128, Band(right=1)),
    (136, 128, FULL),
    (24, 24, CAUSAL),
    (1, 128, FULL),
]
SEQLEN = 1024  # chunks of 256 on 2 ranks, of 128 on 4
EXECUTED = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(40, 0)),
    "documents": Mask(CAUSAL, (0, 300, SEQLEN)),
}


def on_hopper(q: Tensor, k: Tensor, band: Band) -> Operators:
    """The choice for a bfloat16 tile on a Hopper, whatever q is."""
    return choose(replace(cuda_tile(HOPPER, q, k, band), dtype=torch.bfloat16))[0]


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """What ran on the emulated cuDNN, in order; the flash operators are emulated beside it."""
    found: list[str] = []
    library = torch.library.Library("aten", "IMPL", "CPU")
    emulation.register_torch_flash(library)
    emulation.register_torch_cudnn(library, found)
    yield found
    library._destroy()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", FOR_CUDNN + FOR_FLASH, ids=str)
def test_every_tile_is_exact_and_cudnn_computes_those_that_it_can(calls, tile, heads):
    assert largest(compare(SdpaKernel(on_hopper), tile, heads)) < 1e-5
    assert calls == (["forward", "backward"] if tile in FOR_CUDNN else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_half_on_the_way_in(calls, dtype):
    assert largest(compare(SdpaKernel(on_hopper), (128, 128, CAUSAL), dtype=dtype)) < 2e-2
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("route", "batch"),
    [
        pytest.param(ring(2), 1, id="ring"),
        pytest.param(ring(2), 2, id="ring, batch 2"),
        pytest.param(concentric(4, 2), 2, id="concentric, batch 2"),
    ],
)
@pytest.mark.parametrize("queries_walk", [False, True], ids=["keys walk", "queries walk"])
@pytest.mark.parametrize("mask", EXECUTED, ids=str)
def test_the_executor_on_cudnn_is_exact(calls, route, batch, queries_walk, mask):
    """The global lse, the stand-in for out, and the executor's own memory layouts."""
    layout, kernel = zigzag(route.num_ranks, SEQLEN), SdpaKernel(on_hopper)
    case = Case(route, route, layout, EXECUTED[mask], queries_walk, heads=2, kv_heads=1)
    case = replace(case, batch=batch, dtype=torch.float32, kernel=kernel)
    assert run_case(case).worst < 1e-5
    assert (len(calls) > 0) == (mask != "window")


ZIGZAG = [
    pytest.param(route, mask, id=f"{name}, {mask}")
    for name, route in {"2": ring(2), "4": ring(4), "4, C=2": concentric(4, 2)}.items()
    for mask in ("full", "causal")
    if mask == "full" or "C" not in name  # an owner's rows against joined keys: no square
]


@pytest.mark.parametrize(("route", "mask"), ZIGZAG)
def test_all_tiles_of_zigzag_go_to_cudnn(calls, route, mask):
    asked: list[str] = []

    def noted(q: Tensor, k: Tensor, band: Band) -> Operators:
        asked.append(on_hopper(q, k, band).name)
        return on_hopper(q, k, band)

    layout, kernel = zigzag(route.num_ranks, SEQLEN), SdpaKernel(noted)
    run_case(Case(route, route, layout, EXECUTED[mask], dtype=torch.float32, kernel=kernel))
    assert set(asked) == {"cudnn"} and len(asked) == len(calls)


@pytest.mark.parametrize("operator", ["forward", "backward"])
@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_torch_takes_our_arguments(operator, band):
    """The schemas of the installed torch, by its own shape functions: no GPU, no numbers."""
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q = empty(128, 2, 4, 16).transpose(0, 1)
    k, v = empty(128, 2, 2, 2, 16).transpose(0, 2).unbind(1)
    if operator == "forward":
        out, lse = cudnn_forward(q, k, v, SCORES, band)
        assert (out.shape, lse.shape) == (q.shape, (2, 4, 128))
        assert (out.stride(), lse.stride()) == (q.stride(), (512, 128, 1))
        assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    else:
        lse = empty(128, 2, 4, dtype=torch.float32).permute(1, 2, 0)
        grads = cudnn_backward(TileGrad(q, q, k, v, q, lse, lse), SCORES, band)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert {x.dtype for x in grads} == {q.dtype}


def test_torch_still_has_the_schemas_that_the_emulation_follows():
    ops = torch.ops.aten
    forward = ops._scaled_dot_product_cudnn_attention.default._schema
    backward = ops._scaled_dot_product_cudnn_attention_backward.default._schema
    assert [a.name for a in forward.arguments] == (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    ).split()
    assert [a.name for a in forward.returns[:2]] == ["output", "logsumexp"]
    assert [a.name for a in backward.arguments] == (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias "
        "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale"
    ).split()


def test_cudnn_refuses_a_tile_that_it_would_get_wrong():
    q, k = torch.zeros(1, 256, 1, 8), torch.zeros(1, 128, 1, 8)
    with pytest.raises(AssertionError):
        cudnn_forward(q, k, k, SCORES, CAUSAL)


def cudnn_here(q: Tensor, k: Tensor, band: Band) -> Operators:
    """cuDNN for a tile on this machine; skips where the choice is another."""
    operators, reason = choose(cuda_tile(machine(q.device), q, k, band))
    if operators is not CUDNN:
        pytest.skip(reason)
    return CUDNN


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", FOR_CUDNN, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cudnn_on_a_gpu(dtype, tile, heads):
    errors = compare(SdpaKernel(cudnn_here), tile, heads, dtype=dtype, device="cuda")
    assert largest(errors) < (1.5e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", FOR_CUDNN, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_torch_says_that_cudnn_takes_what_we_give_it(tile, head_dim):
    rows, keys, band = tile
    empty = partial(torch.empty, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    q, k = empty(2, rows, 4, head_dim), empty(2, keys, 2, head_dim)
    cudnn_here(q, k, band)
    q, k = (x.transpose(1, 2) for x in (q, k))
    causal = band.right == 0
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, causal, True)
    assert torch.backends.cuda.can_use_cudnn_attention(params, debug=True)


@pytest.mark.gpu
def test_another_memory_order_of_dout_changes_nothing_on_a_gpu():
    """A compiled graph used again must not read dout or out in the order of an earlier call."""
    random = torch.Generator().manual_seed(0)
    shape = (2, 128, 4, 64)
    q, k, v, dout = (
        torch.randn(shape, generator=random).to("cuda", torch.bfloat16) for _ in range(4)
    )
    kernel = SdpaKernel(cudnn_here)
    out, lse = kernel.forward(q, k, v, SCORES, CAUSAL)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    first = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), SCORES, CAUSAL)
    moved = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, out)]
    again = kernel.backward(TileGrad(moved[0], q, k, v, moved[1], lse, delta), SCORES, CAUSAL)
    for a, b in zip(first, again, strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * a.float().norm()
