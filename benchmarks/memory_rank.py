"""One rank of memory_budget.py: trains a small model and prints the bytes of memory at its peak.

    python benchmarks/memory_rank.py '{"seqlen": 4096, "layers": 4, "dtype": "float32",
        "shape": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 256,
                  "num_attention_heads": 4, "num_key_value_heads": 2}, "wallfacer": {}}'

Other keys of a case: "family" (of transformers' classes, default "Llama"), "tile" (rows of a tile),
"activation_checkpointing" (as wf_transformers takes it), "stage" and "buckets" (of DeepSpeed's
ZeRO), "device".
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
import transformers
from measure import peak, reset_peak
from torch import Tensor
from transformers import AutoModelForCausalLM

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends.autochunk.tiling import Tiles, tile_modules

WARM_UP_TOKENS = 64


def _ignore(part: str) -> None:
    """The default of `after`."""


class Step(Protocol):
    """A training step; it calls `after` at the end of "forward", "backward" and perhaps "step"."""

    def __call__(self, seqlen: int, after: Callable[[str], None] = _ignore) -> None: ...


def train(case: dict[str, Any]) -> int:
    """Bytes of this process at the peak of a step."""
    step = warmed_up_step(case)
    reset_peak()
    for _ in range(2):
        step(case["seqlen"])
    return peak()


def warmed_up_step(case: dict[str, Any]) -> Step:
    """The step of a case, after two short ones."""
    step = deepspeed_step(case) if "stage" in case else plain_step(case)
    for _ in range(2):  # allocates optimizer states; DeepSpeed learns the order of parameters
        step(WARM_UP_TOKENS)
    return step


def make_model(case: dict[str, Any]) -> Any:
    """A model of the case's family and sizes, on the case's device."""
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": 1 << 17, "num_hidden_layers": case["layers"]}
    config_class = getattr(transformers, f"{case.get('family', 'Llama')}Config")
    with torch.device(case.get("device", "cpu")):
        model = AutoModelForCausalLM.from_config(config_class(**sizes | case["shape"]))
    return model.to(getattr(torch, case["dtype"])).train()


def plain_step(case: dict[str, Any]) -> Step:
    """A step with attention over the ranks of the job, without an optimizer."""
    sp = SequenceParallel(SequenceParallelConfig.from_dict(case["wallfacer"]))
    model, tile_rows = make_model(case), case.get("tile", 0)
    checkpointing = case.get("activation_checkpointing")
    handle = wf_transformers.attach(model, sp, activation_checkpointing=checkpointing)
    if not tile_rows:
        wf_transformers.WholeBatchHooks(model, handle)

    def step(seqlen: int, after: Callable[[str], None] = _ignore) -> None:
        batch = draw_batch(model, seqlen)
        loss = model(**batch, use_cache=False).loss
        after("forward")
        loss.backward()
        after("backward")

    def tiled_step(seqlen: int, after: Callable[[str], None] = _ignore) -> None:
        shard = sp.shard_batch(draw_batch(model, seqlen))
        num_valid = torch.tensor(seqlen - 1)
        kwargs = wf_transformers.forward_kwargs(model, shard, num_valid=num_valid)
        tiled = tile_modules(model, tiles(model, -(-seqlen // tile_rows)))
        loss = model(**kwargs).loss
        after("forward")
        loss.backward()
        after("backward")
        tiled.remove()

    return tiled_step if tile_rows else step


def draw_batch(model: Any, seqlen: int) -> dict[str, Tensor]:
    """A whole batch of one sequence, (1, seqlen)."""
    ids = torch.randint(model.config.vocab_size, (1, seqlen), device=model.device)
    return {"input_ids": ids, "labels": ids}


def tiles(model: Any, num_tiles: int) -> list[Tiles]:
    """Every MLP, and logits and loss, in `num_tiles` tiles of the sequence."""
    mlps = [f"model.layers.{index}.mlp" for index in range(len(model.model.layers))]
    tiled_mlps = [Tiles(name, 1, num_tiles) for name in mlps]
    return [*tiled_mlps, Tiles("lm_head", 1, num_tiles, loss=True)]


def deepspeed_step(case: dict[str, Any]) -> Step:
    """A step of DeepSpeed's engine with AdamW."""
    import wf_deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    block = dict(case["wallfacer"])
    if "activation_checkpointing" in case:
        block["activation_checkpointing"] = case["activation_checkpointing"]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case["stage"], **case["buckets"]},
        "wallfacer": block,
    }
    with wf_deepspeed.without_shared_memory_op():
        model = make_model(case)
        adam = torch.optim.AdamW(model.parameters(), fused=True)  # in place, as on GPUs
        engine, *_ = wf_deepspeed.initialize(model=model, optimizer=adam, config=config)
    wf_transformers.WholeBatchHooks(engine.module, engine.wallfacer)

    def step(seqlen: int, after: Callable[[str], None] = _ignore) -> None:
        loss = engine(**draw_batch(model, seqlen), use_cache=False).loss
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
        peak_bytes = train(json.loads(sys.argv[1]))
    print(peak_bytes, flush=True)
    os._exit(0)  # without the messages that DeepSpeed and gloo print when a process ends


if __name__ == "__main__":
    main()
