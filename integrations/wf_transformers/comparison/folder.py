"""What `wallfacer verify` asks for: a model of a folder on ranks that are threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, run_threads
from wf_transformers.comparison.verify import Report, verify
from wf_transformers.entry import attach_model
from wf_transformers.handle import Handle
from wf_transformers.shape import refused_by_name
from wf_transformers.whole_batches.hooks import WholeBatchHooks

WEIGHTS = ("*.safetensors", "*.bin")
TIMEOUT = 3600.0  # seconds


def verify_folder(folder: Path, config: SequenceParallelConfig) -> str:
    """Compare the model of a folder on `config.sequence_parallel_size` threads with it alone.

    Args:
        folder: what `save_pretrained` wrote; without weights, these are drawn.

    Returns:
        What was found, in a sentence.

    Raises:
        ValueError: if the folder cannot be read or the model cannot be run on a drawn batch.
        NotImplementedError: where the model on the ranks gives something else than on one.
    """
    drawn = not any(list(folder.glob(kind)) for kind in WEIGHTS)
    with refused_by_name(folder):
        model = _model(folder, drawn)

    def rank(comm: Communicator) -> Report | None:
        sp, mine = SequenceParallel(config, comm), _sharing_parameters(model)
        whole = model.main_input_name == "input_ids"

        def attached() -> Handle:
            handle = attach_model(mine, sp)
            if whole:
                WholeBatchHooks(mine, handle)
            return handle

        return verify(mine, sp, attached, "strict", whole_batches=whole)

    report = run_threads(config.sequence_parallel_size, rank, timeout=TIMEOUT)[0]
    assert report is not None, "strict, and on several ranks"
    weights = " with drawn weights" if drawn else ""
    return (
        f"{type(model).__name__}{weights} on {config.sequence_parallel_size} ranks gives what it "
        f"gives on one: {report.compared} outputs, losses and gradients; largest error "
        f"{report.largest:.1e} of the largest element ({report.where})"
    )


def _model(folder: Path, drawn: bool) -> Any:
    config = AutoConfig.from_pretrained(folder)
    names = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, names[0], None)
    if not drawn:
        make = kind or AutoModelForCausalLM
        return make.from_pretrained(folder, torch_dtype=torch.float32)
    torch.manual_seed(0)
    return (kind(config) if kind else AutoModelForCausalLM.from_config(config)).float()


def _sharing_parameters(model: nn.Module) -> Any:
    """A copy of the model whose parameters have gradients of their own, and no memory."""
    shared = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, shared)
