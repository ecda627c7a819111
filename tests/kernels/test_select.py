"""Which kernel is chosen, and what the user reads when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wf_backends.cluster.topology import KERNEL_NAMES
from wf_backends.kernels import KernelSpec, select
from wf_backends.kernels import flash as flash_module
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.select import KERNELS

CPU = KernelSpec("cpu", torch.float32, head_dim=64, heads=8, kv_heads=2)
CUDA = replace(CPU, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def flash_attn_version(monkeypatch):
    """Pretend that this version of flash-attn is installed (None: none is)."""

    def pretend(version: str | None) -> None:
        def of(name: str) -> str:
            if version is None:
                raise flash_module.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(flash_module.metadata, "version", of)
        monkeypatch.setattr(flash_module, "find_spec", lambda name: None)

    return pretend


def test_a_config_knows_every_kernel():
    assert set(KERNEL_NAMES) == set(KERNELS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_sdpa_on_a_cpu(dtype):
    assert select("auto", replace(CPU, dtype=dtype)).name == "sdpa"


@pytest.mark.parametrize("kv_heads, release, refuses", [(2, (2, 8), True), (8, (2, 8), False)])
def test_a_cpu_kernel_that_would_read_beyond_its_keys_is_refused(kv_heads, release, refuses):
    told = SdpaKernel(release=release).refuses(replace(CPU, kv_heads=kv_heads))
    assert (told is not None) == refuses
    assert told is None or "grouped key heads from 2.9 on, this is 2.8" in told
    assert SdpaKernel(release=(2, 9)).refuses(CPU) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_auto_is_reference_on_cuda_for_wide_floats(dtype):
    spec = replace(CUDA, dtype=dtype)
    assert select("auto", spec).name == "reference"
    assert all(KERNELS[name]().refuses(spec) for name in ("flash", "sdpa"))


@pytest.mark.parametrize("device, dtype", [("mps", torch.float32), ("cpu", torch.float8_e4m3fn)])
def test_auto_is_reference_where_torch_has_no_flash_kernel(device, dtype):
    spec = replace(CPU, device=device, dtype=dtype)
    assert select("auto", spec).name == "reference"


@pytest.mark.parametrize("version", ["2.7.0.post2", "2.8.3", "3.0.0"])
def test_auto_is_flash_on_cuda_where_it_is_installed(version, flash_attn_version):
    flash_attn_version(version)
    for dtype in (torch.bfloat16, torch.float16):
        spec = replace(CUDA, dtype=dtype)
        kernel = select("auto", spec)
        assert kernel.name == "flash"
        assert kernel.runs(spec) == "flash-attn 2"


@pytest.mark.parametrize("version", [None, "2.6.3", "1.0.9"])
def test_auto_is_sdpa_on_cuda_without_a_recent_flash_attn(version, flash_attn_version):
    flash_attn_version(version)
    kernel = select("auto", CUDA)
    assert kernel.name == "sdpa"
    assert kernel.runs(CUDA).startswith("torch's operators for full tiles: ")


@pytest.mark.parametrize("head_dim", [20, 264])
def test_auto_is_reference_on_cuda_for_head_dims_that_flash_lacks(head_dim, flash_attn_version):
    flash_attn_version("2.8.3")
    spec = replace(CUDA, head_dim=head_dim)
    assert select("auto", spec).name == "reference"
    for name in ("flash", "sdpa"):
        told = KERNELS[name]().refuses(spec)
        assert told == f"head_dim must be a multiple of 8 up to 256, got {head_dim}"


def test_a_gpu_that_is_too_old_for_flash_gets_the_reference(flash_attn_version, monkeypatch):
    flash_attn_version("2.8.3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    spec = replace(CUDA, dtype=torch.float16)
    assert select("auto", spec).name == "reference"
    for name in ("flash", "sdpa"):
        told = KERNELS[name]().refuses(spec)
        assert told and told.endswith("capability (8, 0) or later, this GPU has (7, 5)")


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_a_kernel_can_be_asked_for_by_name(name):
    kernel = select(name, CPU)
    assert kernel.name == name
    runs = {
        "reference": "einsums that hold the scores of a block",
        "sdpa": "torch's flash operators for cpu",
    }
    assert kernel.runs(CPU).startswith(runs[name])


@pytest.mark.parametrize(
    "name, spec, says",
    [
        ("flash", CPU, "flash-attn needs a CUDA device, got cpu"),
        ("flash", replace(CUDA, dtype=torch.float32), "torch.bfloat16 and torch.float16, got"),
        ("flash", replace(CUDA, head_dim=512), "head_dim must be a multiple of 8 up to 256"),
        ("flash", CUDA, 'not installed; type: pip install "flash-attn>=2.7"'),
        ("sdpa", replace(CUDA, dtype=torch.float64), "on cuda take torch.bfloat16, torch.float16"),
        ("sdpa", replace(CUDA, head_dim=12), "head_dim must be a multiple of 8 up to 256, got 12"),
        (
            "sdpa",
            replace(CUDA, value_dim=320),
            "head_dim must be a multiple of 8 up to 256, got 320",
        ),
        ("sdpa", replace(CPU, device="xpu"), "on cpu and cuda, not on xpu"),
        ("sdpa", replace(CPU, dtype=torch.int32), "got torch.int32"),
        ("sdpa", replace(CPU, softcap=True, alibi=True), "kernels have no softcap and no alibi"),
        ("flash", replace(CUDA, alibi=True), "functions as they are called here have no alibi"),
        ("reference", replace(CPU, dtype=torch.int64), "needs a float dtype, got torch.int64"),
    ],
)
def test_a_named_kernel_that_cannot_says_why(name, spec, says, flash_attn_version):
    flash_attn_version(None)
    with pytest.raises(ValueError) as raised:
        select(name, spec)
    assert f'kernel "{name}" cannot be used here: ' in str(raised.value)
    assert says in str(raised.value)


def test_a_flash_attn_that_is_too_old_is_named_with_what_to_type(flash_attn_version):
    flash_attn_version("2.6.3")
    with pytest.raises(ValueError, match=r"flash-attn 2\.6\.3 is too old.*type: pip install"):
        select("flash", CUDA)


def test_what_a_library_lacks_goes_to_the_next_kernel(flash_attn_version):
    flash_attn_version("2.8.3")
    assert select("auto", replace(CUDA, softcap=True)).name == "flash"
    for spec in (replace(CUDA, alibi=True), replace(CPU, softcap=True), replace(CPU, alibi=True)):
        assert select("auto", spec).name == "reference"
        told = KERNELS["sdpa"]().refuses(spec)
        assert told and told.startswith("torch's flash kernels have no ")


def test_auto_says_what_every_kernel_misses_when_none_can():
    with pytest.raises(ValueError, match="no kernel can run .*flash: .*sdpa: .*reference: "):
        select("auto", replace(CPU, dtype=torch.int64))


@pytest.mark.parametrize("typo, meant", [("spda", "sdpa"), ("Flash", "flash"), ("refrence", "ref")])
def test_an_unknown_kernel_lists_the_names_and_the_nearest(typo, meant):
    with pytest.raises(ValueError) as raised:
        select(typo, CPU)
    assert "['auto', 'flash', 'sdpa', 'reference']" in str(raised.value)
    assert f"did you mean '{meant}" in str(raised.value)
