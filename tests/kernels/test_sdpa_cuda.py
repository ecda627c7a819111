"""Which of torch's CUDA operators computes a tile, and what the user is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wf_backends.kernels import KernelSpec, sdpa
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import CudaTile, Machine, choose, machine
from wf_backends.schedule.mask import CAUSAL, FULL, Band

CUDA = torch.device("cuda")
HOPPER = Machine((2, 13), 91900, (9, 0), enabled=True, deterministic=False)
TILE = CudaTile(HOPPER, torch.bfloat16, head_dim=128, rows=256, keys=256, band=CAUSAL)


@pytest.mark.parametrize(
    "tile",
    [
        TILE,
        replace(TILE, band=FULL),
        replace(TILE, band=Band(left=255, right=0)),
        replace(TILE, keys=128, band=FULL),
        replace(TILE, keys=128, band=Band(right=127)),
        replace(TILE, dtype=torch.float16),
        replace(TILE, head_dim=8),
        replace(TILE, machine=replace(HOPPER, torch=(3, 0), cudnn=91501, capability=(10, 3))),
    ],
    ids=str,
)
def test_cudnn_comes_first_where_it_lacks_nothing(tile):
    assert choose(tile)[0].name == choose(tile)[1] == "cudnn"


@pytest.mark.parametrize(
    "tile, says",
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
        (replace(TILE, band=Band(64, 0)), "full or square causal tile, got rows 256, keys 256"),
        (replace(TILE, keys=128), "got rows 256, keys 128, band causal"),
        (replace(TILE, band=Band(right=1)), "a full or square causal tile"),
        (replace(TILE, band=Band(left=0)), "a full or square causal tile"),
        (replace(TILE, rows=200, band=FULL), "multiples of 128, got rows 200, keys 256"),
        (replace(TILE, keys=1, band=FULL), "multiples of 128, got rows 256, keys 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cudnn_lacks_goes_to_flash_and_the_reason_says_what(tile, says):
    operators, reason = choose(tile)
    assert operators.name == "flash"
    assert reason.startswith("flash; not cudnn, which needs ")
    assert says in reason


def test_a_machine_without_a_gpu_has_no_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nowhere = torch.device("cuda", 99)  # what is known of a GPU is kept
    assert machine(nowhere).capability == (0, 0)
    assert machine(nowhere).torch == tuple(int(x) for x in torch.__version__.split(".")[:2])


def test_the_machine_is_asked_anew(monkeypatch):
    """The user may switch cuDNN off, or ask for determinism, between two calls."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert machine(CUDA).cudnn == 91900
    assert machine(CUDA).enabled and not machine(CUDA).deterministic
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not machine(CUDA).enabled and machine(CUDA).deterministic
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    assert not machine(CUDA).deterministic


def test_rocm_answers_for_miopen_and_has_no_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3004000)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert machine(CUDA).cudnn == 0


@pytest.mark.parametrize(
    "machine, runs",
    [
        (HOPPER, "cudnn"),
        (replace(HOPPER, capability=(8, 0)), "flash; not cudnn, which needs compute capability"),
    ],
    ids=["hopper", "ampere"],
)
def test_the_kernel_says_what_its_full_tiles_run_on(monkeypatch, machine, runs):
    monkeypatch.setattr(sdpa, "machine", lambda device: machine)
    spec = KernelSpec("cuda", torch.bfloat16, head_dim=64, heads=8, kv_heads=2)
    assert SdpaKernel().runs(spec).startswith(f"torch's operators for full tiles: {runs}")
