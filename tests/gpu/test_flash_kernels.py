"""flash-attn and torch's CUDA kernels: what is said to them (anywhere), what they do (on a GPU)."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.dense import largest
from tests.gpu import emulation
from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad, select
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.flash import FlashKernel, flash_attn_2, flash_attn_3
from wf_backends.kernels.merge import Operators
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import FLASH, cuda_backward, cuda_forward
from wf_backends.schedule.mask import CAUSAL, FULL, Band

SCORES = Scores(0.3)
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


@pytest.fixture
def emulated(monkeypatch, request) -> Kernel:
    """A kernel whose library is emulated, for this test alone."""
    if request.param == "flash-attn 2":
        module = emulation.flash_attn_2()
        package = ModuleType("flash_attn")
        package.__dict__["flash_attn_interface"] = module
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
        return with_operators(monkeypatch, flash_attn_2())
    if request.param == "flash-attn 3":
        library = torch.library.Library("flash_attn_3", "FRAGMENT")
        emulation.register_flash_attn_3(library)
        request.addfinalizer(library._destroy)
        module = ModuleType("flash_attn_interface")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        return with_operators(monkeypatch, flash_attn_3())
    library = torch.library.Library("aten", "IMPL", "CPU")
    emulation.register_torch_flash(library)
    request.addfinalizer(library._destroy)
    return SdpaKernel(lambda q, k, band: FLASH)


def with_operators(monkeypatch, operators: Operators) -> FlashKernel:
    kernel = FlashKernel()
    monkeypatch.setattr(kernel, "_loaded", {False: operators})
    return kernel


def rows_first(rows: int, *heads: int, **options) -> Tensor:
    """(2, rows, *heads) seen from a rows-first buffer, as the executor hands it over."""
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 2, *heads, generator=random).to(**options).permute(1, 0, 2, 3)


def compare(
    kernel: Kernel,
    tile: tuple[int, int, Band],
    heads=(4, 2),
    scores=SCORES,
    value_dim: int = 16,
    **options,
) -> list[float]:
    """Relative errors of out, lse, dq, dk, dv against the reference kernel, with a row's lse."""
    rows, keys, band = tile
    widths = (16, value_dim)
    q, dout = (
        rows_first(rows, heads[0], d, **options) * s for d, s in zip(widths, (1, -0.7), strict=True)
    )
    k, v = (
        rows_first(keys, heads[1], d, **options) * s
        for d, s in zip(widths, (0.9, 0.8), strict=True)
    )
    reference = ReferenceKernel()
    out, lse = kernel.forward(q, k, v, scores, band)
    expected_out, expected_lse = reference.forward(q, k, v, scores, band)
    row_out = (expected_out * 0.5).to(q.dtype)  # as if the row had met as many keys elsewhere
    row_lse = (expected_lse + 0.7).transpose(1, 2).contiguous().transpose(1, 2)
    delta = (dout.float() * row_out.float()).sum(-1).transpose(1, 2)
    backward = (TileGrad(dout, q, k, v, row_out, row_lse, delta), scores, band)
    pairs = zip(
        [out, lse, *kernel.backward(*backward)],
        [expected_out, expected_lse, *reference.backward(*backward)],
        strict=True,
    )
    return [float((a.float() - b).norm() / b.norm()) for a, b in pairs]


EMULATED = ["flash-attn 2", "flash-attn 3", "torch"]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_what_is_said_to_flash_attention(emulated, tile, heads):
    assert largest(compare(emulated, tile, heads)) < 1e-5


@pytest.mark.parametrize("value_dim", (8, 24))
@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_values_of_another_width_are_filled_up_for_libraries_that_know_one(emulated, value_dim):
    for tile in TILES[:4]:
        assert largest(compare(emulated, tile, value_dim=value_dim)) < 1e-5


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("emulated", EMULATED[:2], indirect=True)
def test_a_soft_cap_is_said_to_flash_attention(emulated, tile):
    assert largest(compare(emulated, tile, scores=Scores(1.5, softcap=2.0))) < 1e-5


@pytest.mark.parametrize("distance", (0, 40))
@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_alibi_goes_as_dimensions_of_queries_and_keys(emulated, distance):
    """On the diagonal and far from it; by global positions, of which the library knows nothing."""
    keys = torch.arange(24) + 1000
    scores = Scores(0.3, slopes=2.0 ** -torch.arange(1.0, 5)).at_positions(keys + distance, keys)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        tile = (24, 24, FULL if distance else CAUSAL)
        assert largest(compare(AlibiKernel(emulated), tile, scores=scores, dtype=dtype)) < most


@pytest.mark.parametrize("emulated", EMULATED, indirect=True)
def test_half_precision_stays_half_on_the_way_in(emulated):
    assert largest(compare(emulated, (24, 24, CAUSAL), dtype=torch.bfloat16)) < 2e-2


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_torch_takes_our_arguments(operator):
    """The schemas of the installed torch, by its own shape functions: no GPU, no numbers."""
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k = empty(2, 24, 4, 16), empty(2, 40, 2, 16)
    if operator == "forward":
        out, lse = cuda_forward(q, k, k, SCORES, Band(3, 30))
        assert (out.shape, lse.shape) == (q.shape, (2, 4, 24))
        assert lse.dtype == torch.float32
    else:
        lse = empty(2, 4, 24, dtype=torch.float32)
        grads = cuda_backward(TileGrad(q, q, k, k, q, lse, lse), SCORES, Band(3, 30))
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "flash"])
def test_kernels_on_a_gpu(name, dtype, tile, heads):
    try:
        kernel = select(name, KernelSpec("cuda", dtype, 16, *heads))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    errors = compare(kernel, tile, heads, dtype=dtype, device="cuda")
    assert largest(errors) < (1.5e-2 if dtype == torch.bfloat16 else 2e-3)
