"""A training step with tiles of MLPs, logits and loss: ours beside DeepSpeed's, as ALST does it.

    OMP_NUM_THREADS=1 python benchmarks/tiled_training.py > benchmarks/results/tiled_training.md

A small Llama in one process, its layers recomputed, without an optimizer. Peaks are those of fresh
processes (VmHWM of a step after a short one), at two lengths, so that what does not grow with the
tokens drops out of the slope. DeepSpeed's tiles have as many rows as the hidden size, as in its
example.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import cores_and_load, cpu_name, peak, reset_peak
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from wf_backends.autochunk import autochunk

HIDDEN, VOCABULARY, WARM = 256, 16384, 64
SHAPE = {"intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
Step = Callable[[Tensor], Tensor]  # ids -> the loss, after its backward
MIB = 1 << 20


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(VOCABULARY, HIDDEN, max_position_embeddings=1 << 15, **SHAPE)
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def whole(seqlen: int) -> Step:
    """The model as it is."""
    return own_loss(llama())


def ours(seqlen: int) -> Step:
    """What `autochunk` finds within `max_slowdown`."""
    ids = torch.zeros(1, seqlen, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return own_loss(autochunk(llama(), kwargs=batch, max_slowdown=0.25))


def own_loss(model: Any) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return step


def deepspeed(seqlen: int) -> Step:
    """TiledMLP and TiledFusedLogitsLoss, as their docstrings show them."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    model, shards = llama(), math.ceil(seqlen / HIDDEN)

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(own: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: TiledMLP.apply(mlp, own, x, shards, list(own.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = tiled(layer.mlp)

    def loss_of(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(x).flatten(0, -2), labels.flatten(), reduction="sum")

    def step(ids: Tensor) -> Tensor:
        hidden, head = model.model(input_ids=ids, use_cache=False).last_hidden_state, model.lm_head
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
        weights = [head.weight]
        words = (loss_of, head, hidden, labels, None, shards, weights, "sum")
        loss = TiledFusedLogitsLoss.apply(*words) / (ids.shape[1] - 1)
        loss.backward()
        return loss.detach()

    return step


HOW = {"as it is": whole, "autochunk": ours, "DeepSpeed's tiles": deepspeed}


def measured(how: str, seqlen: int) -> dict[str, float]:
    """In this process: the peak in MiB, the loss and the CPU seconds of a step."""
    step = HOW[how](seqlen)
    step(torch.zeros(1, WARM, dtype=torch.int64))
    ids = torch.randint(VOCABULARY, (1, seqlen), generator=torch.Generator().manual_seed(1))
    reset_peak()
    start = time.process_time()
    loss = float(step(ids))
    return {"MiB": peak() / MIB, "loss": loss, "s": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs=2, default=(4096, 8192), help="tokens")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)  # a fresh process: how, length
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        print(json.dumps(measured(args.rank[0], int(args.rank[1]))))
        return
    print(f"torch {torch.__version__}, {cpu_name()}, one thread; {cores_and_load()} before.\n")
    first, last = args.lengths
    print(f"| how | peak MiB, {first} tokens | {last} tokens | KiB a token | CPU s | loss |")
    print("|---|---|---|---|---|---|")
    expected = None
    for how in HOW:
        low, high = (in_fresh_process(how, length) for length in args.lengths)
        expected = expected or high["loss"]
        if abs(high["loss"] / expected - 1) > 1e-5:
            raise RuntimeError(f"{how} computes another loss: {high['loss']}, not {expected}")
        slope = (high["MiB"] - low["MiB"]) * 1024 / (last - first)
        cells = (how, f"{low['MiB']:.0f}", f"{high['MiB']:.0f}", f"{slope:.1f}", f"{high['s']:.1f}")
        print(f"| {' | '.join(cells)} | {high['loss']:.5f} |", flush=True)


def in_fresh_process(how: str, length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--rank", how, str(length)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{how}, {length} tokens: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
