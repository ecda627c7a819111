"""Which of torch's CUDA operators computes a tile, and why: cuDNN's or flash-attn's.

The order and what each needs are data; `machine` is the one place that asks torch and the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from wf_backends.kernels.protocol import torch_release
from wf_backends.kernels.sdpa_cuda import cuda_backward, cuda_forward
from wf_backends.kernels.sdpa_cudnn import cudnn_backward, cudnn_forward
from wf_backends.kernels.split_run import Operators
from wf_backends.kernels.tile_split import cut_window, effective, whole
from wf_backends.schedule import CAUSAL, FULL, Band

CUDNN = Operators("cudnn", whole, cudnn_forward, cudnn_backward)
FLASH = Operators("flash", cut_window, cuda_forward, cuda_backward)


@dataclass(frozen=True, slots=True)
class Machine:
    """What torch and one of its GPUs say about themselves."""

    torch: tuple[int, int]
    """Release, (2, 13) for 2.13.0."""
    cudnn: int
    """Version of the loaded library, 91501 for 9.15.1; 0 if torch has none."""
    capability: tuple[int, int]
    """Compute capability of the GPU, (9, 0) for a Hopper; (0, 0) if there is none."""
    enabled: bool
    """torch.backends.cuda.cudnn_sdp_enabled()."""
    deterministic: bool
    """Whether torch refuses operators that are not deterministic."""


@dataclass(frozen=True, slots=True)
class Question:
    """A tile on a machine: all that the choice looks at."""

    machine: Machine
    dtype: torch.dtype
    head_dim: int
    rows: int
    keys: int
    band: Band


@dataclass(frozen=True, slots=True)
class Need:
    """What operators ask of a tile: in words, as a test, and the fields that it looks at."""

    words: str
    holds: Callable[[Question], bool]
    fields: tuple[str, ...]

    def got(self, question: Question) -> str:
        """The fields and their values, for the user."""
        return ", ".join(f"{f.split('.')[-1]} {attrgetter(f)(question)}" for f in self.fields)


CUDNN_MULTIPLE = 128
"""Rows and keys of a tile for cuDNN come in multiples of this: see docs/kernels.md."""

CUDNN_NEEDS = (
    Need("torch 2.13 or later", lambda q: q.machine.torch >= (2, 13), ("machine.torch",)),
    Need("cuDNN 9.15.1 or later", lambda q: q.machine.cudnn >= 91501, ("machine.cudnn",)),
    Need(
        "compute capability (9, 0), (10, 0) or (10, 3)",
        lambda q: q.machine.capability in ((9, 0), (10, 0), (10, 3)),
        ("machine.capability",),
    ),
    Need("enable_cudnn_sdp(True)", lambda q: q.machine.enabled, ("machine.enabled",)),
    Need(
        "use_deterministic_algorithms(False)",
        lambda q: not q.machine.deterministic,
        ("machine.deterministic",),
    ),
    Need(
        "torch.bfloat16 or torch.float16",
        lambda q: q.dtype in (torch.bfloat16, torch.float16),
        ("dtype",),
    ),
    Need(
        "a head_dim that is a multiple of 8 up to 128",
        lambda q: q.head_dim % 8 == 0 and q.head_dim <= 128,
        ("head_dim",),
    ),
    Need(
        "a full or square causal tile",
        lambda q: _is_full(q) or _is_square_causal(q),
        ("rows", "keys", "band"),
    ),
    Need(
        f"rows and keys in multiples of {CUDNN_MULTIPLE}",
        lambda q: q.rows % CUDNN_MULTIPLE == 0 == q.keys % CUDNN_MULTIPLE,
        ("rows", "keys"),
    ),
)

ORDER: tuple[tuple[Operators, tuple[Need, ...]], ...] = ((CUDNN, CUDNN_NEEDS), (FLASH, ()))
"""Fastest first; the last takes every tile that the sdpa kernel takes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The operators for a tile, and why these."""

    operators: Operators
    reason: str


@lru_cache(maxsize=1024)  # asked for every tile
def choose(question: Question) -> Choice:
    """The first operators in ORDER that lack nothing."""
    lacking: list[str] = []
    for operators, needs in ORDER:
        need = next((n for n in needs if not n.holds(question)), None)
        if need is None:
            return Choice(operators, "; ".join((operators.name, *lacking)))
        lacking.append(f"not {operators.name}, which needs {need.words}, got {need.got(question)}")
    raise AssertionError(f"no operators take {question}")


def machine(device: torch.device | None = None) -> Machine:
    """What torch says about itself and about `device` (None: the current GPU)."""
    has_cudnn = torch.version.hip is None  # there the same question is answered by MIOpen
    has_gpu = torch.cuda.is_available()
    return Machine(
        torch=torch_release(),
        cudnn=(torch.backends.cudnn.version() or 0) if has_cudnn else 0,
        capability=torch.cuda.get_device_capability(device) if has_gpu else (0, 0),
        enabled=torch.backends.cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def question(machine: Machine, q: Tensor, k: Tensor, band: Band) -> Question:
    """The tile of q (b, i, h, d) and k (b, j, g, d) under `band`, on `machine`."""
    return Question(machine, q.dtype, q.shape[3], q.shape[1], k.shape[1], band)


def _is_full(q: Question) -> bool:
    return effective(q.rows, q.keys, q.band) == FULL


def _is_square_causal(q: Question) -> bool:
    return q.rows == q.keys and effective(q.rows, q.keys, q.band) == CAUSAL
