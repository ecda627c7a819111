"""Selects the kernel that computes the tiles of an attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from wf_backends._validation import AUTO, one_of
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.flash import FlashKernel, has_flash_3
from wf_backends.kernels.protocol import Kernel, KernelSpec
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel, full_tile_operators
from wf_backends.kernels.sdpa_cuda import CUDNN

KERNELS: Mapping[str, Callable[[], Kernel]] = MappingProxyType(
    {"flash": FlashKernel, "sdpa": SdpaKernel, "reference": ReferenceKernel}
)
"""The kernels by name. "auto" is the first of `fastest_first` that does not refuse."""


def select(name: str, spec: KernelSpec) -> Kernel:
    """The kernel called `name`, or the fastest that can run `spec` if name is "auto".

    Raises:
        ValueError: if there is no such kernel, or no kernel by this name can run `spec`.
    """
    one_of("kernel", name, (AUTO, *KERNELS))
    refusals: dict[str, str] = {}
    for candidate in fastest_first(spec) if name == AUTO else [name]:
        kernel, refusal = _with_alibi(KERNELS[candidate](), spec)
        if refusal is None:
            return kernel
        refusals[candidate] = refusal
    if name != AUTO:
        raise ValueError(f'kernel "{name}" cannot be used here: {refusals[name]}')
    reasons = "; ".join(f"{candidate}: {refusal}" for candidate, refusal in refusals.items())
    raise ValueError(f"no kernel can run {spec}; {reasons}")


def fastest_first(spec: KernelSpec) -> list[str]:
    """The names of the kernels, of which some may refuse `spec`.

    On a Hopper cuDNN, which sdpa uses there, takes 0.52 to 0.70 of the time of flash-attn 2, as
    torch has it, in long tiles (docs/internals/kernels.md). flash-attn 3 comes first.
    """
    prefers_sdpa = spec.device == "cuda" and full_tile_operators(spec)[0] is CUDNN
    if prefers_sdpa and not has_flash_3():
        return sorted(KERNELS, key=lambda name: name != "sdpa")
    return list(KERNELS)


def _with_alibi(kernel: Kernel, spec: KernelSpec) -> tuple[Kernel, str | None]:
    """The kernel, in an AlibiKernel if it lacks only ALiBi; and why it cannot run `spec`."""
    refusal = kernel.refuses(spec)
    if refusal is None or not spec.alibi:
        return kernel, refusal
    wrapped = AlibiKernel(kernel)
    return (wrapped, None) if wrapped.refuses(spec) is None else (kernel, refusal)
