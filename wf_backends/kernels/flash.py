"""flash-attn 2 and 3: the one place that knows their versions.

The libraries are imported when the first tile on a CUDA device needs them. flash-attn 4, which
changes its functions from week to week, is reached through torch and the sdpa kernel instead:
`torch.nn.attention.activate_flash_attention_impl("FA4")`.

The dropout of flash-attn 2 follows from (seed, offset + 32 head, row, key), where head, row and key
count from the first ones of the tile. So a tile of the whole sequence drops the same weights on any
number of ranks, and again in the backward, if seed and offset follow from global numbers.

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

from wf_backends.kernels.merge import Operators, SplitKernel
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
_MIN_FLASH_2 = (2, 7)
_SUPPORTED_OPTIONS = "softcap", "dropout"
_DROPOUT_REFUSAL = (
    "flash-attn 2's own dropout falls on the same weights for every number of ranks only where a "
    "rank computes the whole sequence for some heads (one rank, or ulysses_degree = all ranks), "
    'without a soft cap; kernel "reference" has dropout on every route'
)
PHILOX_OFFSET_PER_HEAD = 32  # that flash-attn 2 adds from one head to the next
_INSTALL = 'pip install "flash-attn>=2.7" --no-build-isolation'


def flash_attn_2(with_dropout: bool = False) -> Operators:
    """flash-attn 2.7 and later, whose functions also take arguments for dropout and ALiBi.

    Args:
        with_dropout: whether flash-attn's own dropout is used.
    """
    interface = import_module("flash_attn.flash_attn_interface")
    defaults = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band, **dropout: Any
    ) -> tuple[Tensor, Tensor]:
        kwargs = defaults | _tile_kwargs(q, k, scores, band) | dropout
        out, lse, *_ = interface._flash_attn_forward(q, k, v, return_softmax=False, **kwargs)
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band, **dropout: Any) -> Grads:
        kwargs = defaults | _tile_kwargs(tile.q, tile.k, scores, band) | dropout
        return _run_backward(interface._flash_attn_backward, tile, kwargs)

    if not with_dropout:
        return Operators("flash-attn 2", split_window, forward, backward)
    dropout_forward = partial(forward_with_dropout, forward)
    dropout_backward = partial(backward_with_dropout, backward)
    return Operators("flash-attn 2", split_window, dropout_forward, dropout_backward)


def flash_attn_3() -> Operators:
    """flash-attn 3; every release that registers these operators gives them the same arguments."""
    import_module("flash_attn_interface")  # registers the operators
    ops = torch.ops.flash_attn_3

    def forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = ops.fwd(q, k, v, num_splits=1, **_tile_kwargs(q, k, scores, band))
        return out, lse

    def backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
        return _run_backward(ops.bwd, tile, _tile_kwargs(tile.q, tile.k, scores, band))

    return Operators("flash-attn 3", split_window, forward, backward)


class FlashKernel(SplitKernel):
    """The Kernel protocol on the newest flash-attn that is installed and runs on this GPU.

    Calls with dropout use flash-attn 2, since flash-attn 3 has no dropout.
    """

    name = "flash"

    def __init__(self) -> None:
        self._loaded: dict[bool, Operators] = {}  # by whether they drop weights

    def refuses(self, spec: KernelSpec) -> str | None:
        """What flash-attn lacks, or how to install it; see Kernel.refuses."""
        if spec.device != "cuda":
            return f"flash-attn needs a CUDA device, got {spec.device}"
        if spec.dtype not in FLASH_DTYPES:
            return f"flash-attn takes torch.bfloat16 and torch.float16, got {spec.dtype}"
        library = "flash-attn's functions as they are called here"
        if refusal := lacks(spec, library, *_SUPPORTED_OPTIONS):
            return refusal
        if spec.dropout and (spec.softcap or not spec.whole_sequence):
            return _DROPOUT_REFUSAL
        if refusal := flash_refuses(spec):
            return refusal
        return None if has_flash_3() and not spec.dropout else missing_flash_2()

    def runs(self, spec: KernelSpec) -> str:
        """See Kernel.runs."""
        if spec.dropout:
            return "flash-attn 2 and its own dropout"
        return "flash-attn 3" if has_flash_3() else "flash-attn 2"

    def operators(self, q: Tensor, k: Tensor, scores: Scores, band: Band) -> Operators:
        """flash-attn 2 or 3, the same for every tile of a call; see SplitKernel.operators."""
        dropout = scores.dropout is not None
        if dropout not in self._loaded:
            use_flash_3 = has_flash_3() and not dropout
            self._loaded[dropout] = flash_attn_3() if use_flash_3 else flash_attn_2(dropout)
        return self._loaded[dropout]


def missing_flash_2() -> str | None:
    """Why flash-attn 2 cannot be used and what to type; None if it can."""
    try:
        version = metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return f"flash-attn is not installed; type: {_INSTALL}"
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < _MIN_FLASH_2:
        return f"flash-attn {version} is too old, 2.7 is the oldest known here; type: {_INSTALL}"
    return None


def has_flash_3() -> bool:
    """Whether flash-attn 3 is installed and this GPU is a Hopper, for which it was written."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _HOPPER:
        return False
    return find_spec("flash_attn_interface") is not None


def _tile_kwargs(q: Tensor, k: Tensor, scores: Scores, band: Band) -> dict[str, Any]:
    """The keyword arguments for a tile that both releases have."""
    left, right = flash_window(band, q.shape[1], k.shape[1])
    windows = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": scores.scale, "softcap": scores.softcap, **windows}


def _run_backward(backward: Callable[..., Any], tile: TileGrad, kwargs: dict[str, Any]) -> Grads:
    """dq, dk, dv, contiguous, filled by `backward`, which reads lse as a contiguous (b, h, i)."""
    dout, q, k, v, out, lse, _ = tile
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = dout, q, k, v, out, lse.contiguous(), dq, dk, dv
    backward(*tensors, deterministic=deterministic, **kwargs)
    return dq, dk, dv


def forward_with_dropout(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
) -> tuple[Tensor, Tensor]:
    """Run flash-attn 2's `forward` with dropout, sample by sample.

    The host waits for the device once per tile, since the host seeds the random generator.
    """
    p, rng_states = _rng_states(q, scores)
    outs, lses = list[Tensor](), list[Tensor]()
    for sample, (seed, offset) in enumerate(rng_states.tolist()):
        qkv = (x[sample : sample + 1] for x in (q, k, v))
        with _seeded_generator(seed, offset, q.device):
            out, lse = forward(*qkv, scores, band, dropout_p=p)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def backward_with_dropout(
    backward: Callable[..., Any], tile: TileGrad, scores: Scores, band: Band
) -> Grads:
    """Run flash-attn 2's `backward` with dropout, sample by sample."""
    p, rng_states = _rng_states(tile.q, scores)
    grads: list[Grads] = []
    for sample, rng_state in enumerate(rng_states):
        part = TileGrad(*(x[sample : sample + 1] for x in tile))
        grads.append(backward(part, scores, band, dropout_p=p, rng_state=rng_state))
    dq, dk, dv = map(torch.cat, zip(*grads, strict=True))
    return dq, dk, dv


def _rng_states(q: Tensor, scores: Scores) -> tuple[float, Tensor]:
    """The dropout probability, and (b, 2) int64: (seed, offset) for each sample of a tile."""
    dropout, rows, keys = scores.dropout, scores.rows, scores.keys
    assert dropout is not None and rows is not None and keys is not None
    seeds = dropout.seeds(q.shape[0], rows[0], keys[0])
    offsets = torch.full_like(seeds, PHILOX_OFFSET_PER_HEAD * dropout.heads[0])
    return dropout.p, torch.stack((seeds, offsets), dim=1)


@contextmanager
def _seeded_generator(seed: int, offset: int, device: torch.device) -> Iterator[None]:
    """Set the device's generator, which flash-attn 2 uses, for a `with` block; then restore it."""
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    generator.set_offset(offset)
    try:
        yield
    finally:
        generator.set_state(state)
