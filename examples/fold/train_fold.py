r"""Train a small protein model over ranks: which residues touch, from an alignment of sequences.

    python examples/fold/train_fold.py  # one rank
    mpirun -n 4 python examples/fold/train_fold.py --residues 48
    torchrun --nproc-per-node 4 examples/fold/train_fold.py --checkpoint

The alignments are simulated: residues that touch mutate together. From such columns the model
learns which residues touch, as AlphaFold 2 does. The losses are those of one rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from block_over_ranks import ROWS, SEQUENCES, block_over_ranks
from evoformer import EvoformerBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wf_backends import launch
from wf_backends.comm import Communicator, make_comm
from wf_backends.dsp import DynamicSequenceParallel
from wf_backends.parallel import GradientMean

ACIDS = 20
MUTATING = 0.9  # how likely a residue mutates with the one that it touches


def main() -> None:
    args = parse()
    launch.init(timeout=args.timeout)
    train(make_comm(), args)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--residues", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=64, help="of an alignment")
    parser.add_argument("--batch", type=int, default=2, help="proteins of a step")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--checkpoint", action="store_true", help="keep no activations of blocks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    return parser.parse_args(arguments)


class ContactModel(nn.Module):
    """Evoformer blocks between embeddings and a linear: logits of contacts.

    Args:
        recompute: whether a block's activations are computed again in the backward.
    """

    def __init__(self, blocks: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.acids, self.offsets = nn.Embedding(ACIDS, 32), nn.Embedding(65, 32)
        self.blocks = nn.ModuleList(EvoformerBlock(32, 32, 4, 4, 8) for _ in range(blocks))
        self.norm, self.logit = nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, alignment: Tensor, dsp: DynamicSequenceParallel) -> Tensor:
        """alignment: (B, S, N) int64, whole; returns (B, N, N), whole. Ranks share the work."""
        b, _, n = alignment.shape
        offsets = (torch.arange(n) - torch.arange(n)[:, None]).clamp(-32, 32) + 32
        acids = dsp.split(alignment, SEQUENCES)
        rows = dsp.split(offsets.to(alignment).expand(b, n, n), ROWS)
        msa = replace(acids, tensor=self.acids(acids.tensor))
        pair = replace(rows, tensor=self.offsets(rows.tensor))
        for block in self.blocks:
            if self.recompute:
                arguments = block, dsp, msa, pair
                msa, pair = checkpoint(block_over_ranks, *arguments, use_reentrant=False)
            else:
                msa, pair = block_over_ranks(block, dsp, msa, pair)
        logits = replace(pair, tensor=self.logit(self.norm(pair.tensor)).squeeze(-1))
        whole = dsp.gather(logits, ROWS)
        return (whole + whole.transpose(1, 2)) / 2


def proteins(
    batch: int, sequences: int, residues: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: alignment (B, S, N) int64, contacts (B, N, N) float32; equal on all ranks.

    Half of the residues touch one other each, anywhere in the chain.
    """
    random = torch.Generator().manual_seed(seed)
    while True:
        alignment = torch.randint(ACIDS, (batch, sequences, residues), generator=random)
        contacts = torch.zeros(batch, residues, residues)
        for protein, touches in zip(alignment, contacts, strict=True):
            i, j = torch.randperm(residues, generator=random)[: residues // 4 * 2].view(2, -1)
            touches[i, j] = touches[j, i] = 1
            follows = torch.rand(sequences, len(i), generator=random) < MUTATING
            protein[:, j] = (ACIDS - 1 - protein[:, i]).where(follows, protein[:, j])
        yield alignment, contacts


def train(comm: Communicator, args: argparse.Namespace) -> list[float]:
    """Train; returns the loss of each step, the same on all ranks."""
    torch.manual_seed(args.seed)  # the same weights on all ranks
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ContactModel(args.blocks, args.checkpoint).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    average = GradientMean(comm)
    batches = proteins(args.batch, args.sequences, args.residues, args.seed)
    losses: list[float] = []
    for step, (alignment, contacts) in zip(range(args.steps), batches, strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        contacts = contacts.to(device)
        logits = model(alignment.to(device), dsp)
        loss = F.binary_cross_entropy_with_logits(logits, contacts)
        loss.backward()
        average(model.parameters())
        optimizer.step()
        losses.append(loss.item())
        if comm.rank == 0 and (step + 1) % max(1, args.steps // 10) == 0:
            likeliest = logits.flatten(1).topk(alignment.shape[2] // 4 * 2).indices
            precision = contacts.flatten(1).gather(1, likeliest).mean()
            print(f"step {step + 1}/{args.steps}  loss {losses[-1]:.4f}  ", end="")
            print(f"precision {precision:.2f}  {time.perf_counter() - start:.2f} s", flush=True)
    return losses


if __name__ == "__main__":
    main()
