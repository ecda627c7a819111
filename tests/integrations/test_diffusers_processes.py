"""Transformers of diffusers that torch compiles, and the scripts of docs/diffusers.md, in jobs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no attention registry"
)

import wf_diffusers  # noqa: E402
from tests import forked  # noqa: E402
from tests.docs.pages import blocks  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.diffusers_models import build  # noqa: E402
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402

pytestmark = pytest.mark.processes


def python() -> tuple[str, ...]:
    """`python` for a rank: a fork of a process that has imported torch's compiler and diffusers."""
    return forked.python("tests.helpers", __name__, "accelerate", "peft", "torch._dynamo")


def run_compiled_sample(comm: Any) -> None:
    """A forward of Wan under torch.compile equals one without."""
    model, kwargs = build("wan")
    kwargs = {key: x.float() if x.is_floating_point() else x for key, x in kwargs.items()}
    expected = model.float()(**kwargs).sample
    wf_diffusers.attach(model, sequence_parallel(comm))
    model.compile(backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(model(**kwargs).sample, expected)


def test_a_compiled_model_gives_the_sample_of_one_device() -> None:
    run_processes(2, run_compiled_sample, start=python())


def run_script_of_docs(comm: Any, line: str) -> None:
    ranks = {"RANK": comm.rank, "LOCAL_RANK": comm.rank}
    sizes = {"WORLD_SIZE": comm.size, "LOCAL_WORLD_SIZE": comm.size}
    for name, value in (ranks | sizes | {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}).items():
        os.environ[name] = str(value)  # as torchrun does; nobody opens the port
    page = "docs/diffusers.md"
    texts = [block.text for block in blocks("python") if block.page == page]
    (script,) = [text for text in texts if line in text]
    exec(compile(script, page, "exec", dont_inherit=True), {"__name__": "__main__"})


@pytest.mark.parametrize("line", ["DistributedDataParallel(model)", "Accelerator("])
def test_the_scripts_of_docs_diffusers_run_on_four_processes(line: str) -> None:
    run_processes(4, run_script_of_docs, line, start=python())
