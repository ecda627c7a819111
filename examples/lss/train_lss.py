"""Train a byte-level language model by LSS Transformer, in plain torch, on any text file.

    python examples/lss/train_lss.py --config configs/lss/lss.json                 # one rank
    torchrun --nproc-per-node 4 examples/lss/train_lss.py --config configs/lss/lss.json
    mpirun -n 4 python examples/lss/train_lss.py --config configs/lss/lss.json --data enwik8

The config's "sequence_parallel_size" null means all ranks; a divisor of them leaves the rest to
data parallelism. Without --data the text is Python's own manual.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lss_model import LanguageModel, LanguageModelConfig
from torch import Tensor, nn

from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends.comm import Communicator, make_comm
from wf_backends.parallel import DoubleAverage


def main() -> None:
    """Join the ranks and train."""
    args = parse()
    words, text = json.loads(args.config.read_text()), args.data.read_bytes()
    job = launch.init(timeout=args.timeout)
    try:
        train(make_comm(), words, text, args.steps)
    finally:
        job.close()


def parse() -> argparse.Namespace:
    manual = Path(pydoc_data.__path__[0], "topics.py")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a file of configs/lss")
    parser.add_argument("--data", type=Path, default=manual, help="any file, read as bytes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    return parser.parse_args()


def train(comm: Communicator, words: Mapping[str, Any], text: bytes, steps: int) -> list[float]:
    """Losses of `steps` optimizer steps in nats per byte, the same on every rank of a sequence.

    Args:
        words: "model", "wallfacer" and "training" of a config file.

    Raises:
        ValueError: if the text is shorter than a sequence.
    """
    block = dict(words["wallfacer"])
    block["sequence_parallel_size"] = block.get("sequence_parallel_size") or comm.size
    sp = SequenceParallel(SequenceParallelConfig.from_dict(block), comm)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = initialise(LanguageModel(LanguageModelConfig(**words["model"]), sp)).to(device)
    average = DoubleAverage(sp, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=words["training"]["lr"])
    replicas, replica = comm.size // sp.size, comm.rank // sp.size
    losses: list[float] = []
    for step in range(steps):
        start, sample = time.perf_counter(), step * replicas + replica
        whole = draw(text, model.config.seq_len, words["training"]["batch"], sample)
        batch = sp.shard_batch({"input_ids": whole.to(device), "labels": whole.to(device)})
        logits = model(batch["input_ids"], batch["position_ids"], seed=sample)
        loss = sp.loss(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        average(model.parameters())
        optimizer.step()
        losses.append(sp.sum_over_ranks(loss).item())
        if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
            seconds, sent = time.perf_counter() - start, sum(sp.report().values())
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}  {seconds:.2f} s  ", end="")
            print(f"{sent / 1e6:.2f} MB sent since the last line", flush=True)
    return losses


def draw(text: bytes, seq_len: int, batch: int, sample: int) -> Tensor:
    """(batch, seq_len) int64: passages of the text, the same on every rank for the same sample."""
    if len(text) < seq_len:
        raise ValueError(f"--data must hold at least {seq_len} bytes, got {len(text)}")
    random = torch.Generator().manual_seed(sample)
    starts = torch.randint(0, len(text) - seq_len + 1, (batch,), generator=random).tolist()
    return torch.tensor([list(text[start : start + seq_len]) for start in starts])


def initialise(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Weights from a generator of their own: the same on every rank."""
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=random)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


if __name__ == "__main__":
    main()
