"""flash-attn 2's own dropout, where it falls on the same weights for every number of ranks.

flash-attn 2 draws by (seed, offset + 32 head, row, key), heads, rows and keys counted from the
tile's first ones. So a tile that is the whole sequence's drops the same weights on any number of
ranks, and again in the backward, if seed and offset follow from what is global.

Shapes: b batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wf_backends.kernels.merge import Backward, Forward
from wf_backends.kernels.protocol import Grads, TileGrad
from wf_backends.kernels.scores import Scores
from wf_backends.schedule import Band

NUMBERS_OF_A_HEAD = 32


def by_sample(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Forward, Backward]:
    """flash-attn 2's functions, which take `dropout_p` and `rng_state` too, sample by sample.

    The forward waits for the device once a tile, since a generator is seeded by the host.
    """

    def drop_forward(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band
    ) -> tuple[Tensor, Tensor]:
        p, states = _states(q, scores)
        found: list[tuple[Tensor, Tensor]] = []
        for at, (seed, offset) in enumerate(states.tolist()):
            one = (x[at : at + 1] for x in (q, k, v))
            with _drawing_from(seed, offset, q.device):
                found.append(forward(*one, scores, band, dropout_p=p))
        out, lse = map(torch.cat, zip(*found, strict=True))
        return out, lse

    def drop_backward(tile: TileGrad, scores: Scores, band: Band) -> Grads:
        p, states = _states(tile.q, scores)
        found: list[Grads] = []
        for at, state in enumerate(states):
            one = TileGrad(*(x[at : at + 1] for x in tile))
            found.append(backward(one, scores, band, dropout_p=p, rng_state=state))
        dq, dk, dv = map(torch.cat, zip(*found, strict=True))
        return dq, dk, dv

    return drop_forward, drop_backward


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
