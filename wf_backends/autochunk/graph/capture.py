"""A model's forward pass as one flat graph of ATen operators, by ``torch.export``.

The graph is not decomposed: ``linear``, ``softmax`` and ``scaled_dot_product_attention`` stay
single operators, as eager execution runs them. Parameters and buffers are inputs of the graph; they
are read from the model at every call, so that they may be moved or loaded in between.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn import functional
from torch.utils import _pytree as pytree

from wf_backends.autochunk.graph.blocks import inline_blocks
from wf_backends.autochunk.graph.errors import CaptureError, as_capture_errors
from wf_backends.autochunk.graph.experts import experts_as_operators, insert_experts
from wf_backends.autochunk.graph.inputs import (
    CONSTANTS,
    containers,
    names_of_leaves,
    refuse_hooks,
    restored_attributes,
    separated_from_weights,
)
from wf_backends.autochunk.graph.packing import traced_masks
from wf_backends.autochunk.slicing import changed, split_group_norms

aten = torch.ops.aten
_torch_batch_norm = functional.batch_norm
_BY_SHAPE = {aten.view_as.default: aten.view.default, aten.reshape_as.default: aten.reshape.default}
_NOT_HASHED = re.compile(r"device\(type='\w+'(, index=\d+)?\)|\b[bc]_")  # [bc]_: buffer or constant


@dataclass(frozen=True)
class Weight:
    """The attribute from which a call reads a parameter, a buffer or a constant of the graph."""

    owner: object
    name: str

    def read(self) -> torch.Tensor:
        return getattr(self.owner, self.name)


def _type_of(weight: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return weight.dtype, weight.device, weight.shape


@dataclass(frozen=True)
class Captured:
    """One forward pass for one form of inputs.

    `graph` has one placeholder for each of `weights`, then one for each leaf of the inputs. Its
    output is the flat list of the leaves of two things: the outputs, and the `containers` among the
    inputs as the forward leaves them. A weight's placeholder has `meta["whole"]`: whether the
    weight is a tensor subclass that computes its own products, and so must not be sliced.
    """

    graph: fx.Graph
    weights: tuple[Weight, ...]
    weight_types: tuple[tuple[torch.dtype, torch.device, torch.Size], ...]
    output_spec: pytree.TreeSpec
    fingerprint: str

    @property
    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Those of the first weight of floating point; without any, CPU and float32."""
        types = (
            (device, dtype) for dtype, device, _ in self.weight_types if dtype.is_floating_point
        )
        return next(types, (torch.device("cpu"), torch.float32))

    def read_weights(self) -> list[torch.Tensor] | None:
        """The current weights; None if one has changed its dtype, device or shape since capture."""
        weights = [weight.read() for weight in self.weights]
        return weights if tuple(map(_type_of, weights)) == self.weight_types else None


def capture(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Captured:
    """The graph of ``model.forward(*args, **kwargs)`` without gradients.

    It has no hooks of the model itself, which run around every call anyway. Raises `CaptureError`
    if the model's code depends on the values of tensors, or changes its own buffers (which in
    training it may).
    """
    with as_capture_errors(model, "be captured"):
        refuse_hooks(model)
        leaves, spec = pytree.tree_flatten(separated_from_weights(model, args, kwargs))
        exported = _model_of_leaves(model, leaves, spec)
        inputs = tuple(None if isinstance(leaf, CONSTANTS) else leaf for leaf in leaves)
        with restored_attributes(model), experts_as_operators(model) as experts:
            program = _export_as_eager(exported, inputs)
    graph = program.graph
    inline_blocks(graph)
    _refuse_values_and_writes(graph, model, args, kwargs)
    specs = (s for s in program.graph_signature.input_specs if s.kind is not InputKind.USER_INPUT)
    weights = tuple(_weight(model, program, spec) for spec in specs)
    for node, weight in zip(graph.find_nodes(op="placeholder"), weights, strict=False):
        node.meta["whole"] = computes_itself(weight.read())
    insert_experts(graph, experts)
    _simplify(graph)
    types = tuple(_type_of(weight.read()) for weight in weights)
    return Captured(graph, weights, types, program.call_spec.out_spec, _fingerprint(graph))


def _refuse_values_and_writes(
    graph: fx.Graph, model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises `CaptureError` for results that depend on values, for transforms of torch.func, and
    for writes to weights or inputs; in training not for writes to buffers."""
    class_name = type(model).__name__
    for node in graph.nodes:
        what = ""
        if _depends_on_values(node):
            what = f"what {operator_name(node)} gives depends on the values of tensors"
        elif any(map(is_functorch_wrapped_tensor, tensors(node))):
            what = "torch.func (vmap, jvp) has no operators of the graph"
        if what:
            where = module_path(node) or "the model itself"
            raise CaptureError(f"{class_name} cannot be captured: {what}, in {where}")
    names = {base.name for base in changed(graph.nodes) if base.op == "placeholder"}
    if model.training:  # the model's own code runs, which changes its buffers
        names = {name for name in names if not name.startswith("b_")}
    if names:
        argument_names = names_of_leaves(model, args, kwargs)
        names = ", ".join(sorted({argument_names.get(name, name) for name in names}))
        raise CaptureError(f"{class_name} changes {names} in its forward")


def _model_of_leaves(model: nn.Module, example: list[Any], spec: pytree.TreeSpec) -> nn.Module:
    """A copy of the model without its own hooks, whose forward takes the leaves of (args, kwargs).

    Leaves that are `CONSTANTS` are passed as None. The forward also returns the `containers` among
    the inputs: export does not know all of them, but pytree does.
    """
    exported, forward = copy.copy(model), model.forward
    for name in [name for name in vars(model) if name.endswith("_hooks")]:
        setattr(exported, name, type(vars(model)[name])())

    def forward_leaves(*leaves: Any) -> Any:
        pairs = zip(leaves, example, strict=True)
        values = [known if isinstance(known, CONSTANTS) else leaf for leaf, known in pairs]
        args, kwargs = pytree.tree_unflatten(values, spec)
        filled = containers(args, kwargs)
        return forward(*args, **kwargs), filled

    exported.forward = forward_leaves
    return exported


def _export_as_eager(model: nn.Module, args: tuple) -> Any:
    """The exported program of the operators that the model runs eagerly.

    `torch.compiler.is_compiling()` and `is_exporting()` are False during the trace: else models of
    transformers build causal masks as tensors, which they do not do in eager runs. If that trace
    fails, a second one leaves them True. No stacks of operators are kept, and no code of graphs is
    compiled before it runs: both would take more time than the trace.
    """
    eager = {"is_compiling": lambda: False, "is_exporting": lambda: False}
    no_stacks = mock.patch.object(fx_config, "do_not_emit_stack_traces", True, create=True)
    lazy = _use_lazy_graph_module(True)
    norms = mock.patch.object(functional, "batch_norm", _batch_norm)
    with torch.no_grad(), no_stacks, lazy, norms, traced_masks():
        try:
            with mock.patch.dict(vars(torch.compiler), eager):
                return torch.export.export(model, args, strict=False)
        except Exception:  # for instance a branch on a tensor's value, which only eager runs take
            return torch.export.export(model, args, strict=False)


def _batch_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """That of torch, of contiguous rows: of transposed ones its result has other strides on fake
    tensors than on real ones, and the graph would lack a `contiguous` that follows."""
    return _torch_batch_norm(input.contiguous() if input.ndim == 3 else input, *args, **kwargs)


def _fingerprint(graph: fx.Graph) -> str:
    """A digest of operators and shapes: equal for the same model and input shapes on any device."""
    lines = []
    for node in graph.nodes:
        shapes = [(tuple(t.shape), t.dtype) for t in tensors(node)]
        lines.append(f"{node.op} {operator_name(node)} {node.args} {node.kwargs} {shapes}")
    return hashlib.sha256(_NOT_HASHED.sub("", "\n".join(lines)).encode()).hexdigest()[:16]


def operator_name(node: fx.Node) -> str:
    """The operator's name, the same in every process."""
    if isinstance(node.target, FunctionType):
        return node.target.__name__
    return str(node.target)


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that the node computes."""
    value = node.meta.get("val")
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def nbytes(node: fx.Node) -> int:
    """The bytes of all tensors that the node computes."""
    return sum(t.nbytes for t in tensors(node))


def computes_itself(weight: torch.Tensor) -> bool:
    """Whether it is of a subclass with products of its own. torch's `has_torch_function` would be
    True of all tensors inside `torch.device("cuda")`, and in torch.export."""
    return (
        type(weight) is not torch.Tensor
        and type(weight).__torch_function__ is not torch._C._disabled_torch_function_impl
    )


def layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
    """Shape, strides, dtype and device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that the operator belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _depends_on_values(node: fx.Node) -> bool:
    """Whether the node's result is a number, or has a size, that is known only when it runs."""
    symbols = torch.SymInt, torch.SymFloat, torch.SymBool
    sizes = [size for tensor in tensors(node) for size in tensor.shape]
    return any(isinstance(value, symbols) for value in (node.meta.get("val"), *sizes))


def _weight(model: nn.Module, program: Any, spec: Any) -> Weight:
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        path, _, name = spec.target.rpartition(".")
        return Weight(model.get_submodule(path), name)
    if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(spec.arg, TensorArgument):
        return Weight(SimpleNamespace(**program.constants), spec.target)
    raise CaptureError(
        f"{type(model).__name__}: no support for an input of kind {spec.kind.name} ({spec.target})"
    )


def _simplify(graph: fx.Graph) -> None:
    """Remove checks of metadata and dropout in evaluation mode; give `view_as` its sizes."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is aten.dropout.default and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _BY_SHAPE:
            node.target = _BY_SHAPE[node.target]
            node.args = node.args[0], list(node.meta["val"].shape)
    split_group_norms(graph)
    graph.eliminate_dead_code()
