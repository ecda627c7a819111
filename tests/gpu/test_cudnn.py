"""torch's cuDNN attention: which tiles it computes, exact on an emulation and on a GPU."""

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
from tests.gpu.compare import (
    GPU_TOLERANCES,
    HEAD_COUNTS,
    SCORES,
    record_dtypes,
    relative_error,
    tile_errors,
)
from wf_backends.kernels import TileGrad
from wf_backends.kernels.merge import Operators
from wf_backends.kernels.protocol import FLASH_DTYPES
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import (
    CUDNN,
    MIN_CUT_SCORES,
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
ONE_CALL_TILES = [
    (128, 128, FULL),
    (128, 128, CAUSAL),
    (256, 256, Band(left=300, right=0)),
    (256, 128, FULL),
    (256, 128, CAUSAL),
    (128, 384, Band(right=383)),
]
CUT_TILES = [
    (128, 256, Band(right=128)),
    (256, 384, Band(right=256)),
    (384, 384, Band(right=128)),
]
CUDNN_TILES = ONE_CALL_TILES + CUT_TILES
FLASH_TILES = [
    (128, 128, Band(left=0)),
    (128, 128, Band(20, 0)),
    (128, 128, Band(right=1)),
    (136, 128, FULL),
    (24, 24, CAUSAL),
    (1, 128, FULL),
]
SEQLEN = 1024  # chunks of 256 on 2 ranks, of 128 on 4
MASKS = {
    "full": Mask(FULL),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(40, 0)),
    "documents": Mask(CAUSAL, (0, 300, SEQLEN)),
}


def on_hopper(q: Tensor, k: Tensor, band: Band) -> Operators:
    """What a Hopper runs for the tile in bfloat16 and with many heads, whatever those of q are."""
    tile = cuda_tile(HOPPER, q, k, band)
    return choose(replace(tile, dtype=torch.bfloat16, heads=MIN_CUT_SCORES))[0]


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """cuDNN and torch's flash are emulated; "forward" or "backward" for each call of cuDNN."""
    calls: list[str] = []
    library = torch.library.Library("aten", "IMPL", "CPU")
    emulation.register_torch_flash(library)
    emulation.register_torch_cudnn(library, calls)
    yield calls
    library._destroy()


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("tile", CUDNN_TILES + FLASH_TILES, ids=str)
def test_every_tile_is_exact_and_cudnn_computes_those_that_it_supports(calls, tile, heads):
    assert largest(tile_errors(SdpaKernel(on_hopper), tile, heads)) < 1e-5
    num_calls = 2 if tile in CUT_TILES else int(tile in CUDNN_TILES)
    assert calls == ["forward"] * num_calls + ["backward"] * num_calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tensors_reach_cudnn_in_their_dtype(calls, dtype, monkeypatch):
    dtypes = record_dtypes(monkeypatch)
    errors = tile_errors(SdpaKernel(on_hopper), (128, 128, CAUSAL), dtype=dtype)
    assert largest(errors) < 2e-2
    assert calls == ["forward", "backward"] and dtypes == {dtype}


@pytest.mark.parametrize(
    ("route", "batch"),
    [
        pytest.param(ring(2), 1, id="ring"),
        pytest.param(ring(2), 2, id="ring, batch 2"),
        pytest.param(concentric(4, 2), 2, id="concentric, batch 2"),
    ],
)
@pytest.mark.parametrize("queries_walk", [False, True], ids=["keys walk", "queries walk"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_runtime_on_cudnn_is_exact(calls, route, batch, queries_walk, mask):
    """With the lse of whole rows, the runtime's substitute for out, and its memory layouts."""
    layout, kernel = zigzag(route.num_ranks, SEQLEN), SdpaKernel(on_hopper)
    case = Case(route, route, layout, MASKS[mask], queries_walk, heads=2, kv_heads=1)
    case = replace(case, batch=batch, dtype=torch.float32, kernel=kernel)
    assert run_case(case).worst < 1e-5
    assert bool(calls) == (mask != "window")  # cuDNN has full and causal tiles alone


ZIGZAG = [
    pytest.param(route, mask, id=f"{name}, {mask}")
    for name, route in {"2": ring(2), "4": ring(4), "4, C=2": concentric(4, 2)}.items()
    for mask in ("full", "causal")
]


@pytest.mark.parametrize(("route", "mask"), ZIGZAG)
def test_cudnn_computes_all_tiles_of_zigzag(calls, route, mask):
    names: list[str] = []

    def choose_and_record(q: Tensor, k: Tensor, band: Band) -> Operators:
        operators = on_hopper(q, k, band)
        names.append(operators.name)
        return operators

    layout, kernel = zigzag(route.num_ranks, SEQLEN), SdpaKernel(choose_and_record)
    run_case(Case(route, route, layout, MASKS[mask], dtype=torch.float32, kernel=kernel))
    assert set(names) == {"cudnn"} and len(names) <= len(calls)


def meta_tensors() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the runtime's layouts, with which torch checks schemas, shapes and strides."""
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q = empty(128, 2, 4, 16).transpose(0, 1)
    k, v = empty(128, 2, 2, 2, 16).transpose(0, 2).unbind(1)
    return q, k, v


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_the_installed_torch_accepts_our_arguments_of_its_cudnn_forward(band):
    q, k, v = meta_tensors()
    out, lse = cudnn_forward(q, k, v, SCORES, band)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 128))
    assert (out.stride(), lse.stride()) == (q.stride(), (512, 128, 1))
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_the_installed_torch_accepts_our_arguments_of_its_cudnn_backward(band):
    q, k, v = meta_tensors()
    lse = torch.empty(128, 2, 4, dtype=torch.float32, device="meta").permute(1, 2, 0)
    grads = cudnn_backward(TileGrad(q, q, k, v, q, lse, lse), SCORES, band)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert {x.dtype for x in grads} == {q.dtype}


def test_the_emulation_has_the_schemas_of_the_installed_torch():
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


def test_a_shifted_causal_tile_never_reaches_cudnn_whole():
    q, k = torch.zeros(1, 128, 1, 8), torch.zeros(1, 256, 1, 8)
    with pytest.raises(AssertionError, match=r"\(128, 256, Band"):
        cudnn_forward(q, k, k, SCORES, Band(right=128))


def cudnn_or_skip(q: Tensor, k: Tensor, band: Band) -> Operators:
    """cuDNN if this machine runs it for the tile; skips the test if not."""
    tile = replace(cuda_tile(machine(q.device), q, k, band), heads=MIN_CUT_SCORES)
    operators, reason = choose(tile)
    if operators is not CUDNN:
        pytest.skip(reason)
    return CUDNN


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("tile", CUDNN_TILES, ids=str)
@pytest.mark.parametrize("dtype", FLASH_DTYPES, ids=str)
def test_every_tile_of_cudnn_on_a_gpu_is_exact_up_to_rounding(dtype, tile, heads):
    errors = tile_errors(SdpaKernel(cudnn_or_skip), tile, heads, dtype=dtype, device="cuda")
    assert largest(errors) < GPU_TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ONE_CALL_TILES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_torch_can_use_cudnn_for_every_tile_that_we_give_to_it(tile, head_dim):
    rows, keys, band = tile
    empty = partial(torch.empty, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    q, k = empty(2, rows, 4, head_dim), empty(2, keys, 2, head_dim)
    cudnn_or_skip(q, k, band)
    q, k = (x.transpose(1, 2) for x in (q, k))
    causal = band.right == 0
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, causal, True)
    assert torch.backends.cuda.can_use_cudnn_attention(params, debug=True)


@pytest.mark.gpu
def test_gradients_of_cudnn_on_a_gpu_do_not_depend_on_the_layouts_of_dout_and_out():
    """A compiled graph that is used again must not read them in the layouts of its first call."""
    random = torch.Generator().manual_seed(0)
    shape = (2, 128, 4, 64)
    q, k, v, dout = (
        torch.randn(shape, generator=random).to("cuda", torch.bfloat16) for _ in range(4)
    )
    kernel = SdpaKernel(cudnn_or_skip)
    out, lse = kernel.forward(q, k, v, SCORES, CAUSAL)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    expected = kernel.backward(TileGrad(dout, q, k, v, out, lse, delta), SCORES, CAUSAL)
    rows_first_dout, rows_first_out = (
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, out)
    )
    tile = TileGrad(rows_first_dout, q, k, v, rows_first_out, lse, delta)
    actual = kernel.backward(tile, SCORES, CAUSAL)
    for grad, expected_grad in zip(actual, expected, strict=True):
        assert relative_error(grad, expected_grad.float()) < 1e-2
