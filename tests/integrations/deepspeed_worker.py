"""One rank of a job: runs the cases of FOLDER/cases.json one after the other.

A case: name, config (DeepSpeed JSON), steps, sequences (per step, over all ranks), and optionally
layers, model (more of its settings), average, checkpointing, save, load, tag, pretrained, compile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import wf_deepspeed
import wf_transformers
from tests.helpers import destroy_groups
from tests.integrations.deepspeed_jobs import dense_loss_sum, text, tiny_llama
from wf_transformers.checkpoints import inputs_on_host


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    for case in json.loads((folder / "cases.json").read_text()):
        result = run(case)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{case['name']}.pt")
        if dist.get_world_size() > 1:  # of one rank DeepSpeed keeps a group of its own
            destroy_groups()
    dist.barrier()
    dist.destroy_process_group()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms, bytes sent and final weights of one case."""
    model = pretrained(case) if "pretrained" in case else from_config(case)
    partitioned = any(hasattr(p, "ds_id") for p in model.parameters())
    if case.get("checkpointing") == "transformers":
        model.gradient_checkpointing_enable()
    if case.get("checkpointing") == "deepspeed":
        deepspeed.checkpointing.configure(None, deepspeed_config=case["config"])
        model.gradient_checkpointing_enable()
        model.model._gradient_checkpointing_func = deepspeed_checkpoint
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=case["config"]
    )
    if case.get("compile"):
        engine.compile(**case["compile"])
    first = 0
    if case.get("load"):
        _, client = engine.load_checkpoint(case["load"], tag=case.get("tag"))
        first = client["step"]
    losses, norms = [], []
    for step in range(first, case["steps"]):
        loss, norm = train(engine, case, step * case["sequences"])
        losses.append(loss)
        norms.append(norm)
    if case.get("save"):
        engine.save_checkpoint(case["save"], tag="saved", client_state={"step": case["steps"]})
    sent = engine.wallfacer.report() if hasattr(engine, "wallfacer") else {}
    result = {"first": first, "losses": losses, "norms": norms, "sent": sum(sent.values())}
    result |= {"labels": sorted(sent), "weights": weights(engine), "partitioned": partitioned}
    result["compiled"] = engine.is_compiled
    recompute = getattr(model.model, "_gradient_checkpointing_func", None)
    result["offloads"] = getattr(recompute, "func", None) is inputs_on_host
    if hasattr(engine, "wallfacer"):
        engine.wallfacer.remove()
    engine.destroy()
    return result


def from_config(case: dict[str, Any]) -> Any:
    """The model of the settings, drawn."""
    return tiny_llama(case.get("layers", 2), **case.get("model", {}))


def pretrained(case: dict[str, Any]) -> Any:
    """The model from a folder; at ZeRO 3 under `deepspeed.zero.Init`, as transformers does it."""
    alive = HfDeepSpeedConfig(case["config"])
    model = LlamaForCausalLM.from_pretrained(case["pretrained"])
    del alive  # transformers asks for it while it loads, and holds a weak reference
    return model


def deepspeed_checkpoint(layer: Any, *args: Any) -> tuple[Any]:
    """DeepSpeed hands back a single output bare; transformers takes the first of a tuple."""
    return (deepspeed.checkpointing.checkpoint(layer, *args),)


def train(engine: Any, case: dict[str, Any], first: int) -> tuple[float, float]:
    """One optimizer step over the sequences from number `first` on."""
    if not hasattr(engine, "wallfacer"):
        batches = list(islice(text(first), case["sequences"]))
        return dense(engine, batches, case.get("average", "sequence"))
    wallfacer = engine.wallfacer
    part, parts = wallfacer.data_parallel_rank, wallfacer.data_parallel_size
    mine = islice(text(first), part, case["sequences"], parts)
    shards = [wallfacer.shard_batch(batch) for batch in mine]
    token = wallfacer.block.loss_average == "token"
    valid = wallfacer.count_valid(shards) if token and len(shards) > 1 else None
    total = torch.zeros(())
    norm = 0.0
    for shard in shards:
        logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
        loss = wallfacer.loss(logits, shard["labels"], valid)
        norm = backward_and_step(engine, loss)
        total += loss.detach().float()
    return float(wallfacer.mean(total / len(shards))), norm


def backward_and_step(engine: Any, loss: torch.Tensor) -> float:
    """The gradient norm before clipping; DeepSpeed does not tell it at ZeRO 0."""
    engine.backward(loss)
    if engine.zero_optimization_stage():
        engine.step()
        return float(engine.get_global_grad_norm() or 0)  # none before the last micro-batch
    grads = [p.grad.flatten() for p in engine.module.parameters()]
    norm = float(torch.cat(grads).double().norm())
    engine.step()
    return norm


def dense(engine: Any, batches: list[dict[str, Any]], average: str) -> tuple[float, float]:
    """The reference: one rank, no sequence parallelism, gradient accumulation over all batches."""
    with torch.no_grad():
        counts = [dense_loss_sum(engine, batch)[1] for batch in batches]
    total = norm = 0.0
    for batch, count in zip(batches, counts, strict=True):
        share = len(batches) / sum(counts) if average == "token" else 1 / count
        loss = dense_loss_sum(engine, batch)[0] * share
        norm = backward_and_step(engine, loss)
        total += float(loss.detach())
    return total / len(batches), norm


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """All parameters, whole, float32."""
    parameters = dict(engine.module.named_parameters())
    whole = engine.zero_optimization_stage() == 3
    gathered = GatheredParameters(list(parameters.values())) if whole else contextlib.nullcontext()
    with gathered:
        return {name: p.detach().float().clone() for name, p in parameters.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
