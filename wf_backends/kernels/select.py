"""Which kernel computes the tiles, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from wf_backends._validation import AUTO, one_of
from wf_backends.kernels.alibi import AlibiKernel
from wf_backends.kernels.flash import FlashKernel
from wf_backends.kernels.protocol import Kernel, KernelSpec
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel

KERNELS: Mapping[str, Callable[[], Kernel]] = MappingProxyType(
    {"flash": FlashKernel, "sdpa": SdpaKernel, "reference": ReferenceKernel}
)
"""Every kernel by name, fastest first: "auto" is the first that does not refuse. It never takes
a library's own dropout (`KernelSpec.whole`), so that dropout is the same on every route."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel to use, and one sentence for the user on why it is this one."""

    kernel: Kernel
    reason: str


def select(name: str, spec: KernelSpec) -> Selection:
    """The kernel called `name`, or the fastest that can run `spec` if name is "auto".

    Raises:
        ValueError: if there is no such kernel, or if the one named cannot run `spec`.
    """
    if name == AUTO:
        return _fastest(spec)
    one_of("kernel", name, (AUTO, *KERNELS))
    kernel, refusal = _asked(KERNELS[name](), spec)
    if refusal is not None:
        raise ValueError(f'kernel "{name}" cannot be used here: {refusal}')
    return Selection(kernel, f"{name} was asked for by name; it runs {kernel.runs(spec)}")


def _fastest(spec: KernelSpec) -> Selection:
    refusals: list[str] = []
    spec = replace(spec, whole=False)
    for make in KERNELS.values():
        kernel, refusal = _asked(make(), spec)
        if refusal is None:
            why = _reason(kernel.name, spec, refusals)
            return Selection(kernel, f"{why}; it runs {kernel.runs(spec)}")
        refusals.append(f"{kernel.name}: {refusal}")
    raise ValueError(f"no kernel can run {spec}; " + "; ".join(refusals))


def _asked(kernel: Kernel, spec: KernelSpec) -> tuple[Kernel, str | None]:
    """The kernel and why it cannot run `spec`; one that lacks ALiBi alone gets it as dimensions."""
    refusal = kernel.refuses(spec)
    if refusal is None or not spec.alibi:
        return kernel, refusal
    more = AlibiKernel(kernel)
    return (more, None) if more.refuses(spec) is None else (kernel, refusal)


def _reason(name: str, spec: KernelSpec, refusals: list[str]) -> str:
    chosen = f"{name} is the fastest kernel that takes {spec.dtype} on {spec.device}"
    return f"{chosen} (not {'; not '.join(refusals)})" if refusals else chosen
