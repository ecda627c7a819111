"""The peak memory of a training step, measured by a run on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from wf_backends.autochunk.graph import as_capture_errors, fake_run, named_weights


def training_peak(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The peak of live bytes of a forward and a backward, beyond weights, their gradients, inputs.

    The model runs as it is: with its tiles and its activation checkpointing. An output without a
    loss is summed. A weight's new gradient counts until it is added to that of earlier batches.

    Raises `CaptureError` if the model does not run on fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real_weights = dict(named_weights(model))
    fakes = {id(weight): _fake_weight(mode, weight) for weight in real_weights.values()}
    weights = {f"model.{name}": fakes[id(w)] for name, w in real_weights.items()}  # tied ones once
    args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    grads = [w.grad for w in weights.values() if w.grad is not None]
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = *weights.values(), *grads, *inputs
    with as_capture_errors(model, "be trained on fake tensors"):
        with torch.enable_grad(), fake_run(model, mode, known) as tracker:
            functional_call(_Step(model), weights, args, kwargs, tie_weights=False)
    return tracker.peak


class _Step(nn.Module):
    """A model whose call is its forward and backward: what checkpoints compute again in the
    backward has the fake weights, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> None:
        # No name holds the output, so that its logits are freed before the backward.
        _loss(self.model(*args, **kwargs)).backward()


def _fake_weight(mode: FakeTensorMode, weight: Tensor) -> Tensor:
    """A fake weight with a gradient of zeros, as after an earlier batch."""
    fake = mode.from_tensor(weight.detach()).requires_grad_(weight.requires_grad)
    if fake.requires_grad:
        with mode:
            fake.grad = torch.zeros_like(fake)
    return fake


def _loss(output: Any) -> Tensor:
    """output["loss"]; else the first tensor, if it is a scalar; else the sum of all tensors."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return output["loss"]
    outputs = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs:
        raise ValueError("nothing in the model's output has a gradient: are all weights frozen?")
    if outputs[0].dim() == 0:
        return outputs[0]
    return sum((x.sum() for x in outputs), torch.zeros(()))
