"""token_loss, the loss of a rank's tokens, beside torch's cross_entropy of all tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from wf_backends.parallel import loss as loss_module
from wf_backends.parallel.loss import count_valid, token_loss

VOCAB = 13


def draw(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (2, 7, vocab) with a deviation of 8, and labels of which about 30% are ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(2, 7, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 7), generator=generator)
    labels[torch.rand(2, 7, generator=generator) < 0.3] = -100
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("rows", [1, 3, 14, 1000])
def test_loss_and_gradient_do_not_depend_on_the_rows_of_a_chunk(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "MAX_UPCAST_LOGITS", rows * VOCAB)
    logits, labels = draw()
    loss = token_loss(logits, labels, count_valid(labels))
    (grad,) = torch.autograd.grad(3 * loss, logits)  # the incoming gradient is not 1
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    (expected_grad,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = draw(dtype)
    loss = token_loss(logits, labels, 9)
    loss.backward()
    wide = logits.detach().float().requires_grad_()
    expected = cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum") / 9
    expected.backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_valid", [0, torch.tensor(0), 5])
def test_a_rank_without_labels_gives_zero_and_zero_gradients(num_valid: torch.Tensor | int) -> None:
    """The logits are NaN: no factor 0 hides a row that was read."""
    logits = torch.full((2, 7, VOCAB), float("nan"), requires_grad=True)
    loss = token_loss(logits, torch.full((2, 7), -100), num_valid)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_a_rank_without_tokens_has_a_gradient_without_rows() -> None:
    logits = torch.zeros(1, 0, VOCAB, requires_grad=True)
    token_loss(logits, torch.zeros(1, 0, dtype=torch.int64), 4).backward()
    assert logits.grad is not None and logits.grad.shape == (1, 0, VOCAB)


def test_losses_of_ranks_with_unequal_shards_add_up() -> None:
    logits, labels = draw()
    total = count_valid(labels)
    first = token_loss(logits[:, :2], labels[:, :2], total)
    second = token_loss(logits[:, 2:], labels[:, 2:], total)
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(first + second, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int16))
def test_labels_of_any_integer_dtype_give_the_loss_of_int64(dtype: torch.dtype) -> None:
    logits, labels = draw()
    grads = []
    for same_labels in (labels, labels.to(dtype)):
        logits = logits.detach().requires_grad_()
        token_loss(logits, same_labels, count_valid(same_labels)).backward()
        grads.append(logits.grad)
    assert torch.equal(*grads)


def test_every_byte_is_a_label_that_counts() -> None:
    """Also 156, which torch takes for -100 in uint8."""
    labels = torch.arange(256)
    assert count_valid(labels.to(torch.uint8)) == 256


def test_labels_of_another_shape_than_the_logits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must have the shape .*\(2, 7\), got \(2, 6\)"):
        token_loss(torch.zeros(2, 7, VOCAB), torch.zeros(2, 6, dtype=torch.int64), 1)
