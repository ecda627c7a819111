"""DSP's primitives: exact in float64, forward and backward, bytes as derived, refusals by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dense import largest
from tests.helpers import run_threads
from wf_backends.dsp import chunk_sizes
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded

SIZES = (1, 2, 3, 4, 6, 8)


def whole_tensor(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mix(x, dim):
    """A function of all of `dim`, elementwise in the others."""
    return (x.cumsum(dim) / x.shape[dim]).tanh() + x.sin()


def there_and_back(group, shape, path):
    """Errors of the output and of x's gradient, and bytes by label, after stages along `path`."""
    dsp = DynamicSequenceParallel(group)
    x = whole_tensor(shape).requires_grad_()
    held = dsp.split(x, path[0])
    for mixed, kept in zip(path, (*path[1:], path[0]), strict=True):
        held = dsp.switch(held, mixed, kept)
        held = Sharded(mix(held.tensor, mixed), held.dim, held.sizes)
    weight = torch.arange(x.numel(), dtype=torch.float64).view(shape).cos()
    out = dsp.gather(held, held.dim)
    (out * weight).sum().backward()
    alone = whole_tensor(shape).requires_grad_()
    right = alone
    for mixed in path:
        right = mix(right, mixed)
    (right * weight).sum().backward()
    errors = [(out - right).abs().max().item(), (x.grad - alone.grad).abs().max().item()]
    return errors, dict(dsp.comm.sent)


def derived_bytes(shape, path, num_ranks, rank):
    """What `there_and_back` sends, in bytes of float64."""
    total = 8 * torch.Size(shape).numel()
    share = [chunk_sizes(n, num_ranks)[rank] / n for n in shape]
    edges = list(zip(path, (*path[1:], path[0]), strict=True))
    gathered = total * share[path[0]] * (num_ranks - 1)
    sent = {
        "forward switch": sum(total * share[a] * (1 - share[b]) for a, b in edges),
        "backward switch": sum(total * share[b] * (1 - share[a]) for a, b in edges),
        "forward gather": gathered,
        "backward split": gathered,
    }
    return {label: round(num_bytes) for label, num_bytes in sent.items() if round(num_bytes)}


def assert_exact(results, shape, path):
    for rank, (errors, sent) in enumerate(results):
        assert largest(errors) < 1e-10
        assert sent == derived_bytes(shape, path, len(results), rank)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((2, 9, 11, 3), (1, 2)),  # divides by nothing
        ((2, 8, 24, 3), (2, 1)),
        ((9, 7, 10), (0, 2, 1)),  # three sequence dimensions
        ((5, 3, 2, 4, 2), (3, 1, 4, 0)),
        ((2, 1, 5, 3), (1, 2)),  # most ranks hold nothing
    ],
)
def test_exact_and_bytes_as_derived(num_ranks, shape, path):
    assert_exact(run_threads(num_ranks, there_and_back, shape, path), shape, path)


@settings(max_examples=25)
@given(st.data())
def test_drawn_shapes_and_paths(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    path = tuple(data.draw(st.permutations(range(len(shape)))))
    num_ranks = data.draw(st.sampled_from((2, 3, 4, 6)))
    assert_exact(run_threads(num_ranks, there_and_back, shape, path), shape, path)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_every_primitive_alone_has_the_gradient_of_one_device(num_ranks):
    def one_rank(comm):
        dsp = DynamicSequenceParallel(comm)
        w, x = whole_tensor((4, 7)), torch.zeros(4, 7, dtype=torch.float64, requires_grad=True)
        part = dsp.split(w, 1)
        (dsp.split(x, 1).tensor * part.tensor).sum().backward()
        leaf = torch.zeros_like(part.tensor, requires_grad=True)
        (dsp.gather(Sharded(leaf, 1, part.sizes), 1) * w).sum().backward()  # on every rank
        return torch.equal(x.grad, w) and torch.equal(leaf.grad, part.tensor)

    assert all(run_threads(num_ranks, one_rank))


@pytest.mark.parametrize("num_ranks", SIZES)
def test_averaged_gradients_are_right_for_parameters_everywhere(num_ranks):
    """Before the split, on shards, and after the gather: the mean over ranks is one device's."""

    def step(split, gather, switch):
        weights = [(i + whole_tensor((3, 3))).requires_grad_() for i in range(4)]
        held = switch(split(whole_tensor((2, 5, 7, 3)) @ weights[0], 1), 1, 2, weights[1])
        ((gather(held, 2) @ weights[3]) ** 2).mean().backward()
        return [w.grad for w in weights[:2] + weights[3:]]

    def one_rank(comm):
        dsp = DynamicSequenceParallel(comm, gradients="averaged")

        def stage(x, a, b, weight):
            x = dsp.switch(x, a, b)
            return Sharded(mix(x.tensor @ weight, a), x.dim, x.sizes)

        grads = step(dsp.split, dsp.gather, stage)
        return grads, dsp.comm.sent["backward split"] + dsp.comm.sent["backward gather"]

    right = step(lambda x, d: x, lambda x, d: x, lambda x, a, b, w: mix(x @ w, a))
    results = run_threads(num_ranks, one_rank)
    for index, wanted in enumerate(right):
        mean = sum(grads[index] for grads, _ in results) / num_ranks
        assert (mean - wanted).abs().max() < 1e-10
    assert all(sent == 0 for _, sent in results)


def refused(num_ranks, fn):
    with pytest.raises(ValueError) as refusal:
        run_threads(num_ranks, lambda comm: fn(DynamicSequenceParallel(comm)))
    return str(refusal.value)


X = torch.zeros(4, 6, 2)


def test_switching_from_a_dimension_that_is_not_sharded_names_both():
    said = refused(2, lambda dsp: dsp.switch(dsp.split(X, 0), 1, 2))
    assert "from_dim 1" in said and "sharded along dimension 0" in said


def test_gathering_along_another_dimension_names_both():
    said = refused(2, lambda dsp: dsp.gather(dsp.split(X, 0), 1))
    assert "dim 1" in said and "sharded along dimension 0" in said


@pytest.mark.parametrize(
    ("fn", "words"),
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
        (lambda dsp: dsp.split(X[dsp.rank :], 1), "do not agree"),
        (lambda dsp: dsp.split(X.to((X.dtype, torch.half)[dsp.rank]), 1), "dtype"),
        (lambda dsp: dsp.switch(dsp.split(X, 0), 0, 1 + dsp.rank), "to_dim: [1, 2]"),
    ],
)
def test_bad_input(fn, words):
    assert words in refused(2, lambda dsp: pytest.fail() if fn(dsp) else None)


def test_unknown_gradients_are_refused():
    with pytest.raises(ValueError, match="gradients must be one of"):
        DynamicSequenceParallel(gradients="sum")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_moving_keeps_every_bit(dtype):
    def one_rank(comm):
        dsp, x = DynamicSequenceParallel(comm), whole_tensor((3, 10, 7)).to(dtype)
        return torch.equal(dsp.gather(dsp.switch(dsp.split(x, 1), 1, 2), 2), x)

    assert all(run_threads(4, one_rank))
