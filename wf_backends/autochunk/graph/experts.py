"""A layer's experts as one operator of the graph.

    y_t = sum of w_te f_e(x_t) over the experts e of token t

Experts are recognized by the mark of transformers 5 (`use_experts_implementation` gives the class
the attribute `MARK`), and by the arguments of their forward (`ARGUMENTS`): tokens x hidden,
tokens x k, tokens x k. Each token's result depends on that token alone, in every implementation.
But the implementations sort the tokens by expert, so none of their operators may be sliced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, fx, nn

from wf_backends.autochunk.graph.inputs import named_weights
from wf_backends.autochunk.slicing import Call, Reads, Rows, Rule

MARK = "_apply_gate"
ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # gpt-oss
)


def experts_reads(call: Call, dim: int) -> Reads | None:
    """Sliced along tokens, where all three inputs are matrices with a row for each token."""
    sizes = {name: call.size(name) for name in call.tensors()}
    flat = all(len(size) == 2 and size[0] == call.shape[0] for size in sizes.values())
    return dict.fromkeys(sizes, Rows(0)) if flat and dim == 0 else None


@dataclass(frozen=True, eq=False)
class Experts:
    """A module that computes a layer's experts, as a function that gets its parameters as inputs.

    Identical layers of a graph share one instance; `number` distinguishes the instances. `weights`
    are the names of the module's parameters and buffers.
    """

    module: nn.Module
    weights: tuple[str, ...]
    number: int
    rule: ClassVar = Rule(experts_reads)

    @property
    def __name__(self) -> str:
        return f"experts_{self.number}"

    def __str__(self) -> str:
        return self.__name__

    def __call__(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        weights: Sequence[Tensor],
    ) -> Tensor:
        """(tokens, hidden), of inputs of shapes (tokens, hidden), (tokens, k) and (tokens, k)."""
        parameters = dict(zip(self.weights, weights, strict=True))
        inputs = hidden_states, top_k_index, top_k_weights
        return torch.func.functional_call(self.module, parameters, inputs, tie_weights=False)


@torch.library.custom_op("wallfacer::experts", mutates_args=())
def _experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: Sequence[Tensor],
    number: int,
) -> Tensor:
    """Stands for experts during the trace; then `insert_experts` puts `Experts` in its place."""
    raise AssertionError("only traced")


@_experts.register_fake
def _(hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


@contextmanager
def experts_as_operators(model: nn.Module) -> Iterator[list[Experts]]:
    """Inside, a trace has one operator for the experts of each layer. Yields these operators.

    Layers of equal configuration share one. Experts with hooks, or whose instance has a forward of
    its own, are traced as they are.
    """
    operators: dict[Any, Experts] = {}
    with ExitStack() as changes:
        for module in model.modules():
            if _is_experts(module):
                names = tuple(dict(named_weights(module)))
                experts = Experts(module, names, len(operators))
                experts = operators.setdefault(_configuration(module), experts)
                forward = _traced_forward(module, experts)
                changes.enter_context(mock.patch.object(module, "forward", forward))
        yield list(operators.values())


def insert_experts(graph: fx.Graph, operators: Sequence[Experts]) -> None:
    """Have a traced graph call the operators that `experts_as_operators` yielded."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.wallfacer.experts.default):
        *args, number = node.args
        node.target, node.args = operators[number], tuple(args)


def _traced_forward(module: nn.Module, experts: Experts) -> Any:
    """The forward of experts during the trace."""
    signature = inspect.signature(module.forward)

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        inputs = signature.bind(*args, **kwargs).arguments.values()
        return _experts(*inputs, [weight for _, weight in named_weights(module)], experts.number)

    return forward


def _is_experts(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    if hooks or "forward" in vars(module) or not hasattr(type(module), MARK):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)
    return names[1:] in ARGUMENTS


def _configuration(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules of the same classes with equal numbers and strings, and the
    same other objects."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    of_every_module = vars(nn.Module()).keys() - {"training"}
    key: list[Any] = []
    for child in module.modules():
        key.append(type(child))
        for name, value in vars(child).items():
            if name not in of_every_module:
                key.append((name, value if isinstance(value, plain) else id(value)))
    return tuple(key)


@contextmanager
def fake_grouped_mm() -> Iterator[None]:
    """Inside, runs on fake tensors have `grouped_mm` in every dtype; torch's has only bfloat16. All
    rows are in one group, which takes the same bytes and operations."""

    def grouped_mm(mat_a: Tensor, mat_b: Tensor, **_: Any) -> Tensor:
        return mat_a @ mat_b[0]

    with mock.patch.object(torch.nn.functional, "grouped_mm", grouped_mm, create=True):
        yield
