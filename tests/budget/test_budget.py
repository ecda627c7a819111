"""A rank's memory in training: ZeRO's table, activations, and the longest sequence that fits."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from wf_backends.budget import STAGES, Buckets, Decoder, Experts, Options, Training

LLAMA = Decoder(32, 4096, 14336, 128256, 32, 8, 128, 8_030_261_248)
FEW = Buckets(reduce_bucket_size=10, stage3_max_live_parameters=7, stage3_prefetch_bucket_size=3)
EVERY = [
    Options(where, tile)  # type: ignore[arg-type]
    for where in ("none", "device", "host")
    for tile in (0, 4096)
]


def training(ranks: int = 8, data_parallel_size: int = 1) -> Training:
    return Training(LLAMA, ranks, 65536.0, data_parallel_size=data_parallel_size)


def test_zero_shares_what_its_paper_says() -> None:
    """arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks take 120, 31.4, 16.6, 1.9 GB."""
    model = replace(LLAMA, parameters=7_500_000_000)
    one = Training(model, 8, 0.0, data_parallel_size=8, buckets=Buckets(1, 1, 1))
    found = [one.states(stage).backward / 1e9 for stage in STAGES]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [  # parameters, gradients, optimizer, buffers, step
        (0, (2000, 2000, 12000, 0, 6000)),
        (1, (2000, 2000, 3000, 20, 2000)),
        (2, (2000, 500, 3000, 20, 2000)),
        (3, (500, 500, 3000, 20 + 2 * (7 + 3), 2000)),
    ],
)
def test_states_of_a_thousand_parameters_on_four_ranks(stage: int, wanted: tuple[int]) -> None:
    model = replace(LLAMA, parameters=1000)
    found = Training(model, 2, 0.0, data_parallel_size=2, buckets=FEW).states(stage)
    assert astuple(found) == wanted
    held = found.parameters + found.optimizer
    assert found.peak(0.0) == held + max(found.gradients + found.buffers, found.step)
    assert found.peak(1e6) == held + found.gradients + found.buffers + 1e6


def test_a_layers_experts_are_gathered_as_a_whole() -> None:
    model = replace(LLAMA, intermediate=0, experts=Experts(8, 2, 14336))
    found = Training(replace(model, parameters=46_700_000_000), 64, 0.0).states(3)
    buckets = Buckets()
    arriving = buckets.reduce_bucket_size + buckets.stage3_prefetch_bucket_size
    assert found.buffers == 2 * (arriving + 3 * 8 * 4096 * 14336)


def test_float32_needs_no_master_weights_without_zero() -> None:
    model = replace(LLAMA, parameters=1000, itemsize=4)
    found = Training(model, 4, 0.0).states(0)
    assert (found.parameters, found.gradients, found.optimizer) == (4000, 4000, 8000)


def test_checkpoints_are_the_inputs_of_layers() -> None:
    """32 layers x 2,048 tokens x 4,096 x 2 bytes."""
    inputs = 32 * 2048 * 4096 * 2
    device, host = (training().activations(16384, Options(w)) for w in ("device", "host"))
    assert (device.host, host.host) == (0, inputs)
    assert device.kept - host.kept == inputs
    assert device.peak - host.peak == inputs - (device.loss < host.mlp) * (host.mlp - device.loss)


def test_tiles_hold_no_more_than_one_tile() -> None:
    """Of MLP and logits; what attention needs stays."""
    whole, tiles = (training().activations(1 << 20, Options("device", t)) for t in (0, 512))
    assert tiles.mlp < 2 / 3 * whole.mlp and tiles.loss < whole.loss / 4
    assert tiles.attention == whole.attention


def test_several_tiles_sum_the_gradients_of_weights_in_float32() -> None:
    """Of the head 128,256 x 4,096 x 4 bytes; a single tile has no sum."""
    single, several = (training().activations(8 * t, Options("device", 512)) for t in (512, 513))
    hidden, head = 4096 * 2, 128256 * 4096 * 4
    rows = (4 + 2 * 2) * 4096 + 4 + hidden  # a token's norm, and its part of the gradient
    assert several.loss - single.loss == rows + head


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", EVERY, ids=str)
def test_the_longest_sequence_fits_and_the_next_does_not(stage: int, options: Options) -> None:
    one, limit = training(64), 200 * 2**30
    found = one.longest(limit, stage, options)
    assert found % 64 == 0 and found > 0
    assert one.device_bytes(found, stage, options) <= limit
    assert one.device_bytes(found + 64, stage, options) > limit


def test_every_measure_makes_sequences_longer() -> None:
    limit = 80 * 2**30
    by_stage = [training().longest(limit, s, Options("device")) for s in STAGES]
    assert by_stage == sorted(set(by_stage)) and by_stage[0] == 0
    for tile in (0, 4096):
        longest = [
            training().longest(limit, 3, Options(w, tile)) for w in ("none", "device", "host")
        ]
        assert longest == sorted(set(longest))
    assert training().longest(limit, 3, Options("host", 4096)) > 2 * longest[0]
    more = training(data_parallel_size=4).longest(limit, 1, Options("device"))
    assert more > by_stage[1]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(LLAMA, layers=0), "layers must be a positive integer, got 0"),
        (lambda: training(0), "sequence_parallel_size must be a positive integer, got 0"),
        (lambda: Options("disk"), "checkpoints must be one of .*, got 'disk'"),  # type: ignore[arg-type]
        (lambda: Options(tile=-1), "tile must be a number of tokens, 0 for all, got -1"),
        (lambda: training().states(4), r"stage must be one of \[0, 1, 2, 3\], got 4"),
    ],
)
def test_bad_numbers_are_refused_by_name(make, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
