"""The router's load balancing loss of a mixture of experts, over the tokens of all ranks.

It is a product of means over tokens, and so not a sum of losses of the ranks.

Shapes: b batch, s tokens of this rank, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_transformers.calls import ROUTER_LOGITS, Kwargs, by_name, parameter_names, wants_output
from wf_transformers.handle import Handle
from wf_transformers.models import file_of, outermost

ROUTER_MASK = "router_mask"
"""Keyword argument from `forward_kwargs`: (b, s), 1 where a token of this rank counts."""


def has_router_loss(model: nn.Module) -> bool:
    """Whether the model can add that loss to its own, with the function of its file."""
    attributes = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    has_function = hasattr(file_of(model), "load_balancing_loss_func")
    return has_function and all(hasattr(model, name) for name in attributes)


def wants_router_loss(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of `model` adds the router's loss."""
    return has_router_loss(model) and wants_output(ROUTER_LOGITS, model, arguments)


def load_balancing_loss(
    sp: SequenceParallel, routers: tuple[Tensor, ...], num_experts: int, top_k: int, counted: Tensor
) -> Tensor:
    """N sum_e f_e p_e, with f_e the share of choices and p_e the mean probability of expert e.

    Means are over the counted tokens of all ranks and layers. The gradient is this rank's share.

    Args:
        routers: for each layer, (b s, N) logits of this rank's tokens.
        top_k: how many experts a token goes to.
        counted: (b, s), 0 at padding.

    Source: Fedus et al. 2022, arXiv 2101.03961, equations 4 to 6, over all layers at once as
        transformers' `load_balancing_loss_func`.
    """
    probabilities = torch.stack([x.to(counted.device).softmax(dim=-1) for x in routers])
    sum_dtype = torch.promote_types(probabilities.dtype, torch.float32)
    weights = counted.flatten()[None, :, None].to(sum_dtype)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
    local_p = (probabilities * weights).sum(dim=(0, 1))
    local_f = (chosen * weights).sum(dim=(0, 1))
    local_n = len(routers) * weights.sum().view(1)
    sums = sp.sum_over_ranks(torch.cat([local_p.detach(), local_f, local_n]))
    p, f, n = sums.split([num_experts, num_experts, 1])
    return num_experts * (f * (local_p - local_p.detach() + p)).sum() / n.squeeze() ** 2


def router_loss(model: nn.Module, output: Mapping[str, Any]) -> Tensor | float:
    """What the router adds to the model's loss."""
    aux_loss = output.get("aux_loss")
    if aux_loss is None:
        return 0.0
    coefficients = [m.router_aux_loss_coef for m in outermost(model) if has_router_loss(m)]
    return coefficients[0] * aux_loss


class RouterLoss:
    """Hooks that compute the router's loss over all ranks, and keep the model from computing it."""

    def __init__(self, model: PreTrainedModel, handle: Handle) -> None:
        self._handle, self._names = handle, parameter_names(model)
        self._counted: Tensor | None = None
        self._routers: Any = None  # their logits in the running call
        self._labelled = False
        inner: nn.Module = model.base_model
        handle.before(model, self._before)
        handle.before(inner, self._before_inner)
        handle.after(inner, self._after_inner)
        handle.after(model, self._after)
        handle.after(model, self._leave, always=True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        arguments = by_name(self._names, args, kwargs)
        other_kwargs = {key: value for key, value in kwargs.items() if key != ROUTER_MASK}
        is_own_call = ROUTER_MASK not in kwargs and self._handle.sp.size == 1
        if is_own_call or not wants_router_loss(model, arguments):
            return args, other_kwargs
        self._counted, self._labelled = kwargs.get(ROUTER_MASK), arguments.get("labels") is not None
        if self._counted is None:
            raise ValueError(
                f"{ROUTER_LOGITS}: which tokens count must be known: have an attention_mask in the "
                "batch (ones where nothing is padding), and call the model with what "
                "wf_transformers.forward_kwargs gives"
            )
        return args, other_kwargs | {ROUTER_LOGITS: False}

    def _before_inner(self, _: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        return args, kwargs | {ROUTER_LOGITS: True} if self._counted is not None else kwargs

    def _after_inner(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._routers = getattr(output, ROUTER_LOGITS.removeprefix("output_"), None)

    @eager
    def _after(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self._counted is None:
            return None
        if not isinstance(output, ModelOutput):
            raise NotImplementedError(f"return_dict=False beside {ROUTER_LOGITS}: leave it out")
        device = next(x.device for x in output.values() if isinstance(x, Tensor))
        sp, counted = self._handle.sp, self._counted.to(device)
        share = load_balancing_loss(
            sp, self._routers, model.num_experts, model.num_experts_per_tok, counted
        )
        loss = share + (sp.size - 1) * (share - share.detach())
        output["aux_loss"] = loss
        if self._labelled:
            added = loss if self._handle.attention.logits_are_whole else loss / sp.size
            output["loss"] = output["loss"] + model.router_aux_loss_coef * added
        return output

    def _leave(self, *_: Any) -> None:
        self._counted = self._routers = None
