"""Models of media_models.py, attached on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wf_transformers
from tests.helpers import run_threads
from tests.integrations.media_models import build
from tests.integrations.transformers_models import sequence_parallel


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in inputs.items() if k != "labels"}


def on_ranks(
    family: str, fn: Callable[[Any, Any], Any], size: int = 2, layout: str = "zigzag"
) -> list[Any]:
    """fn(model, sp) of an attached model on each rank."""

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm, layout), build(family)
        wf_transformers.attach_model(model, sp)
        return fn(model, sp)

    return run_threads(size, rank)
