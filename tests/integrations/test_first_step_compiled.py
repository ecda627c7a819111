"""Layers and models that torch compiles; ranks are processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.helpers import run_processes  # noqa: E402
from tests.integrations import encoder_models  # noqa: E402
from tests.integrations.deepspeed_jobs import python  # noqa: E402
from tests.integrations.transformers_models import batch, sequence_parallel  # noqa: E402
from tests.integrations.verify_models import llama  # noqa: E402
from wf_transformers import attach  # noqa: E402
from wf_transformers.batch import forward_kwargs  # noqa: E402

pytestmark = pytest.mark.processes


def graphs_before_and_after_the_first_batch(comm: Any) -> tuple[int, int]:
    """How many graphs torch has compiled; an error if the first batch cannot be compared."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = llama()
    del model.model.layers[1:]
    handle = attach(model, sequence_parallel(comm), verify="strict")
    for layer in model.model.layers:
        layer.compile(backend=keep, dynamic=True)
    local = handle.shard_batch(batch())
    compared = len(graphs)
    model(**forward_kwargs(model, local))
    return compared, len(graphs)


def test_the_first_batch_is_compared_without_compiling_its_layers() -> None:
    ranks = run_processes(2, graphs_before_and_after_the_first_batch, start=python())
    for compared, trained in ranks:
        assert compared == 0 and trained > 0


def losses_of_a_vit(comm: Any) -> list[float]:
    """Of a batch, before the model is compiled as a whole and after."""
    model, whole = encoder_models.build("vit"), encoder_models.ENCODERS["vit"].batch
    attach(model, sequence_parallel(comm), verify=False)
    losses = [float(model(**whole).loss)]
    model.compile(backend="eager")  # the Trainer's torch_compile=True
    return [*losses, float(model(**whole).loss)]


def test_a_model_that_is_cut_inside_is_compiled_as_a_whole() -> None:
    for before, after in run_processes(2, losses_of_a_vit, start=python()):
        assert after == pytest.approx(before, rel=1e-9)
