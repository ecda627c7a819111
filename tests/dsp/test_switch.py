"""DSP's split, switch and gather: exact in float64 forward and backward, bytes as derived, and
refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import largest
from tests.dsp.switch_cases import derived_bytes, errors_and_bytes, mix, whole_tensor
from tests.helpers import run_threads
from wf_backends.comm import World
from wf_backends.dsp import switch as dsp_switch
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded
from wf_backends.runtime import dimension

SIZES = (1, 2, 3, 4, 6, 8)


def check_path(num_ranks, shape, path):
    """Check that stages along a path are exact on all ranks, and send the derived bytes."""
    for rank, (errors, sent) in enumerate(run_threads(num_ranks, errors_and_bytes, shape, path)):
        assert largest(errors) < 1e-10
        assert sent == derived_bytes(shape, path, num_ranks, rank)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((2, 9, 11, 3), (1, 2)),  # no multiple of the ranks
        ((2, 8, 24, 3), (2, 1)),
        ((9, 7, 10), (0, 2, 1)),  # three sequence dimensions
        ((5, 3, 2, 4, 2), (3, 1, 4, 0)),
        ((2, 1, 5, 3), (1, 2)),  # most ranks hold nothing
    ],
)
def test_stages_along_a_path_are_exact_and_send_the_derived_bytes(num_ranks, shape, path):
    check_path(num_ranks, shape, path)


@settings(max_examples=25)
@given(st.data())
def test_drawn_stages_are_exact_and_send_the_derived_bytes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    path = tuple(data.draw(st.permutations(range(len(shape)))))
    check_path(data.draw(st.sampled_from((2, 3, 4, 6))), shape, path)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_split_and_gather_have_the_gradients_of_one_device(num_ranks):
    """The gradient of sum(x * w) is w, split or gathered: of gather, on shards of x."""

    def gradients_are_exact(comm):
        dsp = DynamicSequenceParallel(comm)
        w, x = whole_tensor((4, 7)), torch.zeros(4, 7, dtype=torch.float64, requires_grad=True)
        w_shard = dsp.split(w, 1)
        (dsp.split(x, 1).tensor * w_shard.tensor).sum().backward()
        x_shard = torch.zeros_like(w_shard.tensor, requires_grad=True)
        (dsp.gather(Sharded(x_shard, 1, w_shard.sizes), 1) * w).sum().backward()  # on every rank
        return torch.equal(x.grad, w), torch.equal(x_shard.grad, w_shard.tensor)

    assert run_threads(num_ranks, gradients_are_exact) == [(True, True)] * num_ranks


@pytest.mark.parametrize("num_ranks", SIZES)
def test_what_is_gathered_for_shards_has_the_sum_of_all_ranks_gradients(num_ranks):
    """Each rank weights the whole tensor in its own way. 6 and 8 ranks: some shards are empty."""

    def error_and_bytes(comm):
        dsp, whole = DynamicSequenceParallel(comm), whole_tensor((4, 5))
        held = dsp.split(whole, 1)
        x = held.tensor.clone().requires_grad_()
        gathered = dsp.gather_for_shards(Sharded(x, 1, held.sizes), 1)
        assert torch.equal(gathered, whole)
        weights = [(rank + whole).sin() for rank in range(comm.size)]
        (gathered * weights[comm.rank]).sum().backward()
        error = (x.grad - dsp.split(sum(weights), 1).tensor).abs().sum().item()
        return error, dict(comm.sent), x.numel() * 8

    for error, sent, num_bytes in run_threads(num_ranks, error_and_bytes):
        assert error < 1e-12
        assert sent.get("forward switch", 0) == (num_ranks - 1) * num_bytes
        assert sent.get("backward switch", 0) == (0 if num_ranks == 1 else 4 * 5 * 8 - num_bytes)


def gradients_of_three_layers(split, stage, gather):
    """Gradients of a parameter before the split, of one on shards and of one after the gather."""
    before, on_shards, after = ((i + whole_tensor((3, 3))).requires_grad_() for i in range(3))
    held = stage(split(whole_tensor((2, 5, 7, 3)) @ before, 1), on_shards)
    (gather(held, 2) @ after).square().mean().backward()
    return [before.grad, on_shards.grad, after.grad]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_mean_of_averaged_gradients_is_the_gradient_of_one_device(num_ranks):
    """Without bytes for it in the backward of split and gather."""

    def gradients_and_bytes(comm):
        dsp = DynamicSequenceParallel(comm, gradients="averaged")

        def stage(held, weight):
            held = dsp.switch(held, 1, 2)
            return Sharded(mix(held.tensor @ weight, 1), held.dim, held.sizes)

        grads = gradients_of_three_layers(dsp.split, stage, dsp.gather)
        return grads, dsp.comm.sent["backward split"] + dsp.comm.sent["backward gather"]

    def whole(x, dim):
        return x

    expected = gradients_of_three_layers(whole, lambda x, weight: mix(x @ weight, 1), whole)
    results = run_threads(num_ranks, gradients_and_bytes)
    for layer, expected_grad in enumerate(expected):
        mean = sum(grads[layer] for grads, _ in results) / num_ranks
        assert (mean - expected_grad).abs().max() < 1e-10
    assert all(num_bytes == 0 for _, num_bytes in results)


@pytest.mark.parametrize("gradients", ("whole", "averaged"))
def test_a_loss_of_my_rows_has_the_gradient_of_one_device(gradients):
    """The sum over my rows / all elements; times the ranks, if gradients are averaged."""

    def gradients_of_loss(comm):
        dsp = DynamicSequenceParallel(comm, gradients)
        before, on_shards = (whole_tensor((3, 3)).requires_grad_() for _ in range(2))
        held = dsp.switch(dsp.split(whole_tensor((2, 5, 7, 3)) @ before, 1), 1, 2)
        loss = mix(held.tensor @ on_shards, 1).square().sum() / (2 * 5 * 7 * 3)
        (loss * (comm.size if gradients == "averaged" else 1)).backward()
        return before.grad, on_shards.grad

    expected = run_threads(1, gradients_of_loss)[0]
    results = run_threads(4, gradients_of_loss)
    before, on_shards = (sum(grads) for grads in zip(*results, strict=True))
    if gradients == "averaged":
        before, on_shards = before / 4, on_shards / 4
    else:
        before = results[0][0]  # every rank has it
    assert (before - expected[0]).abs().max() < 1e-10
    assert (on_shards - expected[1]).abs().max() < 1e-10


def message_of_refusal(call):
    """The ValueError of `call(dsp)` on two ranks."""
    with pytest.raises(ValueError) as refusal:
        run_threads(2, lambda comm: call(DynamicSequenceParallel(comm)))
    return str(refusal.value)


X = torch.zeros(4, 6, 2)


def test_a_switch_from_a_dimension_that_is_not_sharded_is_refused():
    message = message_of_refusal(lambda dsp: dsp.switch(dsp.split(X, 0), 1, 2))
    assert "from_dim 1" in message and "sharded along dimension 0" in message


def test_a_gather_along_a_dimension_that_is_not_sharded_is_refused():
    message = message_of_refusal(lambda dsp: dsp.gather(dsp.split(X, 0), 1))
    assert "dim 1" in message and "sharded along dimension 0" in message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda dsp: dsp.switch(dsp.split(X, 0), 0, -3), "to_dim must differ"),
        (lambda dsp: dsp.switch(dsp.split(X, 0), 0, 3), "to_dim must be one of the 3 dimensions"),
        (lambda dsp: dsp.split(X, -4), "dim must be one of the 3 dimensions"),
        (lambda dsp: dsp.switch(X, 0, 1), "takes what split or switch gave, got Tensor"),
        (lambda dsp: dsp.switch(Sharded(X, 0, (2, 2)), 0, 1), "got the shape (4, 6, 2)"),
        (
            lambda dsp: dsp.gather(Sharded(X, 0, (4,)), 0),
            "of 2 must have the size that (4,) give it",
        ),
    ],
)
def test_malformed_arguments_are_refused(call, message):
    assert message in message_of_refusal(call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda dsp: dsp.split(X[dsp.rank :], 1), "do not agree"),
        (lambda dsp: dsp.split(X.to((X.dtype, torch.half)[dsp.rank]), 1), "dtype"),
        (lambda dsp: dsp.switch(dsp.split(X, 0), 0, 1 + dsp.rank), "to_dim: [1, 2]"),
    ],
    ids=("shape", "dtype", "to_dim"),
)
def test_arguments_that_differ_between_ranks_are_refused(call, message):
    assert message in message_of_refusal(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda dsp, held, bad: dsp.split(X, 3 if bad else 0),
        lambda dsp, held, bad: dsp.switch(held, 0, 0 if bad else 1),
        lambda dsp, held, bad: dsp.gather(held, 1 if bad else 0),
        lambda dsp, held, bad: dsp.gather_for_shards(X if bad else held, 0),
    ],
    ids=("split", "switch", "gather", "gather_for_shards"),
)
def test_arguments_that_one_rank_refuses_are_an_error_on_all(call):
    """No rank waits for the one that refuses."""

    def rank(comm):
        dsp = DynamicSequenceParallel(comm)
        held = dsp.split(X, 0)
        with pytest.raises(ValueError) as refusal:
            call(dsp, held, comm.rank == 1)
        return str(refusal.value)

    first, _ = run_threads(2, rank, timeout=20)
    assert first == "the ranks do not agree: ranks [1] refuse their own arguments"


def test_unknown_gradients_are_refused():
    with pytest.raises(ValueError, match="gradients must be one of"):
        DynamicSequenceParallel(gradients="sum")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_switches_keep_every_bit(dtype):
    def is_unchanged(comm):
        dsp, x = DynamicSequenceParallel(comm), whole_tensor((3, 10, 7)).to(dtype)
        return torch.equal(dsp.gather(dsp.switch(dsp.split(x, 1), 1, 2), 2), x)

    assert all(run_threads(4, is_unchanged))


def test_torch_compile_does_not_trace_the_calls(monkeypatch):
    """It cannot trace the messages of gloo."""
    dsp, traced = DynamicSequenceParallel(World(1).comm(0), gradients="averaged"), []

    def observed_dimension(*args):
        traced.append(torch.compiler.is_compiling())
        return dimension(*args)

    def model(x):
        cut = dsp.switch(dsp.split(2 * x, 1), 1, 2)
        return dsp.gather(cut, 2) + 1

    monkeypatch.setattr(dsp_switch, "dimension", observed_dimension)
    x = torch.randn(2, 5, 7, requires_grad=True)
    out = torch.compile(model, backend="eager")(x)
    out.sum().backward()
    assert traced and not any(traced)
    assert torch.equal(out, 2 * x + 1) and torch.equal(x.grad, torch.full_like(x, 2))
