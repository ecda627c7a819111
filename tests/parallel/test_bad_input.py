"""Arguments of sp.attention that are refused: the error names the argument and what is right."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import World

NAN, INF = float("nan"), float("inf")


def one_rank(**options):
    """SequenceParallel of a world of one rank."""
    return SequenceParallel(SequenceParallelConfig(**options), World(1).comm(0))


def tensors():
    """q, k and v: 8 tokens, 4 heads, 2 key heads, head_dim 8."""
    return [torch.randn(1, 8, heads, 8) for heads in (4, 2, 2)]


def assert_refused(message, *qkv, error=ValueError, **options):
    """`sp.attention` raises, for q, k and v that are good unless they are given."""
    with pytest.raises(error, match=message):
        one_rank().attention(*(qkv or tensors()), **options)


def test_sequence_parallel_size_must_divide_the_world():
    config = SequenceParallelConfig(sequence_parallel_size=3)
    with pytest.raises(ValueError, match="must divide the 4 ranks of the group, got 3"):
        run_threads(4, lambda comm: SequenceParallel(config, comm))
    with pytest.raises(ValueError, match="1 ranks of the group, got 3: start 3 ranks"):
        SequenceParallel(config)


def test_a_config_that_is_a_dict_is_refused():
    config: Any = {"sequence_parallel_size": 4}
    with pytest.raises(
        ValueError, match="got {'sequence_parallel_size': 4}: .*from_dict makes one"
    ):
        SequenceParallel(config)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda q, k, v: (q.double(), k, v), "one dtype, got torch.float64, torch.float32"),
        (lambda q, k, v: (q, k.to("meta"), v), "one device, got cpu, meta, cpu"),
        (lambda q, k, v: (q[0], k, v), r"must be \(batch, seqlen, heads, head_dim\)"),
        (
            lambda q, k, v: (q, k, v[:, :4]),
            r"k and v must have one batch size.*v \(1, 4, 2, 8\)",
        ),
        (lambda q, k, v: (q[..., :4], k, v), "head_dim"),
        (lambda q, k, v: (q[:, :, :3], k, v), "kv heads must divide heads, got 2 and 3"),
        (
            lambda q, k, v: (q.long(), k.long(), v.long()),
            "floating point dtype, got torch.int64",
        ),
        (lambda q, k, v: (q[:, :, :0], k, v), r"positive, got q \(1, 8, 0, 8\)"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), r"positive, .*k \(1, 8, 0, 8\)"),
        (
            lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]),
            r"positive, got q \(1, 8, 4, 0\)",
        ),
    ),
    ids=(
        "two dtypes",
        "two devices",
        "three dims",
        "k and v of two lengths",
        "two head dims",
        "heads no multiple of kv heads",
        "integers",
        "no heads",
        "no kv heads",
        "head_dim 0",
    ),
)
def test_tensors_that_do_not_fit_each_other_are_refused(change, message):
    assert_refused(message, *change(*tensors()))


def test_softmax_scale_with_a_gradient_is_refused():
    """Attention computes no gradient of the scale."""
    scale = torch.tensor(0.5, requires_grad=True)
    assert_refused("softmax_scale must be a number.*requires a gradient", softmax_scale=scale)
    one_rank().attention(*tensors(), softmax_scale=scale.detach())


@pytest.mark.parametrize(
    "scale", (NAN, INF, "0.5", True, [1], 1j, torch.ones(2), 0, -0.5, torch.zeros(1)), ids=repr
)
def test_softmax_scale_that_is_no_positive_number_is_refused(scale):
    """Under a causal mask torch's CPU kernel gives NaN for a scale of 0 or less."""
    assert_refused("softmax_scale must be a positive and finite number or", softmax_scale=scale)


@pytest.mark.parametrize("seqlen", ("8", 8.0, 0, -8, True))
def test_seqlen_that_is_no_positive_integer_is_refused(seqlen):
    assert_refused("seqlen must be a positive integer, got", seqlen=seqlen)


def test_seqlen_that_is_not_the_sum_of_the_rows_is_refused():
    assert_refused(r"seqlen must be the rows of q of all ranks, \[8\], together; got 9", seqlen=9)


@pytest.mark.parametrize("name", (5, ["layer"]))
def test_name_that_is_no_string_is_refused(name):
    assert_refused("name must be the name of a layer or None", name=name)


@pytest.mark.parametrize("p", (-0.1, 1.0, 1.5, NAN, "0.1", True, None))
def test_dropout_p_that_is_no_probability_is_refused(p):
    assert_refused(r"dropout_p must be a number in \[0, 1\)", dropout_p=p)


@pytest.mark.parametrize("p", (0.0, 0.1))
@pytest.mark.parametrize("seed", (-1, 1 << 63, 0.5, "7", True, torch.tensor(3)), ids=repr)
def test_dropout_seed_that_is_no_63_bit_integer_is_refused(seed, p):
    message = r"dropout_seed must be an integer in \[0, 2\*\*63\)"
    assert_refused(message, dropout_p=p, dropout_seed=seed)


@pytest.mark.parametrize("name", ("sinks", "alibi_slopes"))
@pytest.mark.parametrize(
    "value",
    (torch.zeros(3), torch.zeros(1, 4), torch.zeros(4).long(), 0.5, [0.0] * 4),
    ids=("3 heads", "2 dims", "integers", "number", "list"),
)
def test_sinks_and_slopes_that_are_not_one_float_per_head_are_refused(name, value):
    assert_refused(f"{name} must be floats, one for each of the 4 heads", **{name: value})


@pytest.mark.parametrize(
    "bias",
    (
        torch.zeros(4),
        torch.zeros(4, 6),
        torch.zeros(3, 5),
        torch.zeros(4, 5).long(),
        0.5,
    ),
    ids=("1 dim", "even number of distances", "3 heads", "integers", "number"),
)
def test_position_bias_of_another_shape_or_dtype_is_refused(bias):
    assert_refused(r"position_bias must be floats \(4 heads, 2 n - 1\)", position_bias=bias)


@pytest.mark.parametrize("value", (-INF, NAN))
def test_position_bias_that_is_not_finite_is_refused(value):
    """Rows that it hides from all keys of a tile would give NaN."""
    bias = torch.zeros(4, 5)
    bias[:, :2] = value
    assert_refused("position_bias must be finite", position_bias=bias)


@pytest.mark.parametrize(
    ("name", "shape"), (("sinks", (4,)), ("alibi_slopes", (4,)), ("position_bias", (4, 5)))
)
def test_options_on_another_device_than_q_are_refused(name, shape):
    value = torch.zeros(shape, device="meta")
    assert_refused(f"{name} must be on the device of q, cpu, got meta", **{name: value})


def test_alibi_slopes_with_a_gradient_are_refused():
    learned = torch.zeros(4, requires_grad=True)
    assert_refused("alibi_slopes have no gradient: pass", alibi_slopes=learned)


@pytest.mark.parametrize("cap", (-1.0, NAN, INF, "30", True, None))
def test_softcap_that_is_no_number_from_0_is_refused(cap):
    assert_refused("softcap must be a number from 0", softcap=cap)


@pytest.mark.parametrize(("name", "shape"), (("alibi_slopes", (4,)), ("position_bias", (4, 5))))
def test_distances_between_positions_are_refused_in_cross_attention(name, shape):
    q, k, v = tensors()
    message = "cross.*alibi_slopes and position_bias need"
    options = {name: torch.zeros(shape)}
    assert_refused(message, q, k[:, :4], v[:, :4], error=NotImplementedError, **options)


class Wrapped(torch.Tensor):
    """A subclass, as frameworks have them for distributed or managed tensors."""


def test_tensor_subclasses_are_refused():
    """Their gradients would be zero."""
    q, k, v = tensors()
    assert_refused("k must be a plain.*got a Wrapped", q, k.as_subclass(Wrapped), v)


@pytest.mark.parametrize(
    ("borders", "message"),
    (
        ([0, 3, 6], "end at the sequence length 8, got 6"),
        (torch.tensor([0, 8]), "host integers"),
        ([0, 3.5, 8], r"host integers, got \[0, 3.5, 8\]"),
    ),
    ids=("too short", "tensor", "fraction"),
)
def test_cu_seqlens_that_are_no_borders_are_refused(borders, message):
    assert_refused(message, cu_seqlens=borders)


@pytest.mark.parametrize("window", ({}, {"window_size": (2, 0)}), ids=("no window", "window"))
@pytest.mark.parametrize("causal", ("no", "False", 1, None, torch.tensor(True)), ids=repr)
def test_causal_that_is_no_bool_is_refused(causal, window):
    assert_refused("causal must be True or False, got", causal=causal, **window)


@pytest.mark.parametrize("window", ((-3, 0), (1, 2, 3), 3, None, (True, False)), ids=repr)
def test_window_size_that_is_no_pair_of_lengths_is_refused(window):
    assert_refused(r"window_size must be \(left, right\)", window_size=window)


def test_causal_cross_attention_is_refused():
    q, k, v = tensors()
    message = "cross attention.*8 queries, 4 keys"
    assert_refused(message, q, k[:, :4], v[:, :4], error=NotImplementedError, causal=True)


@pytest.mark.parametrize("call", ("attention", "shard_batch"))
def test_a_second_thread_in_the_same_sequence_parallel_is_refused(call):
    """The thread that came first finishes its call."""
    second_was_refused = Event()

    def call_and_record(sp, results):
        try:
            if call == "attention":
                results.append(sp.attention(*tensors()).shape)
            else:
                batch = {"input_ids": torch.ones(1, 8)}
                results.append(sp.shard_batch(batch)["input_ids"].shape)
        except RuntimeError as error:
            results.append(str(error))
            second_was_refused.set()

    def rank(comm):
        """Rank 0 calls from two threads; rank 1 joins, so that the first call can end."""
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        results = []
        count = 2 if comm.rank == 0 else 1
        calls = [Thread(target=call_and_record, args=(sp, results)) for _ in range(count)]
        assert comm.rank == 0 or second_was_refused.wait(10)
        for thread in calls:
            thread.start()
        for thread in calls:
            thread.join()
        return results

    (error, shape_on_rank_0), (shape_on_rank_1,) = run_threads(2, rank, timeout=20)
    assert "call from one thread" in error and "new_group" in error
    assert shape_on_rank_0 == shape_on_rank_1


def test_a_named_kernel_that_cannot_run_is_refused():
    sp = one_rank(kernel="flash")
    with pytest.raises(ValueError, match="flash"):
        sp.attention(*tensors())
