"""`wallfacer verify`: compares a model of a folder on ranks that are threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, run_threads
from wf_transformers.comparison.verify import Report, verify
from wf_transformers.entry import attach_model
from wf_transformers.folders.shape import DTYPE, load_config, refused_by_name
from wf_transformers.folders.skeleton import keep_layers
from wf_transformers.handle import Handle
from wf_transformers.models import head_of
from wf_transformers.whole_batches.hooks import WholeBatchHooks

WEIGHTS = ("*.safetensors", "*.bin")
TIMEOUT = 3600.0  # seconds


def verify_folder(folder: Path, config: SequenceParallelConfig, layers: int) -> str:
    """Compare the model of a folder on `config.sequence_parallel_size` threads with it on one, and
    say the result in a sentence.

    Args:
        folder: written by `save_pretrained`; without files of weights, these are random.
        layers: how many layers of a language model to take; 0: all.
    """
    has_weights = any(list(folder.glob(pattern)) for pattern in WEIGHTS)
    with refused_by_name(folder):
        model = _load(folder, has_weights, layers)

    def verify_on_rank(comm: Communicator) -> Report | None:
        sp, rank_model = SequenceParallel(config, comm), _sharing_parameters(model)
        has_head = head_of(model) != "other" or model.base_model is not model
        takes_batches = model.main_input_name == "input_ids" and has_head

        def attach() -> Handle:
            handle = attach_model(rank_model, sp)
            if takes_batches:
                WholeBatchHooks(rank_model, handle)
            return handle

        return verify(rank_model, sp, attach, "strict", whole_batches=takes_batches)

    report = run_threads(config.sequence_parallel_size, verify_on_rank, timeout=TIMEOUT)[0]
    assert report is not None, "strict, and on several ranks"
    weights = "" if has_weights else " with random weights"
    return (
        f"{type(model).__name__}{weights} on {config.sequence_parallel_size} ranks gives what it "
        f"gives on one: {report.compared} outputs, losses and gradients; largest error "
        f"{report.largest:.1e} of the largest element ({report.where})"
    )


def _load(folder: Path, has_weights: bool, layers: int) -> Any:
    """The model in float32, with random weights if the folder has none."""
    config = load_config(folder)
    if layers:
        keep_layers(config.get_text_config(), layers)
    names = getattr(config, "architectures", None) or [""]
    model_class = getattr(transformers, names[0], None)
    if has_weights:
        loader = model_class or AutoModelForCausalLM
        return loader.from_pretrained(folder, config=config, **{DTYPE: torch.float32})
    torch.manual_seed(0)
    model = model_class(config) if model_class else AutoModelForCausalLM.from_config(config)
    return model.float()


def _sharing_parameters(model: nn.Module) -> Any:
    """A copy of the model whose parameters share memory with it, but not gradients."""
    shared = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, shared)
