"""flash-attn 2 and 3: the one place that knows their versions.

Nothing is imported before a CUDA device asks for it. flash-attn 4, which changes its functions
from week to week, is reached through torch and the sdpa kernel instead:
`torch.nn.attention.activate_flash_attention_impl("FA4")`.

flash-attn 2 drops by (seed, offset + 32 head, row, key), heads, rows and keys counted from the
tile's first ones. So a tile that is the whole sequence's drops the same weights on any number of
ranks, and again in the backward, if seed and offset follow from what is global.

Shapes: b batch, i query rows, j key rows, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.merge import Backward, Forward, Operators, SplitKernel
from wf_backends.kernels.protocol import (
    FLASH_DTYPES,
    Grads,
    KernelSpec,
    TileGrad,
    flash_refuses,
    lacks,
)
from wf_backends.kernels.scores import Scores
from wf_backends.kernels.tile_split import flash_window, split_window
from wf_backends.schedule import Band

_HOPPER = (9, 0)
_OLDEST = (2, 7)
_OPTIONS = "softcap", "dropout"
_DROPOUT = (
    "flash-attn 2's own dropout falls on the same weights for every number of ranks only where a "
    "rank computes the whole sequence for some heads (one rank, or ulysses_degree = all ranks), "
    'without a soft cap; kernel "reference" has dropout on every route'
)
NUMBERS_OF_A_HEAD = 32  # that flash-attn 2 draws dropout from
_INSTALL = 'pip install "flash-attn>=2.7" --no-build-isolation'


def flash_attn_2(drops: bool = False) -> Operators:
    """flash-attn 2.7 and later: functions that are told of dropout and ALiBi too.

    Args:
        drops: by flash-attn's own dropout.
    """
    interface = import_module("flash_attn.flash_attn_interface")
    without = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        options = without | _options(q, k, scores, band) | dropout
        out, lse, *_ = interface._flash_attn_forward(q, k, v, return_softmax=False, **options)
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band, **dropout: Any) -> Grads:
        options = without | _options(tile.q, tile.k, scores, band) | dropout
        return _filled(interface._flash_attn_backward, tile, options)

    both: tuple[Forward, Backward] = forward, backward
    if drops:
        both = partial(drop_forward, forward), partial(drop_backward, backward)
    return Operators("flash-attn 2", split_window, *both)


def flash_attn_3() -> Operators:
    """flash-attn 3, whose operators are the same in every release that registers them."""
    import_module("flash_attn_interface")  # registers the operators
    ops = torch.ops.flash_attn_3

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = ops.fwd(q, k, v, num_splits=1, **_options(q, k, scores, band))
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
        return _filled(ops.bwd, tile, _options(tile.q, tile.k, scores, band))

    return Operators("flash-attn 3", split_window, forward, backward)


class FlashKernel(SplitKernel):
    """The Kernel protocol on the newest flash-attn that is installed and runs on this GPU.

    Dropout is for flash-attn 2: 3 has none.
    """

    name = "flash"

    def __init__(self) -> None:
        self._loaded: dict[bool, Operators] = {}

    def refuses(self, spec: KernelSpec) -> str | None:
        """What flash-attn lacks, or what to type to have it; see Kernel.refuses."""
        if spec.device != "cuda":
            return f"flash-attn needs a CUDA device, got {spec.device}"
        if spec.dtype not in FLASH_DTYPES:
            return f"flash-attn takes torch.bfloat16 and torch.float16, got {spec.dtype}"
        if lacking := lacks(spec, "flash-attn's functions as they are called here", *_OPTIONS):
            return lacking
        if spec.dropout and not (spec.whole and not spec.softcap):
            return _DROPOUT
        newer = _has_flash_3() and not spec.dropout
        return flash_refuses(spec) or (None if newer else missing_flash_2())

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        if spec.dropout:
            return "flash-attn 2 and its own dropout"
        return "flash-attn 3" if _has_flash_3() else "flash-attn 2"

    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """The same for every tile."""
        drops = scores.dropout is not None
        if drops not in self._loaded:
            newer = _has_flash_3() and not drops
            self._loaded[drops] = flash_attn_3() if newer else flash_attn_2(drops)
        return self._loaded[drops]


def missing_flash_2() -> str | None:
    """What is wrong with the installed flash-attn 2 and what to type; None if nothing is."""
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return f"flash-attn is not installed; type: {_INSTALL}"
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _OLDEST:
        return f"flash-attn {version} is too old, 2.7 is the oldest known here; type: {_INSTALL}"
    return None


def _has_flash_3() -> bool:
    """Whether flash-attn 3 is installed and this is the GPU it was written for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    return find_spec("flash_attn_interface") is not None


def _options(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    """What both releases are told about a tile."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    windows = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": scores.scale, "softcap": scores.softcap, **windows}


def _filled(backward: Callable[..., Any], tile: TileGrad, options: dict[str, Any]) -> Grads:
    """dq, dk, dv: contiguous tensors that `backward` fills; lse is read as (b, h, i), packed."""
    dout, q, k, v, out, lse, _ = tile
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = dout, q, k, v, out, lse.contiguous(), dq, dk, dv
    backward(*given, deterministic=deterministic, **options)
    return dq, dk, dv


def drop_forward(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """flash-attn 2's `forward`, which takes `dropout_p` too, sample by sample.

    It waits for the device once a tile, since a generator is seeded by the host.
    """
    p, states = _states(q, scores)
    found: list[tuple[Tensor, Tensor]] = []
    for at, (seed, offset) in enumerate(states.tolist()):
        one = (x[at : at + 1] for x in (q, k, v))
        with _drawing_from(seed, offset, q.device):
            found.append(forward(*one, scores, band, dropout_p=p))
    out, lse = map(torch.cat, zip(*found, strict=True))
    return out, lse


def drop_backward(
    backward: Callable[..., Any], tile: TileGrad, scores: Scores, band: Band
) -> Grads:
    """flash-attn 2's `backward`, which takes `dropout_p` and `rng_state` too, likewise."""
    p, states = _states(tile.q, scores)
    found: list[Grads] = []
    for at, state in enumerate(states):
        one = TileGrad(*(x[at : at + 1] for x in tile))
        found.append(backward(one, scores, band, dropout_p=p, rng_state=state))
    dq, dk, dv = map(torch.cat, zip(*found, strict=True))
    return dq, dk, dv


def _states(q: Tensor, scores: Scores) -> tuple[float, Tensor]:
    """p, and (b, 2) int64: the seed and offset of each sample of a tile."""
    dropout, rows, keys = scores.dropout, scores.rows, scores.keys
    assert dropout is not None and rows is not None and keys is not None
    seeds = dropout.seeds(q.shape[0], rows[0], keys[0])
    offsets = torch.full_like(seeds, NUMBERS_OF_A_HEAD * dropout.heads[0])
    return dropout.p, torch.stack((seeds, offsets), dim=1)


@contextmanager
def _drawing_from(seed: int, offset: int, device: torch.device) -> Iterator[None]:
    """Let the device's generator, from which flash-attn 2 draws, begin here."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    generator.manual_seed(seed)
    generator.set_offset(offset)
    try:
        yield
    finally:
        generator.set_state(before)
