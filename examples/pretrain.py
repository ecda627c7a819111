"""Pretrain a byte-level language model on real text, its sequences spread over all ranks.

    mpirun -n 4 python examples/pretrain.py --deepspeed_config configs/deepspeed/zero0_ring.json
    torchrun --nproc-per-node 4 examples/pretrain.py --steps 60 --seq-len 8192 --data 'books/*.txt'
    torchrun --nproc-per-node 4 examples/pretrain.py --engine torch

Writes the loss curve as PNG and CSV under --out, and checkpoints there with --save-every. Under
`torchrun --max-restarts 2` the job resumes from the last checkpoint after a rank has failed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from curve import Row, draw, read_csv, write_csv
from engine import Batch, Engine, open_engine
from model import build_model
from progress import Display
from restart import checkpoint_to_resume, config_for_ranks
from textdata import VOCABULARY, find_files, sequences, split

from wf_backends import launch
from wf_backends.launch import Launch

HELD_OUT_BATCHES = 4
CONFIGS = {  # if --config is not given
    "deepspeed": "configs/deepspeed/zero2_concentric.json",
    "colossalai": "configs/colossalai/zero2_concentric.json",
    "torch": "configs/torch/fsdp_concentric.json",
}


def main() -> None:
    """Train, evaluate on held-out text, write the curve."""
    args = parse_arguments()
    job = launch.init(timeout=args.timeout, log_folder=args.out)
    set_num_threads(job)
    checkpoint = checkpoint_to_resume(args, job)
    config = args.config
    if checkpoint is not None:
        config = config_for_ranks(config, args.out)
    training, held_out = split(find_files(args.data))
    model = build_model(VOCABULARY, args.seq_len, args.seed)
    engine = open_engine(args.engine, config, model, checkpoint)
    progress = {"step": 0, "sequences": 0} if checkpoint is None else engine.load(checkpoint)
    with Display(progress["step"], args.steps, visible=engine.rank == 0) as display:
        display.say(f"{len(training)} files to train on, {len(held_out)} held out")
        if checkpoint is not None:
            display.say(f"goes on from {checkpoint}, restart {job.restart}")
        rows = train(engine, training, progress, args, display)
        held_out_loss = evaluate(engine, full_batches(engine, held_out, args))
        if engine.rank == 0:
            report(rows, held_out_loss, args, display)
    engine.close()


def train(
    engine: Engine,
    files: list[Path],
    progress: dict[str, int],
    args: argparse.Namespace,
    display: Display,
) -> list[Row]:
    """Train from `progress` to the last step; returns the rows of the curve from step 1 on."""
    table = args.out / "loss.csv"
    rows = [row for row in read_csv(table) if row.step <= progress["step"]]
    batches = full_batches(engine, files, args, skip=progress["sequences"])
    for step in range(progress["step"] + 1, args.steps + 1):
        rows.append(train_step(engine, batches, step, args.seq_len))
        display.show(rows[-1])
        progress = {"step": step, "sequences": progress["sequences"] + sequences_per_step(engine)}
        if args.save_every and step % args.save_every == 0:
            if engine.rank == 0:  # the curve first: a checkpoint never has fewer rows than steps
                write_csv(rows, table)
            engine.save(args.out / "checkpoints", progress)
    return rows


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--engine", default="deepspeed", choices=[*CONFIGS])
    add("--config", "--deepspeed_config", help="default: concentric rings of 4 ranks")
    add("--data", nargs="*", default=[], help="files or globs; default: Python's own sources")
    add("--steps", type=int, default=60, help="optimizer steps, counted from the first run")
    add("--seq-len", type=int, default=4096, help="tokens of a sequence")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    add("--resume", nargs="?", const="", help="checkpoint folder; default OUT/checkpoints")
    add("--resume-tag", help="a checkpoint in that folder; default: the last one")
    add("--out", type=Path, default=Path("runs/pretrain"))
    add("--timeout", type=float, default=600, help="seconds that ranks wait for each other")
    add("--local_rank", type=int, help="the deepspeed launcher gives it; not used")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.seq_len < 1:
        parser.error(f"--seq-len must be at least 1, got {args.seq_len}")
    if args.save_every < 0:
        parser.error(f"--save-every must be at least 0, got {args.save_every}")
    args.config = args.config or CONFIGS[args.engine]
    return args


def set_num_threads(job: Launch) -> None:
    """Give each rank of a host an equal share of its cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.local_size))


def full_batches(
    engine: Engine, files: list[Path], args: argparse.Namespace, skip: int = 0
) -> Iterator[Batch]:
    """Batches of one whole sequence, the same on all ranks of a sequence-parallel group."""
    dp_rank, dp_size = engine.data_parallel_rank, engine.data_parallel_size
    for sequence in sequences(files, args.seq_len, args.seed, skip, dp_rank, dp_size):
        yield sequence.batch()


def sequences_per_step(engine: Engine) -> int:
    """Sequences that all ranks together use in one optimizer step."""
    return engine.accumulation * engine.data_parallel_size


def train_step(engine: Engine, batches: Iterator[Batch], step: int, seq_len: int) -> Row:
    """One optimizer step as a row of the curve."""
    start = time.perf_counter()
    result = engine.step(list(islice(batches, engine.accumulation)))
    seconds = time.perf_counter() - start
    tokens = sequences_per_step(engine) * seq_len
    return Row(step, result.loss, result.grad_norm, tokens, seconds, result.bytes_sent)


def evaluate(engine: Engine, batches: Iterator[Batch]) -> float:
    """Mean loss over a few batches of held-out text."""
    losses = [engine.evaluate(batch) for batch in islice(batches, HELD_OUT_BATCHES)]
    return sum(losses) / len(losses)


def report(
    rows: list[Row], held_out_loss: float, args: argparse.Namespace, display: Display
) -> None:
    """Write the curve and print its paths."""
    table, picture = args.out / "loss.csv", args.out / "loss.png"
    write_csv(rows, table)
    draw(rows, picture, f"bytes of text, {args.seq_len} tokens a sequence", held_out_loss)
    if rows:
        display.say(f"training loss {rows[0].loss:.4f} -> {rows[-1].loss:.4f} in {len(rows)} steps")
    display.say(f"held-out loss {held_out_loss:.4f} nats per byte")
    display.say(f"loss curve: {picture.resolve()}\n            {table.resolve()}")


if __name__ == "__main__":
    main()
