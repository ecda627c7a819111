"""The loss of a rank's share, against torch's cross_entropy."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from wf_backends.parallel import loss as loss_module
from wf_backends.parallel.loss import count_valid, token_loss

VOCAB = 13


def draw(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (2, 7, vocab) of some size, and labels of which about a third do not count."""
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(2, 7, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 7), generator=generator)
    labels[torch.rand(2, 7, generator=generator) < 0.3] = -100
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("rows", [1, 3, 14, 1000])
def test_equals_cross_entropy_for_any_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", rows * VOCAB)
    logits, labels = draw()
    ours = token_loss(logits, labels, count_valid(labels))
    (grad,) = torch.autograd.grad(3 * ours, logits)
    theirs = cross_entropy(logits.flatten(0, 1), labels.flatten())
    (wanted,) = torch.autograd.grad(3 * theirs, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = draw(dtype)
    ours = token_loss(logits, labels, 9)
    ours.backward()
    wide = logits.detach().float().requires_grad_()
    theirs = cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum") / 9
    theirs.backward()
    assert ours.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_valid", [0, torch.tensor(0), 5])
def test_a_rank_without_labels_gives_zero_and_zero_gradients(num_valid: torch.Tensor | int) -> None:
    logits, labels = draw()
    poisoned = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool), float("nan"))
    loss = token_loss(poisoned, torch.full_like(labels, -100), num_valid)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_no_tokens_at_all() -> None:
    logits = torch.zeros(1, 0, VOCAB, requires_grad=True)
    token_loss(logits, torch.zeros(1, 0, dtype=torch.int64), 4).backward()
    assert logits.grad is not None and logits.grad.shape == (1, 0, VOCAB)


def test_shares_of_unequal_ranks_add_up_to_one_device() -> None:
    logits, labels = draw()
    total = count_valid(labels)
    parts = [token_loss(logits[:, cut], labels[:, cut], total) for cut in (slice(2), slice(2, 7))]
    whole = cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-13, atol=0)


def test_another_ignore_index() -> None:
    logits, labels = draw()
    other = labels.masked_fill(labels == -100, 0)
    ours = token_loss(logits, other, count_valid(other, ignore_index=0), ignore_index=0)
    theirs = cross_entropy(logits.flatten(0, 1), other.flatten(), ignore_index=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must have the shape .*\(2, 7\), got \(2, 6\)"):
        token_loss(torch.zeros(2, 7, VOCAB), torch.zeros(2, 6, dtype=torch.int64), 1)
