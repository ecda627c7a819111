"""One rank of a DeepSpeed job: gradients and collectives with and without tiles, at ZeRO 0 to 3.

autochunk_worker.py FOLDER: writes FOLDER/RANK.pt, a dict:

    "zero"     {(stage, recompute, tiled): (gradients, counts)}, tiles applied by `tile_modules`
    "entry"    {(sequence_parallel_size, tiled): (gradients, counts)}, tiles of the JSON's block
    "error"    the message of ZeRO 3 if it gathers parts of a tiled module
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_module

import wf_deepspeed
import wf_transformers
from tests.autochunk.tiling.helpers import Collectives, error_message, tiled_modules
from tests.integrations.deepspeed_jobs import tiny_llama, token_batches
from wf_backends.autochunk.tiling import Tiles, tile_modules

MICRO_BATCHES = 2
STAGE_AND_RECOMPUTE = [(0, False), (1, True), (2, False), (3, False), (3, True)]
"""ZeRO stages, and whether layers are recomputed: only ZeRO 3 does something in that."""
Result = tuple[list[torch.Tensor], Counter[str]]
"""Gradients of an optimizer step, and counts of what happened in it."""


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    zero = {
        (stage, recompute, tiled): step_with_tile_modules(stage, recompute, tiled)
        for stage, recompute in STAGE_AND_RECOMPUTE
        for tiled in (False, True)
    }
    entry = {setting: step_with_block(*setting) for setting in product((1, 2), (False, True))}
    results = {"zero": zero, "entry": entry, "error": error_of_zero_3_without_leaf_modules()}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    }


def step_with_tile_modules(stage: int, recompute: bool, tiled: bool) -> Result:
    """A step whose MLPs and loss are tiled; counts collectives and accumulated gradients."""
    model = tiny_llama(2)
    model = model.double() if stage in (1, 2) else model  # DeepSpeed refuses float64 at 0 and 3
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mlps = [f"model.layers.{i}.mlp" for i in range(2)]
    tiles = [*(Tiles(name, 1, 3) for name in mlps), Tiles("lm_head", 1, 4, loss=True)]
    tile_modules(model, tiles if tiled else [])
    for name in mlps:
        set_z3_leaf_module(model.get_submodule(name), True)
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(stage))
    accumulated: list[str] = []
    for name, parameter in engine.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.append(name))

    def loss_of(batch: Any) -> torch.Tensor:
        return engine(batch["input_ids"], labels=batch["labels"]).loss

    grads, counts = optimizer_step(engine, MICRO_BATCHES * dist.get_rank(), loss_of)
    engine.destroy()
    return grads, counts + Counter(gradients=len(accumulated))


def step_with_block(sequence_parallel_size: int, tiled: bool) -> Result:
    """A step of `wf_deepspeed.initialize` at ZeRO 3; counts collectives and tiled modules.

    On one rank the model computes the loss, on two `engine.wallfacer.loss`.
    """
    block: dict[str, Any] = {"sequence_parallel_size": sequence_parallel_size}
    if tiled:
        block["autochunk"] = {"max_memory": 0.9, "max_slowdown": 0.5, "seqlen": 512}
    model = tiny_llama(2, intermediate_size=160)
    config = deepspeed_config(3) | {"wallfacer": block}
    engine, *_ = wf_deepspeed.initialize(model=model, config=config)

    def loss_of(batch: Any) -> torch.Tensor:
        if sequence_parallel_size == 1:
            return engine(batch["input_ids"], labels=batch["labels"]).loss
        shard = engine.wallfacer.shard_batch(batch)
        logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
        return engine.wallfacer.loss(logits, shard["labels"])

    first_batch = MICRO_BATCHES * engine.wallfacer.data_parallel_rank
    grads, counts = optimizer_step(engine, first_batch, loss_of)
    counts += Counter(tiles=len(tiled_modules(model)))
    engine.wallfacer.remove()
    assert tiled_modules(model) == []
    engine.destroy()
    return grads, counts


def optimizer_step(engine: Any, first_batch: int, loss_of: Callable[[Any], torch.Tensor]) -> Result:
    """The backwards of a step's batches; gradients are read before the last `engine.step()`."""
    batches = token_batches(first_batch)
    with Collectives() as collectives:
        for micro_batch in range(MICRO_BATCHES):
            engine.backward(loss_of(next(batches)))
            if micro_batch < MICRO_BATCHES - 1:
                engine.step()
    grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
    return grads, collectives.counts


def error_of_zero_3_without_leaf_modules() -> str:
    """Of a tiled MLP that DeepSpeed was not told to gather as a whole."""
    model = tiny_llama(1)
    tile_modules(model, [Tiles("model.layers.0.mlp", 1, 3)])
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(3))
    return error_message(lambda: engine(next(token_batches(0))["input_ids"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
