"""Compare DSP with schemes that always shard the same dimension, for a pair of blocks.

    torchrun --nproc-per-node 4 benchmarks/dsp.py

A pair is a spatial and a temporal layer (attention and MLP) of a video transformer, forward +
backward, float32. A place is a patch of a frame. A unit is the bytes of one rank's activation.
Schemes on "every block" treat the video as one long sequence. "cut stage only": the video is always
sharded along places, so temporal attention is local, and spatial attention runs over the ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import measure
import torch
from layers import Attend, Layer, cut_for_megatron, megatron_moves, torch_attention
from measure import Counting, Measured, Scheme, Step
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, chunk_sizes
from wf_backends.parallel import ChannelExchange

TIME, SPACE = 1, 2  # dimensions of the hidden state
COLUMNS = {"scheme": "26", "posts": "9.0f", "units": "8.2f", "derived": "9.2f", "ms": "9.1f"}
COLUMNS |= {"pairs/s": "9.2f", "x time": "8.2f", "x bytes": "9.2f", "memory MB": "11.1f"}


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
        """The hidden state of the whole video, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, self.frames, self.places, self.dim, generator=generator)

    def layers(self) -> list[Layer]:
        """(spatial, temporal)."""
        return [Layer(self.dim, self.heads, seed) for seed in (0, 1)]


def main() -> None:
    """Measure all schemes, and print them beside what is derived."""
    args = parse()
    video = Video(args.frames, args.places, args.dim, args.heads)
    with measure.counting_job() as comm:
        schemes = make_schemes(video, comm)
        results = measure.compare(comm, schemes, args.repeats)
        if comm.rank == 0:
            print(measure.machine(comm))
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
    peers = comm.size - 1
    exchanged = peers / comm.size  # units of an all-to-all of one activation
    options = {"sequence_parallel_size": comm.size, "layout": "contiguous", "kernel": "sdpa"}
    config = SequenceParallelConfig.from_dict({**options, "route": "ring"})
    ring = SequenceParallel(config, comm)
    config = SequenceParallelConfig.from_dict({**options, "ulysses_degree": comm.size})
    ulysses = SequenceParallel(config, comm)
    return [
        Scheme("DSP, cut kept", switch_before_each(video, comm), 4 * exchanged),
        Scheme("DSP, two around one", switch_around_temporal(video, comm), 4 * exchanged),
        Scheme("Ulysses, every block", ulysses_everywhere(video, comm), 16 * exchanged),
        Scheme("Ulysses, cut stage only", spatial_over_ranks(video, ulysses), 8 * exchanged),
        Scheme("ring, cut stage only", spatial_over_ranks(video, ring), 6 * peers),
        Scheme("Megatron-SP", megatron(video, comm), 16 * peers),
    ]


def mix_along(dim: int, x: Tensor, layer: Layer, attend: Attend = torch_attention) -> Tensor:
    """A layer whose attention mixes one dimension of x (1, T, S, D)."""
    sequences = (x.transpose(1, 2) if dim == TIME else x).squeeze(0)
    out = layer(sequences, attend).unsqueeze(0)
    return out.transpose(1, 2) if dim == TIME else out


def switch_before_each(video: Video, comm: Counting) -> Step:
    """Starts sharded along places, as the previous pair ends: one switch before each attention."""
    dsp, (spatial, temporal) = DynamicSequenceParallel(comm), video.layers()
    first = dsp.split(video.draw(), SPACE)

    def pair(x: Tensor) -> Tensor:
        sharded = dsp.switch(Sharded(x, SPACE, first.sizes), SPACE, TIME)
        x = mix_along(SPACE, sharded.tensor, spatial)
        sharded = dsp.switch(Sharded(x, TIME, sharded.sizes), TIME, SPACE)
        return mix_along(TIME, sharded.tensor, temporal)

    return measure.loss_step(first.tensor, pair)


def switch_around_temporal(video: Video, comm: Counting) -> Step:
    """Starts sharded along frames: a switch before and a switch after temporal attention."""
    dsp, (spatial, temporal) = DynamicSequenceParallel(comm), video.layers()
    first = dsp.split(video.draw(), TIME)

    def pair(x: Tensor) -> Tensor:
        x = mix_along(SPACE, x, spatial)
        sharded = dsp.switch(Sharded(x, TIME, first.sizes), TIME, SPACE)
        x = mix_along(TIME, sharded.tensor, temporal)
        return dsp.switch(Sharded(x, SPACE, sharded.sizes), SPACE, TIME).tensor

    return measure.loss_step(first.tensor, pair)


def spatial_over_ranks(video: Video, sp: SequenceParallel) -> Step:
    """Always sharded along places: spatial attention runs over the ranks of `sp`."""
    spatial, temporal = video.layers()

    def pair(x: Tensor) -> Tensor:
        return mix_along(TIME, mix_along(SPACE, x, spatial, sp.attention), temporal)

    return measure.loss_step(sp.shard(video.draw(), SPACE), pair)


def ulysses_everywhere(video: Video, comm: Counting) -> Step:
    """The video as one sequence: heads for tokens around every attention."""
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, layout="contiguous")
    exchange, share = ChannelExchange(SequenceParallel(config, comm)), video.heads // comm.size
    sizes = chunk_sizes(video.tokens, comm.size)
    spatial, temporal = video.layers()

    def attend(dim: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = torch.cat((q, k, v), -1).unflatten(2, (comm.size, share)).flatten(3)
        qkv = exchange.gather(qkv).unflatten(2, (share, -1))
        out = attend_along(video, dim, *qkv.chunk(3, -1)).flatten(2)
        return exchange.bring_back(out).flatten(2).unflatten(2, (video.heads, -1))

    def pair(x: Tensor) -> Tensor:
        x = spatial(x, partial(attend, SPACE))
        return temporal(x, partial(attend, TIME))

    return measure.loss_step(video.draw().flatten(1, 2).split(sizes, 1)[comm.rank], pair)


def megatron(video: Video, comm: Counting) -> Step:
    """All tokens and some heads on every rank, around attention and MLP of every block."""
    sizes = chunk_sizes(video.tokens, comm.size)
    spatial, temporal = (cut_for_megatron(x, comm.rank, comm.size) for x in video.layers())
    moves = megatron_moves(comm, sizes)

    def pair(x: Tensor) -> Tensor:
        x = spatial(x, partial(attend_along, video, SPACE), *moves)
        return temporal(x, partial(attend_along, video, TIME), *moves)

    return measure.loss_step(video.draw().flatten(1, 2).split(sizes, 1)[comm.rank], pair)


def attend_along(video: Video, dim: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention along one dimension; q, k, v and the result are (1, T S, h, d), of all tokens."""
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
    first = results[0]
    rows: list[list[Any]] = []
    for scheme, result in zip(schemes, results, strict=True):
        row = [scheme.name, result.collectives, result.bytes_sent / unit, scheme.units]
        row += [1e3 * result.seconds, 1 / result.seconds, result.seconds / first.seconds]
        row += [result.bytes_sent / max(1, first.bytes_sent), result.peak_bytes / 1e6]
        rows.append(row)
    measure.print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
