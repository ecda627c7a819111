"""The memory of a training step, by a run of it on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from wf_backends.graph import (
    CaptureError,
    FakeRun,
    attributes_kept,
    grouped_products_are_fake,
    named_weights,
    packing_is_asked,
    reason,
)


def training_peak(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The peak of live bytes of a forward and a backward, beyond weights, their gradients, inputs.

    As it runs: with tiles, and with layers that are recomputed. What is not a loss already is
    summed. A weight's gradient counts until it is added to what earlier batches left.

    Raises `CaptureError` where the model does not run so.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = dict(named_weights(model))
    fakes = {id(weight): _fake(mode, weight) for weight in named.values()}
    weights = {name: fakes[id(weight)] for name, weight in named.items()}
    args, words = pytree.tree_map_only(Tensor, mode.from_tensor, (args, dict(kwargs)))
    grads = [w.grad for w in weights.values() if w.grad is not None]
    inputs = [x for x in pytree.tree_leaves((args, words)) if isinstance(x, Tensor)]
    tracker = FakeRun((*weights.values(), *grads, *inputs))
    try:
        with (
            packing_is_asked(),
            grouped_products_are_fake(),
            attributes_kept(model),
            mode,
            tracker,
            torch.enable_grad(),
        ):
            _loss(functional_call(model, weights, args, words, tie_weights=False)).backward()
    except NotImplementedError:  # what tiles refuse
        raise
    except RuntimeError as error:
        raise CaptureError(reason(model, error, "be trained on fake tensors")) from error
    return tracker.peak


def _fake(mode: FakeTensorMode, weight: Tensor) -> Tensor:
    fake = mode.from_tensor(weight.detach()).requires_grad_(weight.requires_grad)
    if fake.requires_grad:
        with mode:
            fake.grad = torch.zeros_like(fake)
    return fake


def _loss(output: Any) -> Tensor:
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return output["loss"]
    found = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError("nothing in the model's output has a gradient: are all weights frozen?")
    return found[0] if not found[0].dim() else sum((x.sum() for x in found), torch.zeros(()))
