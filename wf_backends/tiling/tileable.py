"""Which modules of a model may be called tile by tile: proved on the exported graph.

A module's call may be cut along a dimension where rows of all that it gives depend on the same rows
of what it is given, by the rules of its operators, and on its own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isclose, prod
from typing import Any

import torch
from torch import fx, nn

from wf_backends.graph import Captured, Effects, Weight, nbytes, tensors
from wf_backends.slicing import Experts, sources
from wf_backends.tiling.tiled_loss import LOSS, loss_name

aten = torch.ops.aten
PASSED_ON = (aten.to, aten.view, aten.reshape, aten.contiguous, aten._to_copy, aten.alias)


@dataclass(frozen=True)
class Candidate:
    """A module that may be tiled, or why it may not.

    Attributes:
        module, dim, loss: as `Tiles` has them.
        rows: along `dim`.
        inside: bytes of what its operators make, its results aside.
        around: bytes of what it is given and of its results.
        nodes: its operators.
        reason: "" for one that may be tiled.
    """

    module: str
    kind: str
    nodes: tuple[fx.Node, ...]
    inside: int = 0
    around: int = 1
    dim: int = 0
    rows: int = 0
    loss: bool = False
    reason: str = ""


class _Wall(Exception):
    """Why a module cannot be cut along a dimension."""


def candidates(captured: Captured, model: nn.Module, effects: Effects) -> list[Candidate]:
    """Every module that may make more than it is given, the outermost first.

    Of a layer's experts the module itself, not what holds it: the router's logits are recorded.
    """
    weights = _weights(captured)
    found: list[Candidate] = []
    for path, calls in _calls(captured.graph).items():
        module = model.get_submodule(path)
        if any(one.reason == "" and path.startswith(f"{one.module}.") for one in found):
            continue  # a part of one that is cut
        if any(map(_is_experts, calls[0])) and len(calls[0]) > 1:
            continue
        for nodes in calls:
            found.append(_candidate(path, module, nodes, weights, effects))
    whole = {one.module for one in found if one.reason}
    return [one for one in found if one.reason or one.module not in whole]


def _weights(captured: Captured) -> dict[fx.Node, Weight]:
    placeholders = captured.graph.find_nodes(op="placeholder")
    return dict(zip(placeholders, captured.weights, strict=False))


def _calls(graph: fx.Graph) -> dict[str, list[list[fx.Node]]]:
    """The operators of each call of each module but the outermost, by the module's name."""
    calls: dict[str, dict[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            name = path.partition("@")[0]  # "layer@1" is its second call
            if name and node.op == "call_function":
                calls.setdefault(name, {}).setdefault(path, []).append(node)
    return {name: list(those.values()) for name, those in calls.items()}


def _candidate(
    path: str,
    module: nn.Module,
    nodes: list[fx.Node],
    weights: Mapping[fx.Node, Weight],
    effects: Effects,
) -> Candidate:
    inside, inputs = set(nodes), dict[fx.Node, None]()
    for node in nodes:
        inputs |= dict.fromkeys(n for n in node.all_input_nodes if n not in inside)
    given = [n for n in inputs if n not in weights]
    results = [n for n in nodes if any(user not in inside for user in n.users)]
    base = Candidate(path, type(module).__name__, tuple(nodes))
    try:
        made = sum(nbytes(n) for n in nodes if not _is_view(n) and n not in results)
        made += sum(effects.of(n).temporary for n in nodes if _is_experts(n))
        base = replace(base, inside=made)
        _refuse_foreign(module, [weights[n] for n in inputs if n in weights])
        dim = _dim(nodes, given, results, set(weights) | _made_of(weights, nodes))
    except _Wall as wall:
        return replace(base, reason=str(wall))
    around = sum(nbytes(n) for n in given + results)
    rows = _shape(results[0])[dim]
    return replace(base, around=max(1, around), dim=dim, rows=rows)


def _refuse_foreign(module: nn.Module, used: Sequence[Weight]) -> None:
    """Parameters of other modules would get no gradient from tiles."""
    own = {id(x) for x in (*module.parameters(), *module.buffers())}
    if any(id(one.read()) not in own for one in used):
        raise _Wall("uses a parameter or a constant of another module")


def _made_of(weights: Mapping[fx.Node, Any], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of `nodes` that depend on parameters and nothing else: a transposed one, say."""
    found: set[fx.Node] = set()
    for node in nodes:
        read = node.all_input_nodes
        if read and all(one in weights or one in found for one in read):
            found.add(node)
    return found


def _dim(
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    results: Sequence[fx.Node],
    weights: Set[fx.Node],
) -> int:
    """The dimension with most rows along which all results may be cut.

    Raises:
        _Wall: with why not along that with most rows, if along none.
    """
    shapes = [_shape(node) for node in results]
    if not shapes or not shapes[0]:
        raise _Wall("gives no rows")
    walls: list[_Wall] = []
    for dim in sorted(range(len(shapes[0])), key=lambda d: (-shapes[0][d], -d)):
        rows = shapes[0][dim]
        if any(len(shape) <= dim or shape[dim] != rows for shape in shapes) or rows < 2:
            continue
        try:
            _prove(nodes, given, results, weights, dim)
            return dim
        except _Wall as wall:
            walls.append(wall)
    raise walls[0] if walls else _Wall("gives results of different rows")


def _prove(
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    results: Sequence[fx.Node],
    weights: Set[fx.Node],
    dim: int,
) -> None:
    """Walk from the results to what is given; every operator in between must be cut.

    Raises:
        _Wall: at an operator without a rule, or one that needs other rows than its own.
    """
    inside, rows = set(nodes), _shape(results[0])[dim]
    along: dict[fx.Node, tuple[int, Fraction]] = dict.fromkeys(results, (dim, Fraction(1)))
    for node in reversed(nodes):
        if node not in along:
            continue
        its_dim, scale = along[node]
        reads = sources(node, its_dim)
        if _counts(node, rows):
            raise _Wall(f"{node.target} computes with the number of rows")
        if reads is None:
            raise _Wall(f"{node.target} has no rule along dimension {its_dim}")
        for read in reads:
            if read.node in weights:
                if read.dim is not None:
                    raise _Wall(f"{node.target} would cut a parameter")
            elif read.dim is None or read.before or read.after:
                if read.node in inside or _has_rows(read.node, dim):
                    raise _Wall(f"{node.target} needs more than its own rows")
            elif read.node in inside:
                want = read.dim, scale * read.scale
                if along.setdefault(read.node, want) != want:
                    raise _Wall(f"{read.node.target} is read along two dimensions")
            elif (read.dim, scale * read.scale) != (dim, 1) or _shape(read.node)[dim] != rows:
                raise _Wall(f"{node.target} reads rows along another dimension of what is given")
    if not any(_has_rows(node, dim) for node in given):
        raise _Wall("is given no rows")


def _counts(node: fx.Node, rows: int) -> bool:
    """Whether an operator other than a view has the number of rows among its numbers."""
    numbers = [x for x in node.args if isinstance(x, int | float) and not isinstance(x, bool)]
    powers = (rows, 1 / rows, rows**0.5, rows**-0.5)
    return not _is_view(node) and any(isclose(x, power) for x in numbers for power in powers)


def _has_rows(node: fx.Node, dim: int) -> bool:
    """Whether a call by tiles would take it for something to cut."""
    return len(_shape(node)) > dim


def _shape(node: fx.Node) -> tuple[int, ...]:
    found = tensors(node)
    return tuple(found[0].shape) if found else ()


def _is_experts(node: fx.Node) -> bool:
    return isinstance(node.target, Experts)


def _is_view(node: fx.Node) -> bool:
    """Whether it gives its input, or a view of it, where it can."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(returned.alias_info for returned in schema.returns)


def head_candidate(captured: Captured, model: nn.Module) -> Candidate | None:
    """The head of a causal language model, if there are logits and a loss.

    It may be tiled where the loss alone reads the logits, as they are.
    """
    found = captured.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    if len(found) != 1:
        return None
    chain: list[fx.Node] = list(found)
    while chain[-1] is found[0] or getattr(chain[-1].target, "overloadpacket", None) in PASSED_ON:
        chain.append(chain[-1].all_input_nodes[0])
    stack = list((chain[-1].meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    kind = type(model.get_submodule(path)).__name__
    one = Candidate(path, kind, (chain[-1],), dim=1, loss=True)
    try:
        _refuse_head(chain, path, model.get_submodule(path.rpartition(".")[0]))
        made = sum(nbytes(node) for node in chain)
        given, rows = nbytes(chain[-1].all_input_nodes[0]), prod(_shape(chain[-1])[:-1])
        return replace(one, inside=made, around=given, rows=rows)
    except _Wall as wall:
        return replace(one, reason=str(wall))


def _refuse_head(chain: Sequence[fx.Node], path: str, owner: nn.Module) -> None:
    """`chain` leads from the loss back to the head."""
    if chain[-1].target is not aten.linear.default or not path:
        raise _Wall(f"{chain[-1].target} stands between the head and the loss")
    if any(user not in chain and user.op != "output" for node in chain for user in node.users):
        raise _Wall("the loss is not alone in reading the logits")
    if loss_name(owner) != LOSS:
        raise _Wall(f"its loss is {loss_name(owner)}, and not transformers' {LOSS}")
