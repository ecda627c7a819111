"""The Evoformer block over ranks, and the model of the example, equal those of one device."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.helpers import ROOT, run_threads
from wf_backends.comm import Communicator
from wf_backends.dsp import DynamicSequenceParallel

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples" / "fold")
    import train_fold
    from block_over_ranks import ROWS, SEQUENCES, block_over_ranks
    from evoformer import EvoformerBlock

MSA, PAIR = (2, 5, 7, 16), (2, 7, 7, 8)  # 5 sequences and 7 residues: no multiple of the ranks


def loss_of(msa: Tensor, pair: Tensor) -> Tensor:
    return msa.sin().mean() + pair.sin().square().mean()


@pytest.mark.parametrize(
    ("num_ranks", "gradients", "fused", "recompute"),
    [
        (2, "averaged", False, False),
        (3, "averaged", True, True),
        (4, "averaged", False, True),
        (4, "whole", True, False),
    ],
)
def test_two_blocks_are_exact(num_ranks: int, gradients: str, fused: bool, recompute: bool) -> None:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(EvoformerBlock(16, 8, 2, 2, 4, fused) for _ in range(2)).double()
    inputs = torch.randn(MSA, dtype=torch.float64), torch.randn(PAIR, dtype=torch.float64)

    def loss_and_gradients(comm: Communicator) -> tuple[float, tuple[Tensor, ...]]:
        copies, (whole_msa, whole_pair) = deepcopy(blocks), (x.clone() for x in inputs)
        leaves = [whole_msa.requires_grad_(), whole_pair.requires_grad_(), *copies.parameters()]
        dsp = DynamicSequenceParallel(comm, gradients)
        msa, pair = dsp.split(whole_msa, SEQUENCES), dsp.split(whole_pair, ROWS)
        for block in copies:
            if recompute:
                arguments = block, dsp, msa, pair
                msa, pair = checkpoint(block_over_ranks, *arguments, use_reentrant=False)
            else:
                msa, pair = block_over_ranks(block, dsp, msa, pair)
        loss = loss_of(dsp.gather(msa, SEQUENCES), dsp.gather(pair, ROWS))
        return float(loss), torch.autograd.grad(loss, leaves)

    msa, pair = (x.requires_grad_() for x in inputs)
    leaves = [msa, pair, *blocks.parameters()]
    for block in blocks:
        msa, pair = block(msa, pair)
    expected_loss = loss_of(msa, pair)
    expected = torch.autograd.grad(expected_loss, leaves)
    results = run_threads(num_ranks, loss_and_gradients)
    largest = max(grad.abs().max() for grad in expected)
    for index, expected_grad in enumerate(expected):
        grad = sum(grads[index] for _, grads in results)
        # inputs are whole on every rank, so that "whole" gives each the whole gradient
        grad = grad / num_ranks if gradients == "averaged" or index < 2 else grad
        assert (grad - expected_grad).abs().max() < 1e-12 * largest
    for loss, _ in results:
        assert loss == pytest.approx(expected_loss.item(), abs=1e-13)


def test_training_over_ranks_has_the_losses_of_one_rank() -> None:
    """The model of the example with one batch: logits and the mean of the ranks' gradients."""
    torch.manual_seed(0)
    model = train_fold.ContactModel(1, recompute=False).double()
    alignment, contacts = next(train_fold.proteins(2, 6, 9))

    def logits_and_gradients(comm: Communicator) -> tuple[Tensor, tuple[Tensor, ...]]:
        copy = deepcopy(model)
        logits = copy(alignment, DynamicSequenceParallel(comm, "averaged"))
        loss = F.binary_cross_entropy_with_logits(logits, contacts.double())
        return logits.detach(), torch.autograd.grad(loss, list(copy.parameters()))

    ((expected, expected_grads),) = run_threads(1, logits_and_gradients)
    results = run_threads(4, logits_and_gradients)
    for logits, _ in results:
        assert (logits - expected).abs().max() < 1e-12
    for index, expected_grad in enumerate(expected_grads):
        mean = sum(grads[index] for _, grads in results) / len(results)
        assert (mean - expected_grad).abs().max() < 1e-12


def test_contacts_of_the_simulated_proteins_show_in_their_alignments() -> None:
    alignment, contacts = next(train_fold.proteins(3, 200, 12))
    protein, i, j = contacts.triu().nonzero().T
    assert len(protein) == 3 * 12 // 4
    together = alignment + alignment.gather(2, contacts.argmax(-1)[:, None].expand_as(alignment))
    follow = (together == train_fold.ACIDS - 1).double().mean(1)
    assert follow[protein, i].min() > 0.8 and torch.equal(contacts, contacts.mT)
    assert follow[contacts.sum(-1) == 0].max() < 0.2


def test_fewer_residues_or_sequences_than_ranks_are_refused() -> None:
    def call(comm: Communicator) -> None:
        dsp = DynamicSequenceParallel(comm)
        msa, pair = dsp.split(torch.zeros(1, 3, 5, 16), 1), dsp.split(torch.zeros(1, 5, 5, 8), 1)
        block_over_ranks(EvoformerBlock(16, 8, 2, 2, 4), dsp, msa, pair)

    with pytest.raises(ValueError, match="3 sequences and 5 residues on 4 ranks: each needs one"):
        run_threads(4, call)
