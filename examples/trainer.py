"""The Trainer of transformers on real text, its sequences spread over the ranks by one line.

torchrun --nproc-per-node 4 examples/trainer.py
mpirun -n 4 python examples/trainer.py
torchrun --nproc-per-node 4 examples/trainer.py --sequence-parallel-size 2 --steps 60
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from model import build_model
from textdata import VOCABULARY, PackedSequence, find_files, sequences, split
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import wf_accelerate
from wf_backends import launch

HELD_OUT = 4  # sequences


class Text(IterableDataset[PackedSequence]):
    """Packed documents, without an end or of so many sequences."""

    def __init__(self, files: Sequence[Path], seq_len: int, count: int | None = None) -> None:
        self.files, self.seq_len, self.count = files, seq_len, count

    def __iter__(self) -> Iterator[PackedSequence]:
        return islice(sequences(self.files, self.seq_len, seed=0), self.count)


def collate(batch: Sequence[PackedSequence]) -> dict[str, Any]:
    """A batch of one: samples of a batch would have to share their documents."""
    (sequence,) = batch
    return dict(sequence.batch())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequence-parallel-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    parser.add_argument("--out", default="runs/trainer")
    args = parser.parse_args()
    launch.init(timeout=args.timeout)  # torchrun, mpirun, Slurm
    training, held_out = split(find_files())
    arguments = TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=1,  # of the ranks of a sequence together
        per_device_eval_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        remove_unused_columns=False,  # documents are none of the model's own arguments
        accelerator_config={"dispatch_batches": False},  # every rank reads; cu_seqlens are integers
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),  # else accelerate looks for GPUs
    )
    trainer = Trainer(
        build_model(VOCABULARY, args.seq_len, seed=0),
        arguments,
        data_collator=collate,
        train_dataset=Text(training, args.seq_len),
        eval_dataset=Text(held_out, args.seq_len, HELD_OUT),
    )
    words = {"sequence_parallel_size": args.sequence_parallel_size}
    wf_accelerate.connect_trainer(trainer, words)
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"held-out loss {found['eval_loss']:.4f} nats per byte")


if __name__ == "__main__":
    main()
