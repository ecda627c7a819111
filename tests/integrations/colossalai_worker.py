"""A job of several ranks: `python colossalai_worker.py FOLDER RANKS` runs FOLDER/cases.json.

Everything is imported once, then the ranks are forked. A case's result is in FOLDER/NAME.pt.
"""

from __future__ import annotations

import copy
import ctypes
import json
import multiprocessing
import signal
import sys
import traceback
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.lazy import LazyInitContext
from colossalai.logging import disable_existing_loggers
from colossalai.nn.optimizer import HybridAdam

import wf_colossalai
from tests.helpers import destroy_groups
from tests.integrations import colossalai_faults as faults
from tests.integrations.colossalai_models import alone, alone_in_16_bits, batch, build, total
from wf_backends.tiling.tiled_call import TiledCall
from wf_colossalai.cpu import cpu_accelerator
from wf_transformers.checkpoints import inputs_on_host

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "hybrid_adam": partial(HybridAdam, lr=1e-3, weight_decay=0.01),
}
ALONE = OPTIMIZERS | {"hybrid_adam": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHER_PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": LowLevelZeroPlugin,
    "gemini": GeminiPlugin,
}

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>

Steps = list[list[dict[str, Any]]]
Data = tuple[str, str, int, int]  # as `steps_of` takes it


def steps_of(family: str, kind: str, size: int, count: int) -> Steps:
    """The batches of so many steps, `size` of each."""
    return [
        [batch(family, kind, 100 * step + part) for part in range(size)] for step in range(count)
    ]


class Run:
    """One case: a booster with its plugin, and what the test compares."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self.case, self.folder = case, folder
        self.family, self.kind = case.get("family", "llama"), case.get("kind", "plain")
        self.size = case["words"].get("sequence_parallel_size", 1)
        self.optimizer = case.get("optimizer", "sgd")
        with LazyInitContext() if case.get("lazy") else torch.enable_grad():
            model = build(self.family)
        if case.get("checkpointing") == "before":
            model.gradient_checkpointing_enable()
        self.plugin, self.handle = self._plugin(model)
        self.sp = self.handle.sp
        self.booster = Booster(plugin=self.plugin)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        self.model, self.update, *_ = self.booster.boost(model, optimizer)
        if case.get("checkpointing") == "after":
            self.model.unwrap().gradient_checkpointing_enable()

    def _plugin(self, model: Any) -> tuple[Any, Any]:
        if "config" in self.case:
            opened = wf_colossalai.from_config(self.case["config"], model)
            return opened.plugin, opened
        words, options = self.case["words"], self.case.get("options", {})
        kind = self.case.get("plugin", "hybrid")
        if kind == "hybrid":
            plugin = wf_colossalai.WallFacerPlugin(**words, **options)
            return plugin, plugin.handle
        handle = wf_colossalai.apply(model, words)
        return OTHER_PLUGINS[kind](**options), handle

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size)."""
        options = self.case.get("options", {})
        inner = self.size * options.get("tp_size", 1) * options.get("pp_size", 1)
        return dist.get_rank() // inner, dist.get_world_size() // inner

    def steps(self) -> Steps:
        """The batches of every step, one for each data-parallel rank."""
        return steps_of(self.family, self.kind, self.data_parallel[1], self.case.get("steps", 20))

    def train(self, first: int = 0, last: int | None = None) -> list[float]:
        """Losses of steps first..last on the ranks that have them."""
        losses = []
        for step, batches in enumerate(self.steps()[first:last]):
            loss = self._backward(copy.deepcopy(batches[self.data_parallel[0]]))
            if step == 0:
                self.gradients = self._gradients()
            self.update.step()
            self.update.zero_grad()
            losses += [] if loss is None else [loss.item()]
        return losses

    def _backward(self, mine: dict[str, Any]) -> Any:
        if getattr(self.plugin, "stage_manager", None) is None:
            loss = total(self.model(**mine))
            self.booster.backward(loss, self.update)
            return loss
        done = self.booster.execute_pipeline(
            iter([mine]), self.model, lambda out, _: total(out), self.update, return_loss=True
        )
        return done["loss"]

    def _gradients(self) -> dict[str, Any]:
        parameters = self.model.unwrap().named_parameters()
        return {n: p.grad.clone() for n, p in parameters if p.grad is not None}

    def mean_over_data(self, losses: list[float], count: int) -> list[float]:
        """The whole step's loss: the mean over data parallelism (ranks without losses add none)."""
        total = torch.tensor([sum(losses[i : i + 1], 0.0) for i in range(count)])
        ranks = torch.tensor(float(bool(losses)))
        dist.all_reduce(total)
        dist.all_reduce(ranks)
        return (total / ranks).tolist()

    def weights(self, name: str) -> dict[str, Any]:
        """The whole model, gathered by ColossalAI's own saving."""
        if self.case.get("no_weights"):
            return {}
        path = self.folder / f"{self.case['name']}_{name}.bin"
        self.booster.save_model(self.model, str(path), shard=False)
        dist.barrier()
        return torch.load(path) if dist.get_rank() == 0 else {}


def compared(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train the case, and the same without sequence parallelism on rank 0."""
    run = Run(case, folder)
    start = run.weights("start") if case.get("lazy") else {}  # lazily drawn in another order
    losses = run.mean_over_data(run.train(), case.get("steps", 20))
    result = {"losses": losses, "gradients": run.gradients, "bytes": run.sp.report()}
    result["weights"] = run.weights("end")
    functions = [vars(m).get("_gradient_checkpointing_func") for m in run.model.unwrap().modules()]
    result["offloads"] = inputs_on_host in [getattr(f, "func", None) for f in functions]
    forwards = [vars(module).get("forward") for module in run.model.unwrap().modules()]
    result["tiled"] = sum(isinstance(forward, TiledCall) for forward in forwards)
    run.handle.remove()
    if dist.get_rank() == 0:
        options = case.get("options", {})
        data = run.family, run.kind, run.data_parallel[1], case.get("steps", 20)
        asked = data, run.optimizer, options.get("max_norm", 0.0)
        result["expected"] = by_one(*asked, start) if start else by_one_as_drawn(*asked)
        if options.get("precision") in NARROW:
            result["narrow"] = by_one_in_16_bits(data, run.optimizer, options["precision"])
    return result


def by_one(
    data: Data, optimizer: str, max_norm: float, start: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What one process without sequence parallelism finds, from these weights on."""
    model = build(data[0])
    model.load_state_dict(start or model.state_dict())
    found = alone(model, steps_of(*data), ALONE[optimizer], max_norm)
    return dict(zip(("losses", "gradients", "weights"), found, strict=True))


@cache  # many cases are of the same model and data
def by_one_as_drawn(data: Data, optimizer: str, max_norm: float) -> dict[str, Any]:
    return by_one(data, optimizer, max_norm)


@cache
def by_one_in_16_bits(data: Data, optimizer: str, narrow: str) -> list[float]:
    return alone_in_16_bits(build(data[0]), steps_of(*data), ALONE[optimizer], NARROW[narrow])


def resumed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ten steps at one sequence-parallel size, saved, and ten more at another."""
    first = Run(case, folder)
    losses = first.train(0, 10)
    path = folder / case["name"]
    first.booster.save_model(first.model, str(path / "model"), shard=True)
    first.booster.save_optimizer(first.update, str(path / "optimizer"), shard=True)
    dist.barrier()
    first.handle.remove()
    second = Run(case | {"words": case["then"]}, folder)
    second.booster.load_model(second.model, str(path / "model"))
    second.booster.load_optimizer(second.update, str(path / "optimizer"))
    losses += second.mean_over_data(second.train(10, 20), 10)
    steps = first.steps()[:10] + second.steps()[10:]  # more data parallelism reads more
    result: dict[str, Any] = {"losses": losses, "weights": second.weights("end")}
    second.handle.remove()
    if dist.get_rank():
        return result
    expected = alone(build(second.family), steps, ALONE[second.optimizer])
    keys = ("losses", "gradients", "weights")
    if narrow := NARROW.get(case.get("options", {}).get("precision")):
        model, optimizer = build(second.family), ALONE[second.optimizer]
        result["narrow"] = alone_in_16_bits(model, steps, optimizer, narrow)
    return result | {"expected": dict(zip(keys, expected, strict=True))}


def differing(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The error where every rank brings a batch of its own."""
    run = Run(case, folder)
    try:
        run.model(**batch(run.family, run.kind, dist.get_rank()))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


KINDS = {"compared": compared, "resumed": resumed, "differing": differing} | faults.KINDS


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    """One rank: all cases, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    disable_existing_loggers()
    cases = json.loads((folder / "cases.json").read_text())
    with cpu_accelerator():
        for case in cases:
            result = KINDS[case.get("run", "compared")](case, folder)
            if rank == 0:
                torch.save(result, folder / f"{case['name']}.pt")
            dist.barrier()
            destroy_groups()


def rank_or_traceback(rank: int, ranks: int, folder: Path) -> None:
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # no rank outlives a job that is killed
    try:
        rank_main(rank, ranks, folder)
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        raise


def main(folder: Path, ranks: int) -> None:
    """Fork the ranks and wait; exit code 1 if one failed."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=rank_or_traceback, args=(rank, ranks, folder))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        for process in processes:
            process.join(0.1)
    for process in processes:
        process.join(1.0)
        process.kill()
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
