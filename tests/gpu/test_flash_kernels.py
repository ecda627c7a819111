"""flash-attn and torch's CUDA kernels: exact on emulated libraries, and on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.dense import largest
from tests.gpu import emulation
from tests.gpu.compare import GPU_TOLERANCES, HEAD_COUNTS, SCORES, record_dtypes, tile_errors
from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, select
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.flash import FlashKernel, flash_attn_2, flash_attn_3
from wf_backends.kernels.merge import Operators
from wf_backends.kernels.sdpa import EFFICIENT, SdpaKernel, masked_operators
from wf_backends.kernels.sdpa_cuda import FLASH, flash_backward, flash_forward
from wf_backends.schedule.mask import CAUSAL, FULL, Band

TILES = [
    (24, 24, FULL),
    (24, 24, CAUSAL),
    (24, 40, Band(right=16)),
    (40, 24, CAUSAL),
    (40, 12, Band(right=3)),
    (24, 24, Band(left=0)),
    (40, 12, Band(left=30)),
    (24, 24, Band(5, 3)),
    (40, 12, Band(30, 2)),
    (40, 24, Band(20, 9)),
    (24, 40, Band(2, 20)),
    (1, 24, FULL),
    (24, 1, FULL),
]


def flash_kernel(operators: Operators) -> FlashKernel:
    kernel = FlashKernel()
    kernel._operators = operators
    return kernel


def emulate_flash_attn_2(request, monkeypatch) -> Kernel:
    module = emulation.flash_attn_2()
    package = ModuleType("flash_attn")
    package.__dict__["flash_attn_interface"] = module
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    return flash_kernel(flash_attn_2())


def emulate_flash_attn_3(request, monkeypatch) -> Kernel:
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    emulation.register_flash_attn_3(library)
    request.addfinalizer(library._destroy)
    module = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return flash_kernel(flash_attn_3())


def emulate_torch_flash(request, monkeypatch) -> Kernel:
    library = torch.library.Library("aten", "IMPL", "CPU")
    emulation.register_torch_flash(library)
    request.addfinalizer(library._destroy)
    return SdpaKernel(lambda q, k, band: FLASH)


def emulate_torch_efficient(request, monkeypatch) -> Kernel:
    library = torch.library.Library("aten", "IMPL", "CPU")
    emulation.register_torch_efficient(library)
    request.addfinalizer(library._destroy)
    return SdpaKernel(lambda q, k, band: masked_operators("efficient", EFFICIENT))


EMULATIONS: dict[str, Callable[..., Kernel]] = {
    "flash-attn 2": emulate_flash_attn_2,
    "flash-attn 3": emulate_flash_attn_3,
    "torch": emulate_torch_flash,
    "torch, float32": emulate_torch_efficient,
}


@pytest.fixture
def emulated(monkeypatch, request) -> Kernel:
    """A kernel whose library is emulated, for this test alone."""
    return EMULATIONS[request.param](request, monkeypatch)


@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("emulated", EMULATIONS, indirect=True)
def test_every_tile_is_exact_on_an_emulated_library(emulated, tile, heads):
    assert largest(tile_errors(emulated, tile, heads)) < 1e-5


@pytest.mark.parametrize("value_dim", (8, 24))
@pytest.mark.parametrize("tile", TILES[:4], ids=str)
@pytest.mark.parametrize("emulated", EMULATIONS, indirect=True)
def test_a_value_dim_other_than_the_head_dim_is_padded_and_exact(emulated, tile, value_dim):
    """The libraries take one width for queries, keys and values."""
    assert largest(tile_errors(emulated, tile, value_dim=value_dim)) < 1e-5


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("emulated", ("flash-attn 2", "flash-attn 3"), indirect=True)
def test_every_tile_with_a_soft_cap_is_exact(emulated, tile):
    assert largest(tile_errors(emulated, tile, scores=Scores(1.5, softcap=2.0))) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("distance", (0, 40))
@pytest.mark.parametrize("emulated", EMULATIONS, indirect=True)
def test_alibi_as_additional_dimensions_of_queries_and_keys_is_exact(
    emulated, distance, dtype, tolerance
):
    """On the diagonal and far from it, at positions that the library does not know."""
    key_positions = torch.arange(24) + 1000
    slopes = 2.0 ** -torch.arange(1.0, 5)
    scores = Scores(0.3, slopes=slopes).at_positions(key_positions + distance, key_positions)
    tile = (24, 24, FULL if distance else CAUSAL)
    errors = tile_errors(AlibiKernel(emulated), tile, scores=scores, dtype=dtype)
    assert largest(errors) < tolerance


@pytest.mark.parametrize("emulated", EMULATIONS, indirect=True)
def test_bfloat16_tensors_reach_the_library_in_bfloat16(emulated, monkeypatch):
    dtypes = record_dtypes(monkeypatch)
    assert largest(tile_errors(emulated, (24, 24, CAUSAL), dtype=torch.bfloat16)) < 2e-2
    assert dtypes == {torch.bfloat16}


def meta_tensors() -> tuple[Tensor, Tensor]:
    """q and k, with which torch checks schemas and shapes: no GPU, no numbers."""
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    return empty(2, 24, 4, 16), empty(2, 40, 2, 16)


def test_the_installed_torch_accepts_our_arguments_of_its_flash_forward():
    q, k = meta_tensors()
    out, lse = flash_forward(q, k, k, SCORES, Band(3, 30))
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 24))
    assert lse.dtype == torch.float32


def test_the_installed_torch_accepts_our_arguments_of_its_flash_backward():
    q, k = meta_tensors()
    lse = torch.empty(2, 4, 24, dtype=torch.float32, device="meta")
    grads = flash_backward(TileGrad(q, q, k, k, q, lse, lse), SCORES, Band(3, 30))
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEAD_COUNTS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", GPU_TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_every_tile_on_a_gpu_is_exact_up_to_rounding(name, dtype, tile, heads):
    try:
        kernel = select(name, KernelSpec("cuda", dtype, 16, *heads))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    errors = tile_errors(kernel, tile, heads, dtype=dtype, device="cuda")
    assert largest(errors) < GPU_TOLERANCES[dtype]
