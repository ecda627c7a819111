"""How long AutoChunk plans: torch.export's graph, runs on fake tensors, and the search itself.

    OMP_NUM_THREADS=1 python benchmarks/autochunk_planning.py

CPU seconds of one plan for the least memory at most 10 % slower, after a smaller model was planned
in the same process (imports, and what torch keeps). In training: tiles of modules, logits and loss.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import autochunk_models as models
import torch
from autochunk_models import ModelAndInputs
from measure import attempt, cores_and_load, cpu_name, print_head, print_row
from torch import nn

from wf_backends.autochunk import planning
from wf_backends.autochunk.tiling import training

HEAD = ("model", "for", "torch.export", "on fake tensors", "search", "all")
GRAPH, RUNS = "graph", "runs on fake tensors"
PARTS = {  # the functions that are timed, by where they are called
    planning: {"capture": GRAPH, "unchunked_peak": RUNS},
    training: {"capture": GRAPH, "training_peak": RUNS, "refuse_row_counts": RUNS},
}
DEEP = partial(models.llama, layers=32)
CASES: tuple[tuple[str, Callable[[int, bool], ModelAndInputs], int], ...] = (
    ("Llama of 32 layers, 2,048 tokens", DEEP, 2048),
    ("GPT-2 of 12 layers, 1,024 tokens", partial(models.gpt2, layers=12), 1024),
    ("ViT-large, 384 x 384", partial(models.vit, layers=24), 384),
    ("Evoformer block, 64 residues", models.evoformer, 64),
    ("UNet2D, 64 x 64", models.unet, 64),
    ("UNet2DCondition, 64 x 64", models.unet_condition, 64),
)


def plan_inference(model: nn.Module, kwargs: dict[str, Any]) -> None:
    planning.memory_profiles(model.eval(), kwargs)


def plan_tiles(model: nn.Module, kwargs: dict[str, Any]) -> None:
    if "logits_to_keep" in kwargs:  # a causal language model: its step has a loss of all tokens
        kwargs = {"input_ids": kwargs["input_ids"], "labels": kwargs["input_ids"]}
    training.plan_training(model.train(), kwargs=kwargs)


PLANS = {"inference": plan_inference, "training": plan_tiles}


@contextmanager
def timed_parts() -> Iterator[Counter[str]]:
    """Inside, the CPU seconds of each part of planning are added up."""
    seconds: Counter[str] = Counter()

    def timed(part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.process_time() - start

    with ExitStack() as stack:
        for module, functions in PARTS.items():
            for name, part in functions.items():
                timed_function = partial(timed, part, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, timed_function))
        yield seconds


def print_case(name: str, purpose: str, model: nn.Module, kwargs: dict[str, Any]) -> None:
    with timed_parts() as seconds:
        start = time.process_time()
        PLANS[purpose](model, kwargs)
        total = time.process_time() - start
    search = total - seconds.total()
    row = seconds[GRAPH], seconds[RUNS], search, total
    print_row(name, purpose, *(f"{value:.1f}" for value in row))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {cpu_name()}, one thread; {cores_and_load()} before.\n")
    for plan in PLANS.values():
        plan(*models.llama(256, fused=True))
    print_head(*HEAD)
    for name, make, size in CASES:
        for fused, attention in ((False, "eager"), (True, "fused")):
            for purpose in PLANS:
                model, kwargs = make(size, fused)
                attempt(partial(print_case, f"{name}, {attention}", purpose, model, kwargs))


if __name__ == "__main__":
    main()
