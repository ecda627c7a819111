"""Which kernel computes the tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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


def select(name: str, spec: KernelSpec) -> Kernel:
    """The kernel called `name`, or the fastest that can run `spec` if name is "auto".

    Raises:
        ValueError: if there is no such kernel, or if the one named cannot run `spec`.
    """
    one_of("kernel", name, (AUTO, *KERNELS))
    if name != AUTO:
        kernel, refusal = _asked(KERNELS[name](), spec)
        if refusal is not None:
            raise ValueError(f'kernel "{name}" cannot be used here: {refusal}')
        return kernel
    refusals: list[str] = []
    spec = replace(spec, whole=False)
    for make in KERNELS.values():
        kernel, refusal = _asked(make(), spec)
        if refusal is None:
            return kernel
        refusals.append(f"{kernel.name}: {refusal}")
    raise ValueError(f"no kernel can run {spec}; " + "; ".join(refusals))


def _asked(kernel: Kernel, spec: KernelSpec) -> tuple[Kernel, str | None]:
    """The kernel and why it cannot run `spec`; one that lacks ALiBi alone gets it as dimensions."""
    refusal = kernel.refuses(spec)
    if refusal is None or not spec.alibi:
        return kernel, refusal
    more = AlibiKernel(kernel)
    return (more, None) if more.refuses(spec) is None else (kernel, refusal)
