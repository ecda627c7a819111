"""The Trainer of transformers on real text; one line shards its sequences over the ranks.

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

HELD_OUT_SEQUENCES = 4


class Text(IterableDataset[PackedSequence]):
    """A stream of packed sequences: the first `count`, or endless if it is None."""

    def __init__(self, files: Sequence[Path], seq_len: int, count: int | None = None) -> None:
        self.files, self.seq_len, self.count = files, seq_len, count

    def __iter__(self) -> Iterator[PackedSequence]:
        return islice(sequences(self.files, self.seq_len, seed=0), self.count)


def collate(batch: Sequence[PackedSequence]) -> dict[str, Any]:
    """A batch of one sequence: all sequences of a batch would need the same document borders."""
    (sequence,) = batch
    return dict(sequence.batch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        per_device_train_batch_size=1,  # per sequence-parallel group, not per rank
        per_device_eval_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        remove_unused_columns=False,  # keeps cu_seqlens, which is no argument of the model
        accelerator_config={"dispatch_batches": False},  # dispatching takes tensors only
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        build_model(VOCABULARY, args.seq_len, seed=0),
        arguments,
        data_collator=collate,
        train_dataset=Text(training, args.seq_len),
        eval_dataset=Text(held_out, args.seq_len, HELD_OUT_SEQUENCES),
    )
    config = {"sequence_parallel_size": args.sequence_parallel_size}
    wf_accelerate.connect_trainer(trainer, config)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"held-out loss {metrics['eval_loss']:.4f} nats per byte")


if __name__ == "__main__":
    main()
