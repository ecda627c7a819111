"""One rank of a DeepSpeed job: gradients with and without tiles, at ZeRO 0 to 3.

autochunk_worker.py FOLDER: writes FOLDER/RANK.pt, {setting: (gradients, counts)}.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_module

import wf_deepspeed
import wf_transformers
from tests.integrations.deepspeed_jobs import text, tiny_llama
from tests.tiling.helpers import Collectives, error_message
from wf_backends.tiling import Tiles, tile_modules

STEPS = 2
SETTINGS = tuple(product(range(4), (False, True), (False, True)))
"""ZeRO stage, whether layers are recomputed, whether MLPs and loss are tiled."""


DOORS = tuple(product((1, 2), (False, True)))
"""Ranks that share a sequence, whether the block has "autochunk"."""


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    found = {setting: run(*setting) for setting in SETTINGS}
    found |= {f"door {size} {tiled}": by_the_door(size, tiled) for size, tiled in DOORS}
    found["error"] = error_without_leaves()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STEPS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }


def run(stage: int, recompute: bool, tiled: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    """Full gradients of an optimizer step, and the collectives of its micro-batches."""
    model = tiny_llama(2)
    model = model.double() if stage in (1, 2) else model  # at the others DeepSpeed refuses it
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    names = [f"model.layers.{i}.mlp" for i in range(2)]
    tiles = [*(Tiles(name, 1, 3) for name in names), Tiles("lm_head", 1, 4, loss=True)]
    tile_modules(model, tiles if tiled else [])
    for name in names:
        set_z3_leaf_module(model.get_submodule(name), True)
    engine, *_ = deepspeed.initialize(model=model, config=config(stage))
    grads, counts = one_step(engine)
    engine.destroy()
    return grads, counts


def one_step(engine: Any) -> tuple[list[torch.Tensor], Counter[str]]:
    fired: list[int] = []
    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    batches = text(STEPS * dist.get_rank())
    with Collectives() as seen:
        for micro in range(STEPS):
            batch = next(batches)
            engine.backward(engine(batch["input_ids"], labels=batch["labels"]).loss)
            if micro < STEPS - 1:
                engine.step()
    grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
    return grads, seen.counts + Counter(gradients=len(fired))


def by_the_door(size: int, tiled: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    """As `run`, of `wf_deepspeed.initialize` at ZeRO 3; with a loss of the model's if it may."""
    block: dict[str, Any] = {"sequence_parallel_size": size}
    block |= {"autochunk": {"max_memory": 0.9, "max_slowdown": 0.5, "seqlen": 512}} if tiled else {}
    words = config(3) | {"wallfacer": block}
    model = tiny_llama(2, intermediate_size=160)
    engine, *_ = wf_deepspeed.initialize(model=model, config=words)
    batches = text(STEPS * engine.wallfacer.data_parallel_rank)
    with Collectives() as seen:
        for micro in range(STEPS):
            batch = next(batches)
            if size == 1:
                loss = engine(batch["input_ids"], labels=batch["labels"]).loss
            else:
                shard = engine.wallfacer.shard_batch(batch)
                logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
                loss = engine.wallfacer.loss(logits, shard["labels"])
            engine.backward(loss)
            if micro < STEPS - 1:
                engine.step()
    grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
    tiles = Counter(tiles=sum("forward" in vars(module) for module in model.modules()))
    engine.wallfacer.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    engine.destroy()
    return grads, seen.counts + tiles


def error_without_leaves() -> str:
    """What says so where DeepSpeed was not told to gather the MLP as a whole."""
    model = tiny_llama(1)
    tile_modules(model, [Tiles("model.layers.0.mlp", 1, 3)])
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    return error_message(lambda: engine(next(text(0))["input_ids"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
