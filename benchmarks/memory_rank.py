"""One rank of memory_budget.py: trains a small Llama and prints the most memory that it held.

python benchmarks/memory_rank.py '{"seqlen": 4096, "layers": 4, "words": {}}'
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from measure import peak, reset_peak
from transformers import LlamaConfig, LlamaForCausalLM

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends.tiling import Tiles, tile_modules

WARM = 64  # tokens of the steps that are not measured


def _unseen(part: str) -> None:
    """After a part of a step."""


class Step(Protocol):
    """A step of so many tokens. `after` is told when forward, backward and optimizer are done."""

    def __call__(self, seqlen: int, after: Callable[[str], None] = _unseen) -> None: ...


def train(case: dict[str, Any]) -> int:
    """Bytes at the peak of a step, everything that lives between steps included."""
    step = warmed_step(case)
    reset_peak()
    for _ in range(2):
        step(case["seqlen"])
    return peak()


def warmed_step(case: dict[str, Any]) -> Step:
    step = under_deepspeed(case) if "stage" in case else alone(case)
    for _ in range(2):  # allocates optimizer states, learns the order of parameters
        step(WARM)
    return step


def llama(case: dict[str, Any]) -> Any:
    """A Llama of the case's sizes, on the case's device."""
    torch.manual_seed(0)
    words = case["shape"] | {"num_hidden_layers": case["layers"]}
    with torch.device(case.get("device", "cpu")):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=1 << 17, **words))
    return model.to(getattr(torch, case["dtype"])).train()


def alone(case: dict[str, Any]) -> Step:
    """A step with attention over the ranks of the job, and no optimizer."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(case["words"]))
    model, tile = llama(case), case.get("tile", 0)
    checkpointing = case.get("activation_checkpointing")
    handle = wf_transformers.attach(model, sp, activation_checkpointing=checkpointing)
    if not tile:
        wf_transformers.WholeBatchHooks(model, handle)

    def step(seqlen: int, after: Callable[[str], None] = _unseen) -> None:
        ids = torch.randint(model.config.vocab_size, (1, seqlen), device=model.device)
        whole = {"input_ids": ids, "labels": ids}
        if not tile:
            loss = model(**whole, use_cache=False).loss
            after("forward")
            loss.backward()
            return after("backward")
        words = wf_transformers.forward_kwargs(
            model, sp.shard_batch(whole), num_valid=torch.tensor(seqlen - 1)
        )
        tiled = tile_modules(model, tiles(model, -(-seqlen // tile)))
        loss = model(**words).loss
        after("forward")
        loss.backward()
        after("backward")
        tiled.remove()

    return step


def tiles(model: Any, count: int) -> list[Tiles]:
    """All MLPs, and logits and loss, in so many tiles."""
    mlps = [f"model.layers.{index}.mlp" for index in range(len(model.model.layers))]
    return [*(Tiles(name, 1, count) for name in mlps), Tiles("lm_head", 1, count, loss=True)]


def under_deepspeed(case: dict[str, Any]) -> Step:
    """A step of DeepSpeed's engine and AdamW."""
    import wf_deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    checkpointing = case.get("activation_checkpointing")
    words = {"activation_checkpointing": checkpointing} if checkpointing else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case["stage"], **case["buckets"]},
        "wallfacer": case["words"] | words,
    }
    with wf_deepspeed.without_shared_memory_op():
        model = llama(case)
        adam = torch.optim.AdamW(model.parameters(), fused=True)  # in place, as on GPUs
        engine, *_ = wf_deepspeed.initialize(model=model, optimizer=adam, config=config)
    wf_transformers.WholeBatchHooks(engine.module, engine.wallfacer)

    def step(seqlen: int, after: Callable[[str], None] = _unseen) -> None:
        ids = torch.randint(model.config.vocab_size, (1, seqlen), device=model.device)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        after("forward")
        engine.backward(loss)
        after("backward")
        del loss
        engine.step()
        after("step")

    return step


def main() -> None:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            launch.init()
        found = train(json.loads(sys.argv[1]))
    print(found, flush=True)
    os._exit(0)  # what DeepSpeed and gloo would say on their way out is no figure


if __name__ == "__main__":
    main()
