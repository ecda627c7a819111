"""What the rules refuse to slice, and what slices of attention and convolutions consist of."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, fx

from wf_backends.autochunk.slicing.rules import Source, alignment, emit, sources
from wf_backends.autochunk.slicing.rules_attention import attend_rows

aten = torch.ops.aten


class Module(torch.nn.Module):
    """A function as a module, for torch.export."""

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


class TestWalls:
    def test_placeholders_and_operators_without_a_rule(self) -> None:
        graph = graph_of(lambda x: x.unfold(0, 2, 1).sum(-1) + torch.arange(5.0), (6,))
        walls = [n for n in graph.nodes if n.op != "output" and sources(n, 0) is None]
        assert [node.name for node in walls] == ["args_0", "unfold", "arange"]

    def test_custom_operator(self) -> None:
        @torch.library.custom_op("wf_test_rules::twice", mutates_args=())
        def twice(x: Tensor) -> Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        (node,) = calls(graph_of(lambda x: twice(x), (4, 4)), torch.ops.wf_test_rules.twice)
        assert sources(node, 0) is None

    @pytest.mark.parametrize(
        ("dim", "sliced"),
        [(-1, False), (0, False), (1, True), (2, False)],
        ids=["negative", "one row", "four rows", "beyond the last"],
    )
    def test_dimension_that_has_one_row_or_does_not_exist(self, dim: int, sliced: bool) -> None:
        (node,) = calls(graph_of(torch.relu, (1, 4)), aten.relu)
        assert (sources(node, dim) is not None) == sliced

    def test_write_in_place_through_a_view_whose_base_is_read(self) -> None:
        """A slice of the view may be a copy: its write would be lost."""

        def function(x: Tensor) -> Tensor:
            base = x * 2
            base.view(-1).mul_(3.0)
            return base + 1

        assert not slices_the_write(function)

    def test_write_in_place_is_sliced_if_the_base_is_not_read(self) -> None:
        assert slices_the_write(lambda x: (x * 2).view(-1).mul_(3.0) + 1)

    def test_write_in_place_through_a_transpose_is_sliced(self) -> None:
        """A slice of a transposed tensor is always a view."""

        def function(x: Tensor) -> Tensor:
            base = x * 2
            base.transpose(0, 1).mul_(3.0)
            return base + 1

        assert slices_the_write(function)


def slices_the_write(function: Callable[[Tensor], Tensor]) -> bool:
    (node,) = calls(graph_of(function, (4, 6)), aten.mul_)
    return sources(node, 0) is not None


class TestSources:
    def test_node_that_is_read_twice_has_two_sources(self) -> None:
        (node,) = calls(graph_of(lambda x: x @ x, (4, 4)), aten.matmul)
        x = node.args[0]
        assert isinstance(x, fx.Node)
        assert sources(node, 0) == (Source(0, node=x), Source(None, node=x))

    def test_merged_heads_are_sliced_by_whole_heads(self) -> None:
        """Three heads of four: rows [4, 12) of the merged dimension are heads [1, 3)."""
        (node,) = calls(graph_of(lambda x: x.reshape(2, 5, 12), (2, 5, 3, 4)), aten.reshape)
        (heads,) = sources(node, 2) or ()
        assert (heads.dim, heads.scale, alignment([heads])) == (2, Fraction(1, 4), 4)
        assert heads.rows(4, 12) == (1, 3)
        assert alignment(sources(node, 1) or ()) == 1

    @pytest.mark.parametrize(
        ("output_rows", "input_rows"),
        [((0, 2), (0, 4)), ((1, 3), (1, 6)), ((2, 4), (3, 8))],
        ids=["first", "middle", "last"],
    )
    def test_halo_of_a_convolution_is_cut_at_the_border(
        self, output_rows: tuple[int, int], input_rows: tuple[int, int]
    ) -> None:
        """Kernel 3, stride 2, padding 1: rows [lo, hi) read rows [2 lo - 1, 2 hi) of 8."""

        def conv(x: Tensor, weight: Tensor) -> Tensor:
            return torch.conv2d(x, weight, padding=1, stride=2)

        (node,) = calls(graph_of(conv, (1, 2, 8, 8), (2, 2, 3, 3)), aten.conv2d)
        image, weight = sources(node, 2) or ()
        assert image.rows(*output_rows) == input_rows
        assert weight.dim is None


class TestCausalAttention:
    """Slices of query rows, of tensors with a batch and of tensors without."""

    @staticmethod
    def slice_graph(batch: tuple[int, ...], rows: tuple[int, int]) -> fx.Graph:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        dim, shape = len(batch) + 1, (*batch, 2, 8, 4)
        graph = graph_of(attention, shape, shape, shape)
        (node,) = calls(graph, aten.scaled_dot_product_attention)
        assert [source.dim for source in sources(node, dim) or ()] == [dim, None, None]
        sliced = fx.Graph()
        inputs = tuple(sliced.placeholder(name) for name in "qkv")
        emit(sliced, node, dim, rows, inputs, node.kwargs)
        return sliced

    @staticmethod
    def key_ranges(graph: fx.Graph) -> list[tuple[object, object]]:
        return [(node.args[2], node.args[3]) for node in calls(graph, aten.slice)]

    @pytest.mark.parametrize("batch", [(1,), ()], ids=["batch", "no batch"])
    def test_first_rows_need_no_mask(self, batch: tuple[int, ...]) -> None:
        assert calls(self.slice_graph(batch, (0, 4)), aten.tril) == []

    def test_later_rows_read_no_key_behind_them_and_need_no_mask(self) -> None:
        graph = self.slice_graph((1,), (4, 6))
        assert self.key_ranges(graph) == [(0, 6), (0, 6)]
        assert [node.args[3] for node in graph.nodes if node.target is attend_rows] == [4]
        assert calls(graph, aten.ones) == []

    def test_later_rows_without_a_batch_have_a_mask_of_their_rows(self) -> None:
        """No operator computes them without one."""
        graph = self.slice_graph((), (4, 6))
        assert self.key_ranges(graph) == [(0, 6), (0, 6)]
        assert [node for node in graph.nodes if node.target is attend_rows] == []
        assert [mask.args[0] for mask in calls(graph, aten.ones)] == [(2, 6)]
