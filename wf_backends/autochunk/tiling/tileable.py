"""Which modules of a model may be called tile by tile: proved on the exported graph.

A module's call may be cut along a dimension if each row of its results depends only on the same
row of its inputs and on the module's own parameters. The rules of its operators prove this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator

from wf_backends.autochunk.graph import (
    Captured,
    Effects,
    Experts,
    Weight,
    module_path,
    nbytes,
    operator_name,
    tensors,
)
from wf_backends.autochunk.slicing import changed, sources, view_base
from wf_backends.autochunk.tiling.tiled_loss import CAUSAL_LM_LOSS, loss_name

aten = torch.ops.aten
TRIANGLES = (aten.tril, aten.triu, aten.tril_, aten.triu_)
PASS_THROUGH = (aten.to, aten.view, aten.reshape, aten.contiguous, aten._to_copy, aten.alias)


@dataclass(frozen=True)
class TileCandidate:
    """A module that may be tiled, or the reason why it may not.

    Attributes:
        module, dim, loss: as in `Tiles`.
        class_name: of the module.
        nodes: its operators.
        inner_bytes: of all tensors that its operators compute, without its results.
        io_bytes: of its inputs and its results.
        rows: along `dim`.
        reason: "" if it may be tiled.
    """

    module: str
    class_name: str
    nodes: tuple[fx.Node, ...]
    inner_bytes: int = 0
    io_bytes: int = 1
    dim: int = 0
    rows: int = 0
    loss: bool = False
    reason: str = ""


class _NotTileableError(Exception):
    """Why a module cannot be cut along a dimension."""


def candidates(captured: Captured, model: nn.Module, effects: Effects) -> list[TileCandidate]:
    """A candidate for each call of each module, the outermost module first.

    Modules inside one that may be tiled are left out. Of a layer's experts the module itself is a
    candidate, and not the module around it, whose router logits transformers records.
    """
    weights = dict(zip(captured.graph.find_nodes(op="placeholder"), captured.weights, strict=False))
    found: list[TileCandidate] = []
    for path, calls in _calls_by_module(captured.graph, model).items():
        module = model.get_submodule(path)
        tileable = [candidate for candidate in found if not candidate.reason]
        if any(path.startswith(f"{candidate.module}.") for candidate in tileable):
            continue
        if any(map(_is_experts, calls[0])) and len(calls[0]) > 1:
            continue
        for nodes in calls:
            found.append(_candidate(path, module, nodes, weights, effects))
    refused = {candidate.module for candidate in found if candidate.reason}
    return [c for c in found if c.reason or c.module not in refused]


def _calls_by_module(graph: fx.Graph, model: nn.Module) -> dict[str, list[list[fx.Node]]]:
    """The operators of each call of each module inside the model, by the module's name."""
    calls: dict[str, dict[str, list[fx.Node]]] = {}
    names = _names(model)
    for node in graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            name = names[path.partition("@")[0]]  # "layer@1" is its second call
            if name and node.op == "call_function":
                calls.setdefault(name, {}).setdefault(path, []).append(node)
    return {name: list(nodes_by_path.values()) for name, nodes_by_path in calls.items()}


def _names(model: nn.Module) -> dict[str, str]:
    """The name of each module in `named_modules()`, by each name that a trace may give it: a module
    that stands in two places has two."""
    first = {module: name for name, module in model.named_modules()}
    return {name: first[m] for name, m in model.named_modules(remove_duplicate=False)}


def _candidate(
    path: str,
    module: nn.Module,
    nodes: list[fx.Node],
    weights: Mapping[fx.Node, Weight],
    effects: Effects,
) -> TileCandidate:
    inside = set(nodes)
    reads = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = [n for n in reads if n not in weights]
    results = [n for n in nodes if not inside.issuperset(n.users)]
    inner_bytes = sum(nbytes(n) for n in nodes if not _is_view(n) and n not in results)
    inner_bytes += sum(effects.of(n).temporary for n in nodes if _is_experts(n))
    candidate = TileCandidate(path, type(module).__name__, tuple(nodes), inner_bytes)
    try:
        written = changed(nodes) - inside
        if written:
            what = "its buffers" if written & weights.keys() else "what it is given"
            raise _NotTileableError(f"changes {what}")
        own_ids = {id(x) for x in (*module.parameters(), *module.buffers())}
        if any(id(weights[n].read()) not in own_ids for n in reads if n in weights):
            # to which tiles would give no gradient
            raise _NotTileableError("uses a parameter or a constant of another module")
        weight_nodes = set(weights) | _from_weights(weights, nodes)
        dim = _tile_dim(nodes, inputs, results, weight_nodes)
    except _NotTileableError as error:
        return replace(candidate, reason=str(error))
    io_bytes = max(1, sum(nbytes(n) for n in inputs + results))
    return replace(candidate, io_bytes=io_bytes, dim=dim, rows=_shape(results[0])[dim])


def _from_weights(weights: Mapping[fx.Node, Any], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes computed from parameters and nothing else, such as a transposed weight."""
    derived: set[fx.Node] = set()
    for node in nodes:
        reads = node.all_input_nodes
        if reads and all(read in weights or read in derived for read in reads):
            derived.add(node)
    return derived


def _tile_dim(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    weights: Set[fx.Node],
) -> int:
    """The dimension with most rows along which all results may be cut; if there is none, the error
    says why the one with most rows is refused."""
    shapes = [_shape(node) for node in results]
    if not shapes or not shapes[0]:
        raise _NotTileableError("gives no rows")
    errors: list[_NotTileableError] = []
    for dim in sorted(range(len(shapes[0])), key=lambda d: (-shapes[0][d], -d)):
        rows = shapes[0][dim]
        if any(len(shape) <= dim or shape[dim] != rows for shape in shapes) or rows < 2:
            continue
        try:
            _prove(nodes, inputs, results, weights, dim)
            return dim
        except _NotTileableError as error:
            errors.append(error)
    raise errors[0] if errors else _NotTileableError("gives results of different rows")


def _prove(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    weights: Set[fx.Node],
    dim: int,
) -> None:
    """Prove that every operator from the results back to the inputs may be cut along `dim`, or
    raise a _NotTileableError."""
    inside, rows = set(nodes), _shape(results[0])[dim]
    # The dimension of each node that is cut, and its rows for each row of the results.
    cuts: dict[fx.Node, tuple[int, Fraction]] = dict.fromkeys(results, (dim, Fraction(1)))
    for node in reversed(nodes):
        if node not in cuts:
            continue
        node_dim, scale = cuts[node]
        reads = sources(node, node_dim)
        if reads is None or _is_triangle(node, node_dim):
            raise _NotTileableError(f"{operator_name(node)} has no rule along dimension {node_dim}")
        for read in reads:
            if read.node in weights:
                if read.dim is not None:
                    raise _NotTileableError(f"{operator_name(node)} would cut a parameter")
            elif read.dim is None or read.before or read.after:
                if read.node in inside or _has_rows(read.node, dim):
                    raise _NotTileableError(f"{operator_name(node)} needs more than its own rows")
            elif read.node in inside:
                cut = read.dim, scale * read.scale
                if cuts.setdefault(read.node, cut) != cut:
                    raise _NotTileableError(
                        f"{operator_name(read.node)} is read along two dimensions"
                    )
            elif (read.dim, scale * read.scale) != (dim, 1) or _shape(read.node)[dim] != rows:
                raise _NotTileableError(
                    f"{operator_name(node)} reads rows along another dimension of what is given"
                )
    if not any(_has_rows(node, dim) for node in inputs):
        raise _NotTileableError("is given no rows")


def _is_triangle(node: fx.Node, dim: int) -> bool:
    """Whether the operator writes zeros by a row's number along `dim`: tiles count from 0."""
    is_triangle = getattr(node.target, "overloadpacket", None) in TRIANGLES
    return is_triangle and dim >= len(_shape(node)) - 2


def _has_rows(node: fx.Node, dim: int) -> bool:
    """Whether a tiled call would cut the node's tensor along `dim`."""
    return len(_shape(node)) > dim


def _shape(node: fx.Node) -> tuple[int, ...]:
    values = tensors(node)
    return tuple(values[0].shape) if values else ()


def _is_experts(node: fx.Node) -> bool:
    return isinstance(node.target, Experts)


def _is_view(node: fx.Node) -> bool:
    """Whether the operator returns its input, or a view of it, where it can; also a graph within
    the graph, whose results are read one by one."""
    return view_base(node) is not None or isinstance(node.target, HigherOrderOperator)


def head_candidate(captured: Captured, model: nn.Module) -> TileCandidate | None:
    """The head of a causal language model; None if the graph has no logits and loss.

    It may be tiled if only the loss reads the logits, and reads them unchanged.
    """
    losses = captured.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    if len(losses) != 1:
        return None
    chain: list[fx.Node] = [losses[0], losses[0].all_input_nodes[0]]
    while getattr(chain[-1].target, "overloadpacket", None) in PASS_THROUGH:
        chain.append(chain[-1].all_input_nodes[0])
    head = chain[-1]
    path = _names(model)[module_path(head).partition("@")[0]]
    class_name = type(model.get_submodule(path)).__name__
    candidate = TileCandidate(path, class_name, (head,), dim=1, loss=True)
    try:
        _refuse_head(chain, path, model.get_submodule(path.rpartition(".")[0]))
    except _NotTileableError as error:
        return replace(candidate, reason=str(error))
    logits_bytes = sum(nbytes(node) for node in chain)
    hidden_bytes, rows = nbytes(head.all_input_nodes[0]), prod(_shape(head)[:-1])
    return replace(candidate, inner_bytes=logits_bytes, io_bytes=hidden_bytes, rows=rows)


def _refuse_head(chain: Sequence[fx.Node], path: str, owner: nn.Module) -> None:
    """Refuse a head that cannot be tiled; `chain` leads from the loss back to the head."""
    if chain[-1].target is not aten.linear.default or not path:
        raise _NotTileableError(f"{operator_name(chain[-1])} stands between the head and the loss")
    if any(user not in chain and user.op != "output" for node in chain for user in node.users):
        raise _NotTileableError("the loss is not alone in reading the logits")
    if loss_name(owner) != CAUSAL_LM_LOSS:
        raise _NotTileableError(
            f"its loss is {loss_name(owner)}, and not transformers' {CAUSAL_LM_LOSS}"
        )
