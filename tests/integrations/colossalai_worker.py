"""A job of several ranks: `python colossalai_worker.py FOLDER RANKS` runs FOLDER/cases.json.

Everything is imported once, then the ranks are forked. Rank 0's result of a case is FOLDER/NAME.pt.
A case is a dict:

    name, wallfacer     its name, and WallFacer's configuration
    run                 what to run with it, of RUNS: "compared" unless given
    family, batch       of the model and of the batches (colossalai_models.py): "llama", "plain"
    plugin, options     ColossalAI's plugin and its arguments: "hybrid", {}
    optimizer, steps    "sgd", 20
    checkpointing       enabled "before" or "after" the booster wraps the model
    lazy, no_weights    the model is built lazily; its weights cannot be saved
    resume_with         WallFacer's configuration after the checkpoint of "resumed"
    config              a file with the configuration of WallFacer and ColossalAI
    mode, tp_size       of ColossalAI's own plugin in "colossalai_model_test"
"""

from __future__ import annotations

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
from colossalai.logging import disable_existing_loggers

from tests.helpers import destroy_groups
from tests.integrations import colossalai_faults as faults
from tests.integrations.colossalai_models import (
    batch,
    build,
    train_alone,
    train_alone_in_16_bits,
)
from tests.integrations.colossalai_training import OPTIMIZERS, Data, Training, steps_of
from wf_backends.autochunk.tiling.tiled_call import TiledCall
from wf_colossalai.cpu import cpu_accelerator
from wf_transformers.memory.checkpoints import inputs_on_host

REFERENCE_OPTIMIZERS = OPTIMIZERS | {
    "hybrid_adam": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
}
DTYPES_OF_16_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def compared(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train the case on all ranks, and the same model and data in one process on rank 0."""
    training = Training(case, folder)
    # a lazily built model draws its weights in another order
    start = training.weights("start") if case.get("lazy") else {}
    losses = training.mean_over_ranks(training.train(), case.get("steps", 20))
    modules = list(training.model.unwrap().modules())
    checkpoint_functions = [vars(module).get("_gradient_checkpointing_func") for module in modules]
    result = {
        "losses": losses,
        "gradients": training.first_gradients,
        "bytes": training.sp.report(),
        "weights": training.weights("end"),
        "offloads": inputs_on_host in [getattr(f, "func", None) for f in checkpoint_functions],
        "tiled": sum(isinstance(vars(module).get("forward"), TiledCall) for module in modules),
    }
    training.handle.remove()
    if dist.get_rank() == 0:
        options = case.get("options", {})
        arguments = training.data, training.optimizer_name, options.get("max_norm", 0.0)
        expected = one_process(*arguments, start) if start else one_process_cached(*arguments)
        result["expected"] = expected
        if options.get("precision") in DTYPES_OF_16_BITS:
            result["losses_in_16_bits"] = losses_of_one_process_in_16_bits(
                training.data, training.optimizer_name, options["precision"]
            )
    return result


def one_process(
    data: Data, optimizer: str, max_norm: float, start: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The reference: losses, first gradients and final weights, from the weights `start` on."""
    model = build(data[0])
    model.load_state_dict(start or model.state_dict())
    results = train_alone(model, steps_of(*data), REFERENCE_OPTIMIZERS[optimizer], max_norm)
    return dict(zip(("losses", "gradients", "weights"), results, strict=True))


@cache  # many cases share model and data
def one_process_cached(data: Data, optimizer: str, max_norm: float) -> dict[str, Any]:
    return one_process(data, optimizer, max_norm)


@cache
def losses_of_one_process_in_16_bits(data: Data, optimizer: str, precision: str) -> list[float]:
    model, dtype = build(data[0]), DTYPES_OF_16_BITS[precision]
    return train_alone_in_16_bits(model, steps_of(*data), REFERENCE_OPTIMIZERS[optimizer], dtype)


def resumed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train half of the steps, save, and train the others at another sequence-parallel size."""
    before = Training(case, folder)
    steps = case.get("steps", 20)
    half = steps // 2
    losses = before.train(0, half)
    path = folder / case["name"]
    before.booster.save_model(before.model, str(path / "model"), shard=True)
    before.booster.save_optimizer(before.optimizer, str(path / "optimizer"), shard=True)
    dist.barrier()
    before.handle.remove()
    after = Training(case | {"wallfacer": case["resume_with"]}, folder)
    after.booster.load_model(after.model, str(path / "model"))
    after.booster.load_optimizer(after.optimizer, str(path / "optimizer"))
    losses += after.mean_over_ranks(after.train(half, steps), half)
    result: dict[str, Any] = {"losses": losses, "weights": after.weights("end")}
    after.handle.remove()
    if dist.get_rank():
        return result
    # a smaller sequence-parallel size has more data-parallel ranks, which read more batches
    batches = steps_of(*before.data)[:half] + steps_of(*after.data)[half:]
    optimizer = REFERENCE_OPTIMIZERS[after.optimizer_name]
    expected = train_alone(build(after.family), batches, optimizer)
    keys = ("losses", "gradients", "weights")
    result["expected"] = dict(zip(keys, expected, strict=True))
    if dtype := DTYPES_OF_16_BITS.get(case.get("options", {}).get("precision")):
        model = build(after.family)
        result["losses_in_16_bits"] = train_alone_in_16_bits(model, batches, optimizer, dtype)
    return result


def differing(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The error where every rank brings another batch."""
    training = Training(case, folder)
    try:
        training.model(**batch(training.family, training.variant, dist.get_rank()))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


RUNS = {"compared": compared, "resumed": resumed, "differing": differing} | faults.RUNS


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
            result = RUNS[case.get("run", "compared")](case, folder)
            if rank == 0:
                torch.save(result, folder / f"{case['name']}.pt")
            dist.barrier()
            destroy_groups()


def rank_or_traceback(rank: int, ranks: int, folder: Path) -> None:
    # no rank outlives a job that is killed
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
