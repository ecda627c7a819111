"""Compare DSP with schemes that always shard the same dimension, for a pair of blocks.

    torchrun --nproc-per-node 4 benchmarks/dsp.py

A pair is a spatial and a temporal layer (attention and MLP) of a video transformer, forward +
backward, float32. A unit is the bytes of one rank's activation. Schemes on "every block" treat the
video as one long sequence; "cut stage only" keeps the cut along places, so that temporal attention
is local and only spatial attention meets over the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from layers import Attend, Layer, cut_for_megatron, megatron_moves, torch_attention
from measure import Counting, Measured, Scheme, Step, compare, counting_job, machine
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, chunk_sizes
from wf_backends.runtime.ulysses import heads_for_tokens, make_head_exchange, tokens_for_heads
from wf_backends.schedule.layout import contiguous

TIME, SPACE = 1, 2


@dataclass(frozen=True, slots=True)
class Video:
    """Sizes of the hidden state (1, frames, places, dim), and the layers of a pair."""

    frames: int
    places: int
    dim: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.frames * self.places

    def draw(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, self.frames, self.places, self.dim, generator=generator)

    def layers(self) -> list[Layer]:
        """(spatial, temporal)."""
        return [Layer(self.dim, self.heads, seed) for seed in (0, 1)]


def main() -> None:
    """Measure all schemes, and print them beside what is derived."""
    args = parse()
    video = Video(args.frames, args.places, args.dim, args.heads)
    with counting_job() as comm:
        schemes = make_schemes(video, comm)
        results = compare(comm, schemes, args.repeats)
        if comm.rank == 0:
            print(machine(comm))
            show(video, comm.size, schemes, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--places", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_schemes(video: Video, comm: Counting) -> list[Scheme]:
    """The same pair of layers and the same video in every scheme."""
    others, part = comm.size - 1, (comm.size - 1) / comm.size
    words = {"sequence_parallel_size": comm.size, "layout": "contiguous", "kernel": "sdpa"}
    config = SequenceParallelConfig.from_dict({**words, "route": "ring"})
    ring = SequenceParallel(config, comm)
    config = SequenceParallelConfig.from_dict({**words, "ulysses_degree": comm.size})
    ulysses = SequenceParallel(config, comm)
    return [
        Scheme("DSP, cut kept", kept(video, comm), 4 * part),
        Scheme("DSP, two around one", published(video, comm), 4 * part),
        Scheme("Ulysses, every block", ulysses_everywhere(video, comm), 16 * part),
        Scheme("Ulysses, cut stage only", embedded(video, ulysses), 8 * part),
        Scheme("ring, cut stage only", embedded(video, ring), 6 * others),
        Scheme("Megatron-SP", megatron(video, comm), 16 * others),
    ]


def mix_along(dim: int, x: Tensor, layer: Layer, attend: Attend = torch_attention) -> Tensor:
    """A layer whose attention mixes one dimension of x (1, T, S, D)."""
    sequences = (x.transpose(1, 2) if dim == TIME else x).squeeze(0)
    out = layer(sequences, attend).unsqueeze(0)
    return out.transpose(1, 2) if dim == TIME else out


def make_step(x: Tensor, pair: Callable[[Tensor], Tensor]) -> Step:
    """A step: forward and backward of a loss in which all tokens have the same weight."""
    leaf = x.detach().clone().requires_grad_()

    def step() -> float:
        loss = pair(leaf).square().sum()
        loss.backward()
        leaf.grad = None
        return loss.item()

    return step


def kept(video: Video, comm: Counting) -> Step:
    """Starts sharded along places, as the previous pair ends: one switch before each attention."""
    dsp, layers = DynamicSequenceParallel(comm), video.layers()
    cut = dsp.split(video.draw(), SPACE)

    def pair(x: Tensor) -> Tensor:
        held = dsp.switch(Sharded(x, SPACE, cut.sizes), SPACE, TIME)
        x = mix_along(SPACE, held.tensor, layers[0])
        held = dsp.switch(Sharded(x, TIME, held.sizes), TIME, SPACE)
        return mix_along(TIME, held.tensor, layers[1])

    return make_step(cut.tensor, pair)


def published(video: Video, comm: Counting) -> Step:
    """Sharded along frames; a switch before and a switch after temporal attention."""
    dsp, layers = DynamicSequenceParallel(comm), video.layers()
    cut = dsp.split(video.draw(), TIME)

    def pair(x: Tensor) -> Tensor:
        x = mix_along(SPACE, x, layers[0])
        held = dsp.switch(Sharded(x, TIME, cut.sizes), TIME, SPACE)
        x = mix_along(TIME, held.tensor, layers[1])
        return dsp.switch(Sharded(x, SPACE, held.sizes), SPACE, TIME).tensor

    return make_step(cut.tensor, pair)


def embedded(video: Video, sp: SequenceParallel) -> Step:
    """Always sharded along places; spatial attention over the ranks of `sp`."""
    layers = video.layers()

    def pair(x: Tensor) -> Tensor:
        return mix_along(TIME, mix_along(SPACE, x, layers[0], sp.attention), layers[1])

    return make_step(sp.shard(video.draw(), SPACE), pair)


def ulysses_everywhere(video: Video, comm: Counting) -> Step:
    """The video as one sequence: heads for tokens around every attention."""
    exchange = make_head_exchange(contiguous(comm.size, video.tokens), video.heads, video.heads)
    sizes, layers = chunk_sizes(video.tokens, comm.size), video.layers()

    def attend(dim: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = heads_for_tokens(torch.cat((q, k, v), -1), exchange, comm, "ulysses")
        return tokens_for_heads(whole(video, dim, *qkv.chunk(3, -1)), exchange, comm, "ulysses")

    def pair(x: Tensor) -> Tensor:
        x = layers[0](x, partial(attend, SPACE))
        return layers[1](x, partial(attend, TIME))

    return make_step(video.draw().flatten(1, 2).split(sizes, 1)[comm.rank], pair)


def megatron(video: Video, comm: Counting) -> Step:
    """All tokens and some heads on every rank, around attention and MLP of every block."""
    sizes = chunk_sizes(video.tokens, comm.size)
    layers = [cut_for_megatron(layer, comm.rank, comm.size) for layer in video.layers()]
    moves = megatron_moves(comm, sizes)

    def pair(x: Tensor) -> Tensor:
        x = layers[0](x, partial(whole, video, SPACE), *moves)
        return layers[1](x, partial(whole, video, TIME), *moves)

    return make_step(video.draw().flatten(1, 2).split(sizes, 1)[comm.rank], pair)


def whole(video: Video, dim: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention along one dimension of all tokens (1, T S, h, d)."""
    q, k, v = (x.unflatten(1, (video.frames, -1)).squeeze(0) for x in (q, k, v))
    if dim == SPACE:
        return torch_attention(q, k, v).flatten(0, 1).unsqueeze(0)
    out = torch_attention(*(x.transpose(0, 1) for x in (q, k, v)))
    return out.transpose(0, 1).flatten(0, 1).unsqueeze(0)


def show(video: Video, size: int, schemes: list[Scheme], results: list[Measured]) -> None:
    unit = video.tokens * video.dim * 4 / size
    print(
        f"{video.frames} frames x {video.places} places, width {video.dim}, {video.heads} heads, "
        f"P = {size}; a unit is {unit / 1e6:.3f} MB"
    )
    print(f"{'scheme':26}{'posts':>9}{'units':>8}{'derived':>9}{'ms':>9}{'pairs/s':>9}", end="")
    print(f"{'x time':>8}{'x bytes':>9}{'memory MB':>11}")
    first = results[0]
    for scheme, got in zip(schemes, results, strict=True):
        print(
            f"{scheme.name:26}{got.collectives:9}{got.bytes_sent / unit:8.2f}{scheme.units:9.2f}"
            f"{1e3 * got.seconds:9.1f}{1 / got.seconds:9.2f}{got.seconds / first.seconds:8.2f}"
            f"{got.bytes_sent / max(1, first.bytes_sent):9.2f}{got.peak_bytes / 1e6:11.1f}"
        )


if __name__ == "__main__":
    main()
