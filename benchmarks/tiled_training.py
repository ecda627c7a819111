"""A training step with tiles of MLPs, logits and loss: ours, and DeepSpeed's as in ALST.

    OMP_NUM_THREADS=1 python benchmarks/tiled_training.py > benchmarks/results/tiled_training.md

A small Llama with recomputed layers and without an optimizer, on one rank and over several: our
tiles with WallFacer's attention, DeepSpeed's tiles with its UlyssesSPAttentionHF and as many rows
as the hidden size, as in its example. A peak is VmHWM of the largest of fresh processes in a step
after a short one; "KiB a token" is the slope of two lengths, without what does not grow.

    python benchmarks/tiled_training.py --device cuda

runs a wider model on one GPU in one process, measured by torch's allocator and CUDA events.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.autochunk.tiling import apply_training, plan_training

WARM_UP_TOKENS = 64
MIB = 1 << 20
Step = Callable[[Tensor], Tensor]  # whole ids (1, S) -> this rank's share of the loss


@dataclass(frozen=True)
class Size:
    """Sizes of the model, and its device."""

    hidden: int = 256
    vocabulary: int = 16384
    device: str = "cpu"


GPU_SIZE = Size(1024, 32768, "cuda")


def llama(size: Size) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=4 * size.hidden,
        num_hidden_layers=4, num_attention_heads=size.hidden // 32, max_position_embeddings=1 << 15,
    )  # fmt: skip
    with torch.device(size.device):
        model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def whole_step(local_tokens: int, size: Size) -> Step:
    """A step without tiles."""
    return training_step(llama(size))


def our_step(local_tokens: int, size: Size) -> Step:
    """A step with the tiles that AutoChunk plans for `local_tokens` tokens of a rank."""
    model = llama(size)
    ids = torch.zeros(1, local_tokens, dtype=torch.int64, device=size.device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = plan_training(model, (), batch, max_slowdown=0.25)
    if size.device == "cuda":
        print(f"<!-- {local_tokens} tokens, {plan.explain()} -->".replace("\n", ";"), flush=True)
    step = training_step(model)
    apply_training(model, plan)  # after attention is attached
    return step


def training_step(model: Any) -> Step:
    """A step of the model; over several ranks with our attention."""
    if ranks() == 1:

        def one_rank_step(ids: Tensor) -> Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return one_rank_step
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=ranks()))
    wf_transformers.attach(model, sp)

    def step(ids: Tensor) -> Tensor:
        shard = sp.shard_batch({"input_ids": ids, "labels": ids})
        num_valid = torch.tensor(ids.shape[1] - 1)
        loss = model(**wf_transformers.forward_kwargs(model, shard, num_valid=num_valid)).loss
        loss.backward()
        return loss.detach()

    return step


def deepspeed_step(local_tokens: int, size: Size) -> Step:
    """A step with TiledMLP and TiledFusedLogitsLoss, as in their docstrings, and with Ulysses."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        TiledFusedLogitsLoss,
        TiledMLP,
        UlyssesSPAttentionHF,
    )

    model = llama(size)
    num_tiles = math.ceil(local_tokens / size.hidden)
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks(), 1)

    def mlp_forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: TiledMLP.apply(mlp_forward, mlp, x, num_tiles, list(mlp.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = tiled(layer.mlp)

    def sum_of_losses(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(x).flatten(0, -2), labels.flatten(), reduction="sum")

    def step(ids: Tensor) -> Tensor:
        next_ids = F.pad(ids, (0, 1), value=-100)[:, 1:]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        local_ids, labels, position_ids = (
            x.chunk(ranks(), 1)[rank()] for x in (ids, next_ids, positions)
        )
        out = model.model(input_ids=local_ids, position_ids=position_ids, use_cache=False)
        head, hidden = model.lm_head, out.last_hidden_state
        loss = TiledFusedLogitsLoss.apply(
            sum_of_losses, head, hidden, labels, None, num_tiles, [head.weight], "sum"
        )
        loss = loss / (ids.shape[1] - 1)
        loss.backward()
        return loss.detach()

    return step


MAKE_STEP = {"as it is": whole_step, "autochunk": our_step, "DeepSpeed's tiles": deepspeed_step}


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def measured(variant: str, seqlen: int) -> dict[str, float]:
    """Figures of a step on this rank: the peak in MiB, CPU seconds, and the loss of all ranks."""
    if ranks() > 1:
        import deepspeed

        from wf_deepspeed.cpu import without_shared_memory_op

        with without_shared_memory_op():
            deepspeed.init_distributed("gloo", verbose=False)
    size = Size()
    step = MAKE_STEP[variant](seqlen // ranks(), size)
    step(torch.zeros(1, WARM_UP_TOKENS, dtype=torch.int64))
    ids = draw_ids(seqlen, size)
    measure.reset_peak()
    start = time.process_time()
    loss = step(ids)
    figures = {"MiB": measure.peak() / MIB, "s": time.process_time() - start}
    if ranks() > 1:
        dist.all_reduce(loss)
    return figures | {"loss": float(loss)}


def measured_on_gpu(variant: str, seqlen: int) -> dict[str, float]:
    """Figures of a step: the peak in MiB beyond weights and gradients, the median ms, the loss."""
    gc.collect()
    torch.cuda.empty_cache()
    step, ids = MAKE_STEP[variant](seqlen, GPU_SIZE), draw_ids(seqlen, GPU_SIZE)
    loss = step(ids)  # allocates the gradients
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = median(measure.cuda_seconds(lambda: step(ids)) for _ in range(3))
    peak_bytes = torch.cuda.max_memory_allocated() - before
    return {"MiB": peak_bytes / MIB, "ms": 1e3 * seconds, "loss": float(loss)}


def draw_ids(seqlen: int, size: Size) -> Tensor:
    """Random ids (1, seqlen), the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (1, seqlen), generator=generator).to(size.device)


def in_fresh_processes(variant: str, seqlen: int, num_ranks: int) -> dict[str, float]:
    """`measured` in a new process for each rank; the largest of each figure."""
    command = [sys.executable, __file__, "--rank", variant, str(seqlen)]
    figures = [json.loads(line) for line in measure.last_lines(command, num_ranks, {})]
    return {name: max(of_rank[name] for of_rank in figures) for name in figures[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs=2, help="tokens")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # a fresh process: how, length
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_table(args.lengths or (8192, 16384))
        return
    torch.set_num_threads(1)
    if args.rank:
        figures = json.dumps(measured(args.rank[0], int(args.rank[1])))
        print(f"\n{figures}", flush=True)
        os._exit(0)  # without the messages that gloo prints when a process ends
    cpu_table(args.lengths or (4096, 8192), args.ranks)


def cpu_table(lengths: Sequence[int], rank_counts: Sequence[int]) -> None:
    """Print the table of this machine's CPU.

    Raises:
        RuntimeError: if the loss of a row differs from the first row's.
    """
    machine = f"torch {torch.__version__}, {measure.cpu_name()}, one thread a rank"
    print(f"{machine}; {measure.cores_and_load()} before.\n")
    measure.print_head("ranks", "how", *peak_head(lengths), "CPU s", "loss")
    expected_loss = None
    for num_ranks in rank_counts:
        for variant in MAKE_STEP:
            low, high = (in_fresh_processes(variant, seqlen, num_ranks) for seqlen in lengths)
            loss = high["loss"]
            expected_loss = expected_loss or loss
            if not abs(loss / expected_loss - 1) <= 1e-5:  # also if it is NaN
                raise RuntimeError(f"{variant} computes another loss: {loss}, not {expected_loss}")
            cells = peak_cells(low, high, lengths)
            measure.print_row(num_ranks, variant, *cells, f"{high['s']:.1f}", f"{loss:.5f}")


def gpu_table(lengths: Sequence[int]) -> None:
    """Print the table of one rank on a GPU.

    DeepSpeed's tiles come last: DeepSpeed's attention stays registered in transformers.
    """
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    measure.print_head("how", *peak_head(lengths), "ms", "loss")
    for variant in MAKE_STEP:
        try:
            low, high = (measured_on_gpu(variant, seqlen) for seqlen in lengths)
        except Exception:
            traceback.print_exc()
            continue
        cells = peak_cells(low, high, lengths)
        measure.print_row(variant, *cells, f"{high['ms']:.0f}", f"{high['loss']:.6f}")


def peak_head(lengths: Sequence[int]) -> tuple[str, str, str]:
    return f"peak MiB, {lengths[0]} tokens", f"{lengths[1]}", "KiB a token"


def peak_cells(
    low: dict[str, float], high: dict[str, float], lengths: Sequence[int]
) -> tuple[str, str, str]:
    """The peaks at two lengths in MiB, and the KiB that a token adds."""
    slope = (high["MiB"] - low["MiB"]) * 1024 / (lengths[1] - lengths[0])
    return f"{low['MiB']:.0f}", f"{high['MiB']:.0f}", f"{slope:.1f}"


if __name__ == "__main__":
    main()
