"""What the rules refuse, and what a slice of causal attention or of a border is made of."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, fx

from wf_backends.slicing.rules import Source, alignment, emit, sources
from wf_backends.slicing.rules_attention import attend_rows

aten = torch.ops.aten


class Module(torch.nn.Module):
    """A function as torch.export wants it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def graph_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> fx.Graph:
    args = tuple(torch.randn(shape) for shape in shapes)
    return torch.export.export(Module(function), args, strict=False).graph


def calls(graph: fx.Graph, packet: object) -> list[fx.Node]:
    return [n for n in graph.nodes if getattr(n.target, "overloadpacket", None) is packet]


def test_placeholders_and_operators_without_a_rule_are_walls() -> None:
    graph = graph_of(lambda x: x.unfold(0, 2, 1).sum(-1) + torch.arange(5.0), (6,))
    walls = [n for n in graph.nodes if n.op != "output" and sources(n, 0) is None]
    assert [node.name for node in walls] == ["args_0", "unfold", "arange"]


def test_a_custom_operator_is_a_wall() -> None:
    @torch.library.custom_op("wf_test_rules::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    (node,) = calls(graph_of(lambda x: twice(x), (4, 4)), torch.ops.wf_test_rules.twice)
    assert sources(node, 0) is None


def test_a_dimension_of_one_row_or_none_is_no_dimension_to_slice() -> None:
    (node,) = calls(graph_of(torch.relu, (1, 4)), aten.relu)
    assert [sources(node, dim) is None for dim in (-1, 0, 1, 2)] == [True, True, False, True]


def test_one_source_for_each_use_of_a_node() -> None:
    (node,) = calls(graph_of(lambda x: x @ x, (4, 4)), aten.matmul)
    x = node.args[0]
    assert isinstance(x, fx.Node)
    assert sources(node, 0) == (Source(0, node=x), Source(None, node=x))


def test_merged_heads_are_sliced_by_whole_heads() -> None:
    (node,) = calls(graph_of(lambda x: x.reshape(2, 5, 12), (2, 5, 3, 4)), aten.reshape)
    (source,) = sources(node, 2) or ()
    assert (source.dim, source.scale, alignment([source])) == (2, Fraction(1, 4), 4)
    assert source.rows(4, 12) == (1, 3)
    assert alignment(sources(node, 1) or ()) == 1


def test_a_convolutions_rows_are_cut_at_the_border() -> None:
    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight, padding=1, stride=2)

    (node,) = calls(graph_of(conv, (1, 2, 8, 8), (2, 2, 3, 3)), aten.conv2d)
    source, weight = sources(node, 2) or ()
    assert (source.rows(0, 2), source.rows(1, 3), source.rows(2, 4)) == ((0, 4), (1, 6), (3, 8))
    assert weight.dim is None


@pytest.mark.parametrize("batch", [(1,), ()])
def test_first_causal_rows_stay_causal_and_later_ones_see_no_key_behind_them(
    batch: tuple[int, ...],
) -> None:
    """Of a batch without a mask of them; where no operator takes them so, with one."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    shapes, dim = [(*batch, 2, 8, 4)] * 3, len(batch) + 1
    (node,) = calls(graph_of(attention, *shapes), aten.scaled_dot_product_attention)
    assert [source.dim for source in sources(node, dim) or ()] == [dim, None, None]
    first, later = fx.Graph(), fx.Graph()
    for graph, rows in ((first, (0, 4)), (later, (4, 6))):
        inputs = tuple(graph.placeholder(name) for name in "qkv")
        emit(graph, node, dim, rows, inputs, node.kwargs)
    assert calls(first, aten.tril) == []
    keys = [(n.args[2], n.args[3]) for n in calls(later, aten.slice)]
    assert keys == [(0, 6), (0, 6)]
    masks = [mask.args[0] for mask in calls(later, aten.ones)]
    assert masks == ([] if batch else [(2, 6)])
    assert [n.args[3] for n in later.nodes if n.target is attend_rows] == ([4] if batch else [])


def in_place_through_a_view(x: Tensor) -> Tensor:
    """The write to `y` is also read through its base."""
    base = x * 2
    base.view(-1).mul_(3.0)
    return base + 1


def in_place_on_the_last_reader(x: Tensor) -> Tensor:
    return (x * 2).view(-1).mul_(3.0) + 1


def in_place_through_a_transpose(x: Tensor) -> Tensor:
    base = x * 2
    base.transpose(0, 1).mul_(3.0)
    return base + 1


def test_a_write_that_others_read_through_a_reshape_is_a_wall() -> None:
    def sliced(function: Callable[[Tensor], Tensor]) -> bool:
        (node,) = calls(graph_of(function, (4, 6)), aten.mul_)
        return sources(node, 0) is not None

    assert not sliced(in_place_through_a_view)
    assert sliced(in_place_on_the_last_reader)
    assert sliced(in_place_through_a_transpose)
