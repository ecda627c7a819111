"""Which kernel is selected for a call, and the message if none can compute it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from wf_backends.cluster.topology import KERNEL_NAMES
from wf_backends.kernels import KernelSpec, select
from wf_backends.kernels import flash as flash_module
from wf_backends.kernels import sdpa as sdpa_module
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import Machine
from wf_backends.kernels.select import KERNELS

select_module = import_module(
    "wf_backends.kernels.select"
)  # the package's `select` is the function

CPU = KernelSpec("cpu", torch.float32, head_dim=64, heads=8, kv_heads=2)
CUDA = replace(CPU, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def flash_attn_version(monkeypatch):
    """A function that makes this version of flash-attn appear installed; None: no version."""

    def set_version(version: str | None) -> None:
        def metadata_version(name: str) -> str:
            if version is None:
                raise flash_module.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(flash_module.metadata, "version", metadata_version)
        monkeypatch.setattr(flash_module, "find_spec", lambda name: None)

    return set_version


def test_a_topology_can_name_every_kernel():
    assert set(KERNEL_NAMES) == set(KERNELS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_sdpa_on_a_cpu(dtype):
    assert select("auto", replace(CPU, dtype=dtype)).name == "sdpa"


def test_sdpa_refuses_grouped_key_heads_on_a_cpu_before_torch_2_9(monkeypatch):
    """The CPU kernel of these releases reads beyond its keys."""
    monkeypatch.setattr("wf_backends.kernels.sdpa.torch_release", lambda: (2, 8))
    refusal = SdpaKernel().refuses(replace(CPU, kv_heads=2))
    assert refusal and "grouped key heads from 2.9 on, this is 2.8" in refusal
    assert SdpaKernel().refuses(replace(CPU, kv_heads=8)) is None
    monkeypatch.setattr("wf_backends.kernels.sdpa.torch_release", lambda: (2, 9))
    assert SdpaKernel().refuses(replace(CPU, kv_heads=2)) is None


def test_auto_on_cuda_is_reference_in_float64_and_sdpa_in_float32():
    spec = replace(CUDA, dtype=torch.float64)
    assert select("auto", spec).name == "reference"
    assert all(KERNELS[name]().refuses(spec) for name in ("flash", "sdpa"))
    assert select("auto", replace(CUDA, dtype=torch.float32)).name == "sdpa"


def test_auto_on_rocm_is_reference_in_float32(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert select("auto", replace(CUDA, dtype=torch.float32)).name == "reference"
    assert select("auto", CUDA).name == "sdpa"


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


@pytest.mark.parametrize(
    "changes, has_flash_3, expected",
    [
        ({}, False, "sdpa"),
        ({}, True, "flash"),
        ({"softcap": True}, False, "flash"),
        ({"head_dim": 256}, False, "flash"),
        ({"dtype": torch.float32}, False, "sdpa"),
        ({"dtype": torch.float64}, False, "reference"),
    ],
    ids=["flash-attn 2", "flash-attn 3", "soft cap", "wide heads", "float32", "float64"],
)
def test_auto_is_sdpa_on_a_hopper_where_cudnn_is_faster_than_the_installed_flash_attn(
    changes, has_flash_3, expected, flash_attn_version, monkeypatch
):
    flash_attn_version("2.8.3")
    for module in (flash_module, select_module):
        monkeypatch.setattr(module, "has_flash_3", lambda: has_flash_3)
    hopper = Machine((2, 13), 91900, (9, 0), enabled=True, deterministic=False)
    monkeypatch.setattr(sdpa_module, "machine", lambda device: hopper)
    assert select("auto", replace(CUDA, **changes)).name == expected


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
        refusal = KERNELS[name]().refuses(spec)
        assert refusal == f"head_dim must be a multiple of 8 up to 256, got {head_dim}"


def test_auto_is_reference_on_a_gpu_that_is_too_old_for_flash(flash_attn_version, monkeypatch):
    flash_attn_version("2.8.3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    spec = replace(CUDA, dtype=torch.float16)
    assert select("auto", spec).name == "reference"
    for name in ("flash", "sdpa"):
        refusal = KERNELS[name]().refuses(spec)
        assert refusal and refusal.endswith("capability (8, 0) or later, this GPU has (7, 5)")


@pytest.mark.parametrize(
    "name, runs",
    [
        ("reference", "einsums that hold the scores of a block"),
        ("sdpa", "torch's flash operators for cpu"),
    ],
)
def test_a_kernel_can_be_selected_by_name(name, runs):
    kernel = select(name, CPU)
    assert kernel.name == name
    assert kernel.runs(CPU).startswith(runs)


@pytest.mark.parametrize(
    "name, spec, reason",
    [
        ("flash", CPU, "flash-attn needs a CUDA device, got cpu"),
        ("flash", replace(CUDA, dtype=torch.float32), "torch.bfloat16 and torch.float16, got"),
        ("flash", replace(CUDA, head_dim=512), "head_dim must be a multiple of 8 up to 256"),
        ("flash", CUDA, 'not installed; type: pip install "flash-attn>=2.7"'),
        ("sdpa", replace(CUDA, dtype=torch.float64), "on cuda take torch.float32, torch.bfloat16"),
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
def test_a_named_kernel_that_lacks_something_is_refused_with_the_reason(
    name, spec, reason, flash_attn_version
):
    flash_attn_version(None)
    with pytest.raises(ValueError) as raised:
        select(name, spec)
    assert f'kernel "{name}" cannot be used here: ' in str(raised.value)
    assert reason in str(raised.value)


def test_an_old_flash_attn_is_refused_with_the_command_that_updates_it(flash_attn_version):
    flash_attn_version("2.6.3")
    with pytest.raises(ValueError, match=r"flash-attn 2\.6\.3 is too old.*type: pip install"):
        select("flash", CUDA)


def test_auto_is_flash_for_a_softcap(flash_attn_version):
    flash_attn_version("2.8.3")
    assert select("auto", replace(CUDA, softcap=True)).name == "flash"


@pytest.mark.parametrize(
    "spec",
    [replace(CUDA, alibi=True), replace(CPU, softcap=True), replace(CPU, alibi=True)],
    ids=["alibi on cuda", "softcap on cpu", "alibi on cpu"],
)
def test_auto_is_reference_for_scores_that_the_libraries_lack(spec, flash_attn_version):
    flash_attn_version("2.8.3")
    assert select("auto", spec).name == "reference"
    refusal = KERNELS["sdpa"]().refuses(spec)
    assert refusal and refusal.startswith("torch's flash kernels have no ")


def test_the_dropout_of_a_library_is_not_used(flash_attn_version):
    """It would drop other weights than the reference, which is the same on every route."""
    flash_attn_version("2.8.3")
    spec = replace(CUDA, dropout=True)
    with pytest.raises(ValueError, match="flash-attn's functions .* have no dropout"):
        select("flash", spec)
    assert select("auto", spec).name == "reference"


def test_auto_names_what_each_kernel_lacks_if_none_can_run():
    with pytest.raises(ValueError, match="no kernel can run .*flash: .*sdpa: .*reference: "):
        select("auto", replace(CPU, dtype=torch.int64))


@pytest.mark.parametrize(
    "typo, nearest", [("spda", "sdpa"), ("Flash", "flash"), ("refrence", "ref")]
)
def test_an_unknown_kernel_is_refused_with_all_names_and_the_nearest(typo, nearest):
    with pytest.raises(ValueError) as raised:
        select(typo, CPU)
    assert "['auto', 'flash', 'sdpa', 'reference']" in str(raised.value)
    assert f"did you mean '{nearest}" in str(raised.value)
