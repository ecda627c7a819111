"""Which of torch's CUDA operators computes a tile, and the reason that is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wf_backends.kernels import KernelSpec, sdpa
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import MIN_CUT_SCORES, CudaTile, Machine, choose, machine
from wf_backends.schedule.mask import CAUSAL, FULL, Band

CUDA = torch.device("cuda")
HOPPER = Machine((2, 13), 91900, (9, 0), enabled=True, deterministic=False)
TILE = CudaTile(HOPPER, torch.bfloat16, head_dim=128, heads=2, rows=256, keys=256, band=CAUSAL)
SHIFTED = replace(TILE, rows=4096, keys=8192, heads=8, band=Band(right=4096))
assert SHIFTED.rows * SHIFTED.keys * SHIFTED.heads == MIN_CUT_SCORES


@pytest.mark.parametrize(
    "tile",
    [
        TILE,
        replace(TILE, band=FULL),
        replace(TILE, band=Band(left=255, right=0)),
        replace(TILE, keys=128, band=FULL),
        replace(TILE, keys=128, band=Band(right=127)),
        replace(TILE, keys=128),
        SHIFTED,
        replace(SHIFTED, keys=16384),
        replace(TILE, dtype=torch.float16),
        replace(TILE, head_dim=8),
        replace(TILE, machine=replace(HOPPER, torch=(3, 0), cudnn=91501, capability=(10, 3))),
    ],
    ids=str,
)
def test_cudnn_computes_tiles_for_which_it_lacks_nothing(tile):
    operators, reason = choose(tile)
    assert operators.name == reason == "cudnn"


@pytest.mark.parametrize(
    "tile, need",
    [
        (replace(TILE, machine=replace(HOPPER, torch=(2, 10))), "torch 2.11 or later, got torch"),
        (replace(TILE, machine=replace(HOPPER, cudnn=91500)), "9.15.1 or later, got cudnn 91500"),
        (replace(TILE, machine=replace(HOPPER, cudnn=0)), "cuDNN 9.15.1 or later, got cudnn 0"),
        (replace(TILE, machine=replace(HOPPER, capability=(8, 0))), "got capability (8, 0)"),
        (replace(TILE, machine=replace(HOPPER, capability=(12, 0))), "got capability (12, 0)"),
        (replace(TILE, machine=replace(HOPPER, enabled=False)), "enable_cudnn_sdp(True), got"),
        (replace(TILE, machine=replace(HOPPER, deterministic=True)), "got deterministic True"),
        (replace(TILE, dtype=torch.float32), "got dtype torch.float32"),
        (replace(TILE, head_dim=136), "multiple of 8 up to 128, got head_dim 136"),
        (replace(TILE, head_dim=12), "multiple of 8 up to 128, got head_dim 12"),
        (replace(TILE, band=Band(64, 0)), "without a bound on the left, got rows 256, keys 256"),
        (replace(TILE, band=Band(left=0)), "without a bound on the left"),
        (replace(SHIFTED, band=Band(right=4097)), "the band's shift in multiples of 128, got"),
        (replace(SHIFTED, heads=7), "268435456 scores in a shifted causal tile"),
        (replace(TILE, rows=200, band=FULL), "multiples of 128, got rows 200, keys 256, band full"),
        (replace(TILE, keys=1, band=FULL), "multiples of 128, got rows 256, keys 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_flash_computes_other_tiles_and_the_reason_names_what_cudnn_needs(tile, need):
    operators, reason = choose(tile)
    assert operators.name == "flash"
    assert reason.startswith("flash; not cudnn, which needs ")
    assert need in reason


def test_without_a_gpu_the_capability_is_zero(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = torch.device("cuda", 99)  # of a number that no other test has put into the cache
    assert machine(device).capability == (0, 0)
    assert machine(device).torch == tuple(int(x) for x in torch.__version__.split(".")[:2])


def test_settings_of_torch_are_read_at_every_call(monkeypatch):
    """The user may switch cuDNN off, or require determinism, between two calls."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert machine(CUDA).cudnn == 91900
    assert machine(CUDA).enabled and not machine(CUDA).deterministic
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not machine(CUDA).enabled and machine(CUDA).deterministic


def test_determinism_that_only_warns_is_not_deterministic(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    assert not machine(CUDA).deterministic


def test_on_rocm_there_is_no_cudnn(monkeypatch):
    """torch.backends.cudnn.version() is MIOpen's there."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3004000)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert machine(CUDA).cudnn == 0


@pytest.mark.parametrize(
    "machine, operators",
    [
        (HOPPER, "cudnn"),
        (replace(HOPPER, capability=(8, 0)), "flash; not cudnn, which needs compute capability"),
    ],
    ids=["hopper", "ampere"],
)
def test_runs_names_the_operators_of_full_tiles(monkeypatch, machine, operators):
    monkeypatch.setattr(sdpa, "machine", lambda device: machine)
    spec = KernelSpec("cuda", torch.bfloat16, head_dim=64, heads=8, kv_heads=2)
    assert SdpaKernel().runs(spec).startswith(f"torch's operators for full tiles: {operators}")
