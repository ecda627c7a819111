"""A training step with tiles of MLPs, logits and loss: ours beside DeepSpeed's, as ALST does it.

    OMP_NUM_THREADS=1 python benchmarks/tiled_training.py > benchmarks/results/tiled_training.md

A small Llama, its layers recomputed, without an optimizer, on one rank and over several: ours with
WallFacer's attention, DeepSpeed's tiles with its UlyssesSPAttentionHF. Peaks are those of the
largest of fresh processes (VmHWM of a step after a short one), at two lengths, so that what does
not grow with the tokens drops out of the slope. DeepSpeed's tiles have as many rows as the hidden
size, as in its example.

    python benchmarks/tiled_training.py --device cuda

is one rank in one process, a wider model, torch's allocator and CUDA events.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import cores_and_load, cpu_name, last_lines, peak, reset_peak
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.tiling import apply_training, plan_training

WARM = 64


@dataclass(frozen=True)
class Size:
    """The model's, and where it is."""

    hidden: int = 256
    vocabulary: int = 16384
    device: str = "cpu"


ON_GPU = Size(1024, 32768, "cuda")
Step = Callable[[Tensor], Tensor]  # whole ids -> this rank's share of the loss, after its backward
MIB = 1 << 20


def llama(size: Size) -> Any:
    torch.manual_seed(0)
    shape = {"intermediate_size": 4 * size.hidden, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": size.hidden // 32, "max_position_embeddings": 1 << 15}
    shape |= {"hidden_size": size.hidden, "vocab_size": size.vocabulary}
    with torch.device(size.device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def whole(local: int, size: Size) -> Step:
    """The model as it is; over several ranks with our attention."""
    return own_loss(llama(size))


def ours(local: int, size: Size) -> Step:
    """What `autochunk` finds within `max_slowdown`, of the rank's `local` tokens."""
    model, ids = llama(size), torch.zeros(1, local, dtype=torch.int64, device=size.device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = plan_training(model, (), batch, max_slowdown=0.25)
    if size.device == "cuda":
        print(f"<!-- {local} tokens, {plan.explain()} -->".replace("\n", ";"), flush=True)
    return own_loss(model, lambda: apply_training(model, plan))


def own_loss(model: Any, tile: Callable[[], object] = lambda: None) -> Step:
    if ranks() == 1:
        tile()

        def alone(ids: Tensor) -> Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return alone
    sp = SequenceParallel(SequenceParallelConfig.from_dict({"sequence_parallel_size": ranks()}))
    wf_transformers.attach(model, sp)
    tile()

    def step(ids: Tensor) -> Tensor:
        share = sp.shard_batch({"input_ids": ids, "labels": ids})
        valid = torch.tensor(ids.shape[1] - 1)
        loss = model(**wf_transformers.forward_kwargs(model, share, num_valid=valid)).loss
        loss.backward()
        return loss.detach()

    return step


def deepspeed(local: int, size: Size) -> Step:
    """TiledMLP and TiledFusedLogitsLoss, as their docstrings show them, and Ulysses."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        TiledFusedLogitsLoss,
        TiledMLP,
        UlyssesSPAttentionHF,
    )

    model, shards = llama(size), math.ceil(local / size.hidden)
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks(), 1)

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(own: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: TiledMLP.apply(mlp, own, x, shards, list(own.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = tiled(layer.mlp)

    def loss_of(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(x).flatten(0, -2), labels.flatten(), reduction="sum")

    def step(ids: Tensor) -> Tensor:
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        own = [x.chunk(ranks(), 1)[rank()] for x in (ids, labels, places)]
        words = {"input_ids": own[0], "position_ids": own[2], "use_cache": False}
        hidden, head = model.model(**words).last_hidden_state, model.lm_head
        weights = [head.weight]
        words = (loss_of, head, hidden, own[1], None, shards, weights, "sum")
        loss = TiledFusedLogitsLoss.apply(*words) / (ids.shape[1] - 1)
        loss.backward()
        return loss.detach()

    return step


HOW = {"as it is": whole, "autochunk": ours, "DeepSpeed's tiles": deepspeed}


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def measured(how: str, seqlen: int) -> dict[str, float]:
    """In this process: the peak in MiB, the loss of all ranks and the CPU seconds of a step."""
    if ranks() > 1:
        import deepspeed

        from wf_deepspeed.cpu import without_shared_memory_op

        with without_shared_memory_op():
            deepspeed.init_distributed("gloo", verbose=False)
    size = Size()
    step = HOW[how](seqlen // ranks(), size)
    step(torch.zeros(1, WARM, dtype=torch.int64))
    ids = drawn_ids(seqlen, size)
    reset_peak()
    start = time.process_time()
    loss = step(ids)
    told = {"MiB": peak() / MIB, "s": time.process_time() - start}
    if ranks() > 1:
        dist.all_reduce(loss)
    return told | {"loss": float(loss)}


def drawn_ids(seqlen: int, size: Size) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (1, seqlen), generator=draw).to(size.device)


def on_gpu(lengths: tuple[int, int]) -> None:
    """The table of one rank on a GPU; what DeepSpeed registers stays, so its tiles come last."""
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"\n| how | peak MiB, {lengths[0]} tokens | {lengths[1]} | KiB a token | ms | loss |")
    print("|---|---|---|---|---|---|", flush=True)
    for how in HOW:
        try:
            low, high = (measured_on_gpu(how, length) for length in lengths)
        except Exception:
            traceback.print_exc()
            continue
        slope = (high["MiB"] - low["MiB"]) * 1024 / (lengths[1] - lengths[0])
        cells = f"{low['MiB']:.0f} | {high['MiB']:.0f} | {slope:.1f} | {high['ms']:.0f}"
        print(f"| {how} | {cells} | {high['loss']:.6f} |", flush=True)


def measured_on_gpu(how: str, seqlen: int) -> dict[str, float]:
    """The peak beyond weights and their gradients in MiB, the median ms of a step, and its loss."""
    gc.collect()
    torch.cuda.empty_cache()
    step, ids = HOW[how](seqlen, ON_GPU), drawn_ids(seqlen, ON_GPU)
    loss = step(ids)  # gradients are there from here on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, took = torch.cuda.memory_allocated(), list[float]()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(ids)
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    peaked = torch.cuda.max_memory_allocated() - before
    return {"MiB": peaked / MIB, "ms": median(took), "loss": float(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs=2, help="tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # a fresh process: how, length
    args = parser.parse_args()
    if args.device == "cuda":
        first, last = args.lengths or (8192, 16384)
        return on_gpu((first, last))
    args.lengths = args.lengths or (4096, 8192)
    torch.set_num_threads(1)
    if args.rank:
        told = json.dumps(measured(args.rank[0], int(args.rank[1])))
        print(f"\n{told}", flush=True)
        os._exit(0)  # what gloo would say on its way out is no figure
    print(f"torch {torch.__version__}, {cpu_name()}, one thread a rank; {cores_and_load()} before.")
    first, last = args.lengths
    print(f"\n| ranks | how | peak MiB, {first} tokens | {last} | KiB a token | CPU s | loss |")
    print("|---|---|---|---|---|---|---|")
    expected = None
    for count in args.ranks:
        for how in HOW:
            low, high = (in_fresh_processes(how, length, count) for length in args.lengths)
            expected = expected or high["loss"]
            if abs(high["loss"] / expected - 1) > 1e-5:
                raise RuntimeError(f"{how} computes another loss: {high['loss']}, not {expected}")
            slope = (high["MiB"] - low["MiB"]) * 1024 / (last - first)
            cells = (count, how, f"{low['MiB']:.0f}", f"{high['MiB']:.0f}", f"{slope:.1f}")
            told = " | ".join(map(str, cells))
            print(f"| {told} | {high['s']:.1f} | {high['loss']:.5f} |", flush=True)


def in_fresh_processes(how: str, length: int, count: int) -> dict[str, float]:
    """What the ranks measured: of each figure the largest."""
    command = [sys.executable, __file__, "--rank", how, str(length)]
    told = [json.loads(line) for line in last_lines(command, count, {})]
    return {name: max(each[name] for each in told) for name in told[0]}


if __name__ == "__main__":
    main()
