"""A rank's memory in training: ZeRO's states, activations, and the longest sequence that fits.

The references are the table of the ZeRO paper and formulas of bytes, written out in each test.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from wf_backends.budget import STAGES, Buckets, Decoder, Experts, MemoryOptions, Training

LLAMA = Decoder(
    layers=32,
    hidden=4096,
    intermediate=14336,
    vocabulary=128256,
    heads=32,
    kv_heads=8,
    head_dim=128,
    parameters=8_030_261_248,
)
SMALL_BUCKETS = Buckets(
    reduce_bucket_size=10, stage3_max_live_parameters=7, stage3_prefetch_bucket_size=3
)
CHECKPOINTS = ("none", "device", "host")


def training(ranks: int = 8, data_parallel_size: int = 1) -> Training:
    return Training(LLAMA, ranks, 65536.0, data_parallel_size=data_parallel_size)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_states_are_those_of_its_paper(stage: int, gigabytes: float) -> None:
    """arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks."""
    model = replace(LLAMA, parameters=7_500_000_000)
    job = Training(model, 8, 0.0, data_parallel_size=8, buckets=Buckets(1, 1, 1))
    assert job.states(stage).backward / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [  # parameters, gradients, optimizer, buffers, step
        (0, (2000, 2000, 12000, 0, 6000)),
        (1, (2000, 2000, 3000, 20, 2000)),
        (2, (2000, 500, 3000, 20, 2000)),
        (3, (500, 500, 3000, 20 + 2 * (7 + 3), 2000)),
    ],
)
def test_states_of_a_thousand_parameters_on_four_ranks(
    stage: int, expected: tuple[int, ...]
) -> None:
    model = replace(LLAMA, parameters=1000)
    job = Training(model, 2, 0.0, data_parallel_size=2, buckets=SMALL_BUCKETS)
    states = job.states(stage)
    assert astuple(states) == expected
    always = states.parameters + states.optimizer
    assert states.peak(0.0) == always + max(states.gradients + states.buffers, states.step)
    assert states.peak(1e6) == always + states.gradients + states.buffers + 1e6


def test_zero_3_gathers_all_experts_of_a_layer_at_once() -> None:
    model = replace(LLAMA, intermediate=0, experts=Experts(8, 2, 14336), parameters=46_700_000_000)
    buckets = Buckets()
    reduced_and_prefetched = buckets.reduce_bucket_size + buckets.stage3_prefetch_bucket_size
    weights_of_all_experts = 3 * 8 * 4096 * 14336
    expected = 2 * (reduced_and_prefetched + weights_of_all_experts)
    assert Training(model, 64, 0.0).states(3).buffers == expected


def test_float32_without_zero_has_no_master_weights() -> None:
    model = replace(LLAMA, parameters=1000, itemsize=4)
    states = Training(model, 4, 0.0).states(0)
    assert (states.parameters, states.gradients, states.optimizer) == (4000, 4000, 8000)


def test_checkpoints_are_the_inputs_of_all_layers() -> None:
    """Of 16,384 tokens on 8 ranks. The peak is at the loss, with either kind of checkpoints."""
    layers, tokens, hidden, itemsize = 32, 2048, 4096, 2
    inputs = layers * tokens * hidden * itemsize
    device, host = (training().activations(16384, MemoryOptions(w)) for w in ("device", "host"))
    assert (device.host, host.host) == (0, inputs)
    assert device.kept - host.kept == inputs
    assert device.peak - host.peak == inputs


def test_recomputed_layer_shares_its_input_with_the_device_checkpoints() -> None:
    """From the host the input of the layer is copied to the device."""
    tokens, hidden, itemsize = 2048, 4096, 2
    layer_input = tokens * hidden * itemsize
    device, host = (training().activations(16384, MemoryOptions(w)) for w in ("device", "host"))
    assert host.mlp - device.mlp == layer_input
    assert host.attention - device.attention == layer_input
    assert host.loss == device.loss


def test_tiles_reduce_the_mlp_and_the_loss_but_not_attention() -> None:
    untiled, tiled = (
        training().activations(1 << 20, MemoryOptions("device", tile)) for tile in (0, 512)
    )
    assert tiled.mlp < 2 / 3 * untiled.mlp
    assert tiled.loss < untiled.loss / 4
    assert tiled.attention == untiled.attention


def test_more_than_one_tile_sums_gradients_of_the_head_in_float32() -> None:
    """512 tokens are one tile, which needs no sum; one more token makes two tiles."""
    tile, hidden, vocabulary, itemsize, fp32 = 512, 4096, 128256, 2, 4
    one_tile, two_tiles = (
        training().activations(8 * tokens, MemoryOptions("device", tile)) for tokens in (512, 513)
    )
    sum_of_gradients = vocabulary * hidden * fp32
    norm_of_a_token = (fp32 + 2 * itemsize) * hidden + fp32
    gradient_of_a_token = itemsize * hidden
    expected = sum_of_gradients + norm_of_a_token + gradient_of_a_token
    assert two_tiles.loss - one_tile.loss == expected


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tile", [0, 4096])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_longest_sequence_fits_and_the_next_longer_does_not(
    stage: int, checkpoints: str, tile: int
) -> None:
    ranks, limit, options = 64, 200 * 2**30, MemoryOptions(checkpoints, tile)
    job = training(ranks)
    longest = job.longest(limit, stage, options)
    assert longest % ranks == 0 and longest > 0
    assert job.device_bytes(longest, stage, options) <= limit
    assert job.device_bytes(longest + ranks, stage, options) > limit


LIMIT = 80 * 2**30


def assert_increasing(lengths: list[int]) -> None:
    assert lengths == sorted(set(lengths))


def test_each_stage_of_zero_makes_sequences_longer() -> None:
    lengths = [training().longest(LIMIT, stage, MemoryOptions("device")) for stage in STAGES]
    assert lengths[0] == 0  # the states alone do not fit
    assert_increasing(lengths)


@pytest.mark.parametrize("tile", [0, 4096])
def test_checkpoints_make_sequences_longer_and_the_host_still_longer(tile: int) -> None:
    assert_increasing([training().longest(LIMIT, 3, MemoryOptions(c, tile)) for c in CHECKPOINTS])


def test_host_checkpoints_make_tiled_sequences_more_than_twice_as_long() -> None:
    none, host = (training().longest(LIMIT, 3, MemoryOptions(c, 4096)) for c in ("none", "host"))
    assert host > 2 * none


def test_data_parallel_ranks_make_sequences_longer() -> None:
    """ZeRO shares the states among them, too."""
    jobs = [training(data_parallel_size=size) for size in (1, 4)]
    assert_increasing([job.longest(LIMIT, 1, MemoryOptions("device")) for job in jobs])


def test_wrong_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="layers must be a positive integer, got 0"):
        replace(LLAMA, layers=0)
