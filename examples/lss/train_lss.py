"""Train a byte-level language model by LSS Transformer, in plain torch, on any text file.

    python examples/lss/train_lss.py --config configs/lss/lss.json                 # one rank
    torchrun --nproc-per-node 4 examples/lss/train_lss.py --config configs/lss/lss.json
    mpirun -n 4 python examples/lss/train_lss.py --config configs/lss/lss.json --data enwik8

If "sequence_parallel_size" is null in the config, all ranks share one sequence; if it is a divisor
of the number of ranks, the groups are data parallel. The default --data is Python's own manual.
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
    config = json.loads(args.config.read_text())
    text = args.data.read_bytes()
    launch.init(timeout=args.timeout)
    train(make_comm(), config, text, args.steps)


def parse() -> argparse.Namespace:
    manual = Path(pydoc_data.__path__[0], "topics.py")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a file of configs/lss")
    parser.add_argument("--data", type=Path, default=manual, help="any file, read as bytes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    return parser.parse_args()


def train(comm: Communicator, config: Mapping[str, Any], text: bytes, steps: int) -> list[float]:
    """Train; returns the loss of each step in nats per byte, the same on all ranks of a group.

    Args:
        config: "model", "wallfacer" and "training" of a config file.

    Raises:
        ValueError: if the text is shorter than a sequence.
    """
    block = dict(config["wallfacer"])
    if block.get("sequence_parallel_size") is None:
        block["sequence_parallel_size"] = comm.size
    sp = SequenceParallel(SequenceParallelConfig.from_dict(block), comm)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = initialise(LanguageModel(LanguageModelConfig(**config["model"]), sp)).to(device)
    average_gradients = DoubleAverage(sp, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["training"]["lr"])
    dp_size, dp_rank = comm.size // sp.size, comm.rank // sp.size
    losses: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        sample = step * dp_size + dp_rank
        tokens = draw(text, model.config.seq_len, config["training"]["batch"], sample)
        batch = sp.shard_batch({"input_ids": tokens.to(device), "labels": tokens.to(device)})
        logits = model(batch["input_ids"], batch["position_ids"], seed=sample)
        loss = sp.loss(logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters())
        optimizer.step()
        losses.append(sp.sum_over_ranks(loss).item())
        if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
            seconds = time.perf_counter() - start
            sent = sum(sp.report().values())
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}  {seconds:.2f} s  ", end="")
            print(f"{sent / 1e6:.2f} MB sent since the last line", flush=True)
    return losses


def draw(text: bytes, seq_len: int, batch: int, sample: int) -> Tensor:
    """(batch, seq_len) int64: random passages of the text; `sample` is the seed."""
    if len(text) < seq_len:
        raise ValueError(f"--data must hold at least {seq_len} bytes, got {len(text)}")
    generator = torch.Generator().manual_seed(sample)
    starts = torch.randint(0, len(text) - seq_len + 1, (batch,), generator=generator).tolist()
    return torch.tensor([list(text[start : start + seq_len]) for start in starts])


def initialise(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Draw the weights from `seed`, so that they are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


if __name__ == "__main__":
    main()
