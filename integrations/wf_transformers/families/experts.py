"""The loss that keeps a mixture's experts evenly used, of the tokens of all ranks.

It is a product of means over tokens, and so no sum of the ranks' own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_transformers.calls import ROUTER_LOGITS, asks_for, by_name, parameter_names
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, own_class

COUNTED = "router_mask"
"""Beside it: (b, s), 1 where a token of this rank counts. `forward_kwargs` passes it."""
FUNCTION = "load_balancing_loss_func"
NO_MASK = (
    f"{ROUTER_LOGITS}: which tokens count must be known: have an attention_mask in the batch (ones "
    "where nothing is padding), and call the model with what wf_transformers.forward_kwargs gives"
)

Words = dict[str, Any]


def has_router_loss(model: nn.Module) -> bool:
    """Whether the model adds that loss to its own, by the function of its file."""
    words = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    file = sys.modules[own_class(model).__module__]
    return hasattr(file, FUNCTION) and all(hasattr(model, word) for word in words)


def asks_router_loss(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call of `model` wants it."""
    return has_router_loss(model) and asks_for(ROUTER_LOGITS, model, given)


def balance(
    sp: SequenceParallel, routers: tuple[Tensor, ...], num_experts: int, top_k: int, counted: Tensor
) -> Tensor:
    """N sum_e f_e p_e, f_e the share of choices and p_e the mean probability of expert e.

    Over all counted tokens of all ranks and layers; its gradient is this rank's share.

    Args:
        routers: by layer, (b s, N) logits of this rank's tokens.
        top_k: how many experts a token goes to.
        counted: (b, s), 0 at padding.

    Source: Fedus et al. 2022, arXiv 2101.03961, equations 4 to 6, over all layers at once as
        transformers' `load_balancing_loss_func`.
    """
    probabilities = torch.stack([x.to(counted.device).softmax(dim=-1) for x in routers])
    rows = counted.flatten()[None, :, None].to(
        torch.promote_types(probabilities.dtype, torch.float32)
    )
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
    mine = (probabilities * rows).sum(dim=(0, 1))
    sums = [mine.detach(), (chosen * rows).sum(dim=(0, 1)), len(routers) * rows.sum().view(1)]
    p, f, n = sp.sum_over_ranks(torch.cat(sums)).split([num_experts, num_experts, 1])
    return num_experts * (f * (mine - mine.detach() + p)).sum() / n.squeeze() ** 2


def router_loss(model: nn.Module, output: Mapping[str, Any]) -> Tensor | float:
    """What the model's router adds to its loss."""
    found = output.get("aux_loss")
    coefficients = [m.router_aux_loss_coef for m in outermost(model) if has_router_loss(m)]
    return 0.0 if found is None else coefficients[0] * found


class RouterLoss:
    """Hooks of one model: it makes no such loss itself, but keeps the logits of its routers."""

    def __init__(self, model: PreTrainedModel, handle: Handle) -> None:
        self._handle, self._names = handle, parameter_names(model)
        self._counted: Tensor | None = None
        self._labelled = False
        inner: nn.Module = model.base_model
        handle.hooks(
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_pre_hook(self._inside, with_kwargs=True),
            model.register_forward_hook(self._after),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        given = by_name(self._names, args, kwargs)
        words = {key: value for key, value in kwargs.items() if key != COUNTED}
        if not asks_router_loss(model, given):
            return args, words
        self._counted, self._labelled = kwargs.get(COUNTED), given.get("labels") is not None
        if self._counted is None:
            raise ValueError(NO_MASK)
        return args, words | {ROUTER_LOGITS: False}

    def _inside(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        return args, kwargs | {ROUTER_LOGITS: True} if self._counted is not None else kwargs

    @eager
    def _after(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self._counted is None:
            return None
        if not isinstance(output, ModelOutput):
            raise NotImplementedError(f"return_dict=False beside {ROUTER_LOGITS}: leave it out")
        sp, counted = self._handle.sp, self._counted.to(output["logits"].device)
        share = balance(
            sp, output["router_logits"], model.num_experts, model.num_experts_per_tok, counted
        )
        loss = share + (sp.size - 1) * (share - share.detach())
        output["aux_loss"] = loss
        if self._labelled:
            ours = loss if self._handle.attention.logits_are_whole else loss / sp.size
            output["loss"] = output["loss"] + model.router_aux_loss_coef * ours
        return output

    def _leave(self, *_: Any) -> None:
        self._counted = None
