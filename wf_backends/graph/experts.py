"""A layer's experts as one operator of the graph.

Known as transformers 5 marks them (`use_experts_implementation` gives the class `MARK`), and by the
arguments of their forward (`ARGUMENTS`): tokens x hidden, tokens x k, tokens x k. Whatever
implementation it is asked for, such a module gives a token what depends on that token alone; but it
sorts the tokens by expert, so that none of its operators may be sliced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from wf_backends.graph.inputs import named_weights
from wf_backends.slicing import Experts

MARK = "_apply_gate"
ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # gpt-oss
)


@torch.library.custom_op("wallfacer::experts", mutates_args=())
def _experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: Sequence[Tensor],
    number: int,
) -> Tensor:
    """Stands for experts while a model is traced; of a graph it is replaced by `Experts`."""
    raise AssertionError("only traced")


@_experts.register_fake
def _(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


@contextmanager
def experts_are_operators(model: nn.Module) -> Iterator[list[Experts]]:
    """In a trace: the experts of each layer are one operator, of those in the list that it gives.

    Those with hooks or another forward of their own are traced as they are.
    """
    found: dict[Any, Experts] = {}
    with ExitStack() as changes:
        for module in model.modules():
            if _is_experts(module):
                names = tuple(dict(named_weights(module)))
                kind = found.setdefault(_kind(module), Experts(module, names, len(found)))
                changes.enter_context(mock.patch.object(module, "forward", _traced(module, kind)))
        yield list(found.values())


def put_experts(graph: fx.Graph, known: Sequence[Experts]) -> None:
    """Has a traced graph call them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.wallfacer.experts.default):
        *args, number = node.args
        node.target, node.args = known[number], tuple(args)


def _traced(module: nn.Module, kind: Experts) -> Any:
    """The forward of experts in a trace."""
    signature = inspect.signature(module.forward)

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments.values()
        return _experts(*given, [weight for _, weight in named_weights(module)], kind.number)

    return forward


def _is_experts(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    if hooks or "forward" in vars(module) or not hasattr(type(module), MARK):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)
    return names[1:] in ARGUMENTS


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same code, whose numbers, names and other objects are the same."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    of_every_module = vars(nn.Module()).keys() - {"training"}
    found: list[Any] = []
    for part in module.modules():
        own = {name: x for name, x in vars(part).items() if name not in of_every_module}
        found.append(type(part))
        found += ((name, x if isinstance(x, plain) else id(x)) for name, x in own.items())
    return tuple(found)


@contextmanager
def grouped_products_are_fake() -> Iterator[None]:
    """In a run on fake tensors: `grouped_mm` of every dtype, as large as one group with all rows.
    torch's own knows only bfloat16 there."""
    functional = torch.nn.functional

    def product(mat_a: Tensor, mat_b: Tensor, **_: Any) -> Tensor:
        return mat_a @ mat_b[0]

    with mock.patch.object(functional, "grouped_mm", product, create=True):
        yield
