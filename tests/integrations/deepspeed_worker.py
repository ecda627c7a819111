"""One rank of a job: runs the cases of FOLDER/cases.json one after the other.

python deepspeed_worker.py FOLDER; rank 0 writes FOLDER/NAME.pt for each case. A case has a "name",
the DeepSpeed JSON as "config", the number of "steps", and of "sequences" per step over all ranks;
and optionally "layers", "model" (more keys of its config), "average" of the reference ("token" or
"sequence"), "checkpointing", "compile", the folders to "save" to, "load" from (with its "tag"), and
take "pretrained" weights from.
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
from tests.integrations.deepspeed_jobs import dense_loss_sum, tiny_llama, token_batches
from wf_transformers.memory.checkpoints import inputs_on_host


def main(folder: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with wf_deepspeed.without_shared_memory_op():
        deepspeed.init_distributed("gloo")
    for case in json.loads((folder / "cases.json").read_text()):
        result = run(case)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{case['name']}.pt")
        if dist.get_world_size() > 1:  # on one rank DeepSpeed reuses the group that it made
            destroy_groups()
    dist.barrier()
    dist.destroy_process_group()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return losses, gradient norms, bytes sent and final weights of one case."""
    model = load_pretrained(case) if "pretrained" in case else build_random(case)
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
    first_step = 0
    if case.get("load"):
        _, client_state = engine.load_checkpoint(case["load"], tag=case.get("tag"))
        first_step = client_state["step"]
    losses, norms = [], []
    for step in range(first_step, case["steps"]):
        loss, norm = train_step(engine, case, step * case["sequences"])
        losses.append(loss)
        norms.append(norm)
    if case.get("save"):
        engine.save_checkpoint(case["save"], tag="saved", client_state={"step": case["steps"]})
    sent = engine.wallfacer.report() if hasattr(engine, "wallfacer") else {}
    recompute = getattr(model.model, "_gradient_checkpointing_func", None)
    result = {
        "first_step": first_step,
        "losses": losses,
        "norms": norms,
        "sent": sum(sent.values()),
        "message_labels": sorted(sent),
        "weights": full_weights(engine),
        "partitioned": partitioned,
        "compiled": engine.is_compiled,
        "offloads": getattr(recompute, "func", None) is inputs_on_host,
    }
    if hasattr(engine, "wallfacer"):
        engine.wallfacer.remove()
    engine.destroy()
    return result


def build_random(case: dict[str, Any]) -> Any:
    return tiny_llama(case.get("layers", 2), **case.get("model", {}))


def load_pretrained(case: dict[str, Any]) -> Any:
    """Load the model from a folder; at ZeRO 3 transformers does so under `deepspeed.zero.Init`."""
    config = HfDeepSpeedConfig(case["config"])  # transformers holds a weak reference to it
    model = LlamaForCausalLM.from_pretrained(case["pretrained"])
    del config
    return model


def deepspeed_checkpoint(layer: Any, hidden: torch.Tensor, *args: Any) -> tuple[Any]:
    """Call DeepSpeed's checkpoint, which partitions no None, for the hidden state alone.

    It unpacks a tuple of one, which transformers expects.
    """
    return (deepspeed.checkpointing.checkpoint(lambda x: layer(x, *args), hidden),)


def train_step(engine: Any, case: dict[str, Any], first: int) -> tuple[float, float]:
    """Take one optimizer step over the sequences from number `first` on; return loss and norm."""
    if not hasattr(engine, "wallfacer"):
        batches = list(islice(token_batches(first), case["sequences"]))
        return reference_step(engine, batches, case.get("average", "sequence"))
    wallfacer = engine.wallfacer
    group, num_groups = wallfacer.data_parallel_rank, wallfacer.data_parallel_size
    batches = islice(token_batches(first), group, case["sequences"], num_groups)
    shards = [wallfacer.shard_batch(batch) for batch in batches]
    by_token = wallfacer.block.loss_average == "token"
    valid = wallfacer.count_valid(shards) if by_token and len(shards) > 1 else None
    total = torch.zeros(())
    norm = 0.0
    for shard in shards:
        logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
        loss = wallfacer.loss(logits, shard["labels"], valid)
        norm = backward_and_step(engine, loss)
        total += loss.detach().float()
    return float(wallfacer.mean(total / len(shards))), norm


def backward_and_step(engine: Any, loss: torch.Tensor) -> float:
    """Return the gradient norm before clipping, which DeepSpeed does not report at ZeRO 0."""
    engine.backward(loss)
    if engine.zero_optimization_stage():
        engine.step()
        return float(engine.get_global_grad_norm() or 0)  # none before the last micro-batch
    grads = [p.grad.flatten() for p in engine.module.parameters()]
    norm = float(torch.cat(grads).double().norm())
    engine.step()
    return norm


def reference_step(engine: Any, batches: list[dict[str, Any]], average: str) -> tuple[float, float]:
    """Take one step on one rank with dense attention, accumulating gradients over all batches."""
    with torch.no_grad():
        counts = [dense_loss_sum(engine, batch)[1] for batch in batches]
    total = norm = 0.0
    for batch, count in zip(batches, counts, strict=True):
        weight = len(batches) / sum(counts) if average == "token" else 1 / count
        loss = dense_loss_sum(engine, batch)[0] * weight
        norm = backward_and_step(engine, loss)
        total += float(loss.detach())
    return total / len(batches), norm


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of all parameters in float32, gathered from all ranks at ZeRO 3."""
    parameters = dict(engine.module.named_parameters())
    gather = contextlib.nullcontext()
    if engine.zero_optimization_stage() == 3:
        gather = GatheredParameters(list(parameters.values()))
    with gather:
        return {name: p.detach().float().clone() for name, p in parameters.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
