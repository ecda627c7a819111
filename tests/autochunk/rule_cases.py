"""For every operator that has a rule: calls of drawn sizes, and the dimensions that are sliced."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wf_backends.autochunk.group_norm import group_normalize, group_statistics

aten = torch.ops.aten


class Draw:
    """Sizes and tensors from one seed. Sizes are 2 to 6 and the letters' own for a whole case."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes: dict[str, int] = {}

    def size(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        return self.sizes.setdefault(name, self.random.randint(2, 6))

    def __call__(self, *shape: str | int) -> Tensor:
        """A float64 tensor; a letter stands for a drawn size."""
        sizes = [self.size(name) for name in shape]
        return torch.randn(sizes, generator=self.generator, dtype=torch.float64)

    def below(self, high: str | int, *shape: str | int) -> Tensor:
        """Integers in [0, high)."""
        sizes = [self.size(name) for name in shape]
        return torch.randint(0, self.size(high), sizes, generator=self.generator)


@dataclass(frozen=True)
class Case:
    """A call of `target`; `dims` of its output have a rule and all others are walls."""

    target: Callable[..., Any]
    dims: tuple[int, ...]
    build: Callable[[Draw], tuple[Any, ...]]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.target.__module__ or ''}.{getattr(self.target, '__name__', self.target)}"


def case(target: Any, dims: str, build: Callable[[Draw], tuple[Any, ...]], **kwargs: Any) -> Case:
    """`dims` as digits: "02" for dimensions 0 and 2."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return Case(target, tuple(map(int, dims)), build, kwargs)


POINTWISE = [
    case(aten.gelu, "012", lambda t: (t("b", "s", "d"),)),
    case(aten.pow.Tensor_Scalar, "01", lambda t: (t("b", "s"), 3)),
    case(aten.mul.Tensor, "012", lambda t: (t("b", "s", "d"), t("d"))),
    case(aten.mul.Tensor, "012", lambda t: (t("b", 1, "d"), t("s", 1))),
    case(aten.mul_.Tensor, "012", lambda t: (t("b", "s", "d"), t("s", 1))),
    case(aten.max.other, "01", lambda t: (t("b", "s"), t("s"))),
    case(aten.bernoulli, "", lambda t: (t("b", "s").sigmoid(),)),
    case(aten.rrelu, "", lambda t: (t("b", "s"), 0.1, 0.3, True)),
    case(aten.add.Tensor, "01", lambda t: (t("b", "s"), t("b", 1))),
    case(aten.sub.Tensor, "01", lambda t: (t("b", "s"), t("b", 1))),
    case(aten.add_.Tensor, "01", lambda t: (t("b", "s"), t("b", 1))),
    case(aten.where.self, "012", lambda t: (t("b", "s", 1) > 0, t("d"), t("b", 1, "d"))),
    case(aten.where.ScalarSelf, "01", lambda t: (t("b", "s") > 0, 0.5, t("s"))),
    case(aten.masked_fill.Scalar, "01", lambda t: (t("b", "s"), t("s") > 0, -1.0)),
    case(aten.masked_fill.Tensor, "01", lambda t: (t("b", "s"), t("s") > 0, t())),
    case(aten.masked_fill_.Scalar, "01", lambda t: (t("b", "s"), t("b", 1) > 0, -1.0)),
    case(aten.copy_, "01", lambda t: (t("b", "s"), t("s"))),
    case(aten.copy, "01", lambda t: (t("b", "s"), t("s"))),
    case(aten.fill.Scalar, "01", lambda t: (t("b", "s"), 2.0)),
    case(aten.expand_as, "012", lambda t: (t("s", 1), t("b", "s", "d"))),
    case(aten.hardswish, "01", lambda t: (t("b", "s"),)),
    case(aten.log_sigmoid, "01", lambda t: (t("b", "s"),)),
    case(aten.isclose, "01", lambda t: (t("b", "s"), t("s"))),
    case(aten.floor_divide, "01", lambda t: (t("b", "s"), t("s"))),
    case(aten.polar, "01", lambda t: (t("b", "s"), t("b", "s"))),
    case(aten.rsub.Tensor, "01", lambda t: (t("b", "s"), t("s"))),
    *(
        case(op, "01", lambda t: (t("b", "s") > 0, t("s") > 0))
        for op in (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor)
    ),
    *(
        case(op.Tensor, "01", lambda t: (t("b", "s"), t("s")))
        for op in (aten.divide, aten.true_divide, aten.multiply, aten.subtract)
    ),
    *(
        case(op.Tensor, "01", lambda t: (t("b", "s"), t("s")))
        for op in (*(aten.greater, aten.greater_equal, aten.less, aten.less_equal, aten.not_equal),)
    ),
    *(
        case(op, "01", lambda t: (t("b", "s"),))
        for op in (
            *(aten._to_copy, aten.alias, aten.clone, aten.contiguous, aten.detach),
            *(aten.lift_fresh_copy, aten.ones_like, aten.zeros_like, aten.zero, aten.zero_),
        )
    ),
    case(aten.full_like, "01", lambda t: (t("b", "s"), 3.0)),
    case(aten.to.dtype, "01", lambda t: (t("b", "s"), torch.float32)),
    case(aten.type_as, "01", lambda t: (t("b", "s"), t("d").float())),
    *(
        case(op, dims, lambda t, p=p, train=train: (t("b", "s"), p, train))
        for op in (aten.dropout, aten.feature_dropout, aten.alpha_dropout)
        for dims, p, train in (("01", 0.5, False), ("01", 0.0, True), ("", 0.5, True))
    ),
    *(
        case(op, "012", lambda t, diagonal=diagonal: (t("b", "s", "d"), diagonal))
        for op in (aten.tril, aten.triu)
        for diagonal in (-1, 0, 2)
    ),
]

VIEWS = [
    case(aten.view, "012", lambda t: (t("b", "s", 6), [t.size("b"), t.size("s"), 2, 3])),
    case(aten.view, "01", lambda t: (t("b", 4, 3), [-1, 12])),
    case(aten.view, "01", lambda t: (t("b", "s", 3), [-1, 3])),
    case(aten.view.dtype, "", lambda t: (t("b", "s"), torch.int64)),
    case(aten._unsafe_view, "02", lambda t: (t("b", 1, "s"), [-1, 1, t.size("s")])),
    case(aten.reshape, "0", lambda t: (t(4, 6), [6, 4])),
    case(aten.reshape, "013", lambda t: (t(2, 6, "d"), [2, 2, 3, -1])),
    case(aten.flatten.using_ints, "01", lambda t: (t("b", "s", 4), 1, 2)),
    case(aten.unflatten.int, "01", lambda t: (t("b", 6), 1, [3, 2])),
    case(aten.squeeze, "01", lambda t: (t("b", 1, "s"),)),
    case(aten.squeeze.dim, "01", lambda t: (t("b", 1, "s"), 1)),
    case(aten.unsqueeze, "02", lambda t: (t("b", "s"), 1)),
    case(aten.squeeze_, "", lambda t: (t("b", 1, "s"),)),
    case(aten.adjoint, "012", lambda t: (t("b", "s", "d"),)),
    case(aten.mT, "012", lambda t: (t("b", "s", "d"),)),
    case(aten.moveaxis.int, "012", lambda t: (t("b", "s", "d"), 0, 2)),
    case(aten.movedim.int, "012", lambda t: (t("b", "s", "d"), -1, 0)),
    case(aten.numpy_T, "012", lambda t: (t("b", "s", "d"),)),
    case(aten.permute, "0123", lambda t: (t("b", "s", "d", "e"), [0, -1, 1, 2])),
    case(aten.swapaxes, "012", lambda t: (t("b", "s", "d"), 0, 2)),
    case(aten.swapdims, "012", lambda t: (t("b", "s", "d"), 0, 1)),
    case(aten.t, "01", lambda t: (t("b", "s"),)),
    case(aten.transpose.int, "0123", lambda t: (t("b", "s", "d", "e"), 1, -1)),
    case(aten.expand, "012", lambda t: (t("s", 1), [t.size("b"), -1, 5])),
    case(aten.broadcast_to, "01", lambda t: (t("s"), [t.size("b"), t.size("s")])),
    case(aten.new_full, "01", lambda t: (t("b"), [3, 4], 2.0)),
    case(aten.new_ones, "01", lambda t: (t("b"), [3, 4])),
    case(aten.new_zeros, "01", lambda t: (t("b"), [3, 4])),
    case(aten.repeat, "02", lambda t: (t("s", "d"), [3, 2, 1])),
    case(aten.repeat, "01", lambda t: (t("s", 1), [1, 4])),
    case(aten.repeat_interleave.self_int, "01", lambda t: (t("b", "s"), 3, 1)),
    case(aten.repeat_interleave.self_int, "0", lambda t: (t("b"), 2), output_size=None),
    case(aten.repeat_interleave.self_int, "", lambda t: (t("b", "s"), 2)),
]

PRODUCTS = [
    case(aten.addbmm, "01", lambda t: (t("n", "m"), t("b", "n", "k"), t("b", "k", "m")), beta=2),
    case(aten.addmm, "01", lambda t: (t("m"), t("n", "k"), t("k", "m")), beta=2, alpha=3),
    case(aten.addmm, "01", lambda t: (t("n", 1), t("n", "k"), t("k", "m"))),
    case(aten.addmv, "0", lambda t: (t("n"), t("n", "k"), t("k"))),
    case(aten.baddbmm, "012", lambda t: (t("b", 1, "m"), t("b", "n", "k"), t("b", "k", "m"))),
    case(
        aten.bilinear,
        "012",
        lambda t: (t("b", "s", "i"), t("b", "s", "j"), t("o", "i", "j"), t("o")),
    ),
    case(aten.bmm, "012", lambda t: (t("b", "n", "k"), t("b", "k", "m"))),
    case(aten.mm, "01", lambda t: (t("n", "k"), t("k", "m"))),
    case(aten.mv, "0", lambda t: (t("n", "k"), t("k"))),
    case(aten.outer, "01", lambda t: (t("n"), t("m"))),
    case(
        aten.einsum,
        "0123",
        lambda t: ("bhid,bhjd->bhij", [t("b", "h", "i", "d"), t("b", "h", "j", "d")]),
    ),
    case(aten.einsum, "012", lambda t: ("...k,ok", [t("b", "s", "k"), t("o", "k")])),
    case(aten.einsum, "012", lambda t: ("... k, k o -> o ...", [t("b", "s", "k"), t("k", "o")])),
    case(aten.einsum, "", lambda t: ("bii->bi", [t("b", "n", "n")])),
    case(aten.linear, "012", lambda t: (t("b", "s", "i"), t("o", "i"), t("o"))),
    case(aten.linear, "01", lambda t: (t("s", "i"), t("o", "i"))),
    case(aten.linear, "01", lambda t: (t("b", "s", "i"), t("i"))),
    case(aten.matmul, "0123", lambda t: (t("b", "h", "n", "k"), t("b", "h", "k", "m"))),
    case(aten.matmul, "01234", lambda t: (t("a", 1, "h", "n", "k"), t("b", 1, "k", "m"))),
    case(aten.matmul, "01", lambda t: (t("k"), t("b", "k", "m"))),
    case(aten.matmul, "01", lambda t: (t("b", "n", "k"), t("k"))),
    case(aten.matmul, "", lambda t: (t("k"), t("k"))),
    case(aten.tensordot, "012", lambda t: (t("b", "k", "s"), t("m", "k"), [1], [-1])),
]

ALONG = [
    *(
        case(op, "02", lambda t: (t("b", "s", "d"), 1))
        for op in (
            *(aten.argsort, aten.cummax, aten.cummin, aten.logcumsumexp, aten.sort),
            *(aten.cumprod, aten.cumsum, aten.log_softmax.int, aten.softmax.int),
        )
    ),
    *(
        case(op, "01", lambda t: (t("b", "s", "d"), -1, False))
        for op in (aten._softmax, aten._log_softmax)
    ),
    case(aten.flip, "1", lambda t: (t("b", "s", "d"), [0, -1])),
    case(aten.roll, "02", lambda t: (t("b", "s", "d"), [1], [1])),
    case(aten.roll, "", lambda t: (t("b", "s"), [1])),
    case(aten.glu, "01", lambda t: (t("b", "s", 4),)),
    case(aten.topk, "01", lambda t: (t("b", "s", 4), 2)),
    case(aten.kthvalue, "01", lambda t: (t("b", "s", 4), 2)),
    *(
        case(op, "01", lambda t: (t("b", "s", "d"), 1))
        for op in (
            *(aten.all.dim, aten.any.dim, aten.argmax, aten.argmin, aten.count_nonzero),
            *(aten.max.dim, aten.min.dim, aten.median.dim, aten.prod.dim_int),
        )
    ),
    *(
        case(op, "02", lambda t: (t("b", "s", "d"), [-2], True))
        for op in (
            aten.amax,
            aten.amin,
            aten.logsumexp,
            aten.mean.dim,
            aten.nansum,
            aten.sum.dim_IntList,
        )
    ),
    case(aten.sum.dim_IntList, "0", lambda t: (t("b", "s", "d"), [0, 2])),
    case(aten.sum, "", lambda t: (t("b", "s"),)),
    case(aten.linalg_vector_norm, "01", lambda t: (t("b", "s", "d"), 2, [1])),
    case(aten.norm.ScalarOpt_dim, "01", lambda t: (t("b", "s", "d"), 2, [2], True)),
    *(
        case(op, "01", lambda t: (t("b", "s", "d"), [-1]), correction=0, keepdim=True)
        for op in (
            *(aten.std.correction, aten.std_mean.correction),
            *(aten.var.correction, aten.var_mean.correction),
        )
    ),
    case(aten.layer_norm, "01", lambda t: (t("b", "s", 4), [4], t(4), t(4))),
    case(aten.layer_norm, "0", lambda t: (t("b", 3, 4), [3, 4])),
    case(aten.rms_norm, "01", lambda t: (t("b", "s", 4), [4], t(4))),
    case(
        aten.linalg_cross, "01", lambda t: (t("b", "s", 3), t("s", 3).expand(t.size("b"), -1, -1))
    ),
    case(aten.one_hot, "01", lambda t: (t.below(5, "b", "s"), 5)),
    case(aten.slice_scatter, "02", lambda t: (t("b", 6, "d"), t("b", 3, "d"), 1, 2, 5)),
]

SELECT = [
    case(aten.cat, "02", lambda t: ([t("b", "s", "d"), t("b", 3, "d")], 1)),
    case(aten.cat, "", lambda t: ([t(0), t("b", "s")], -1)),
    case(aten.concat, "01", lambda t: ([t("b", "s", "d"), t("b", "s", "e")], -1)),
    case(aten.stack, "02", lambda t: ([t("b", "s"), t("b", "s")], 1)),
    *(
        case(op, "01", lambda t, cut=cut: (t("b", "s", 6), cut, -1))
        for op, cut in (
            (aten.chunk, 4),
            (aten.split.Tensor, 4),
            (aten.split_with_sizes, [1, 5]),
            (aten.tensor_split.sections, 4),
            (aten.unsafe_chunk, 2),
            (aten.unsafe_split.Tensor, 2),
            (aten.unsafe_split_with_sizes, [1, 5]),
        )
    ),
    case(aten.unbind.int, "01", lambda t: (t("b", "s", "d"), 1)),
    case(aten.select.int, "01", lambda t: (t("b", "s", "d"), -2, 1)),
    case(aten.slice.Tensor, "012", lambda t: (t("b", 7, "d"), 1, 2, 6)),
    case(aten.slice.Tensor, "01", lambda t: (t("b", 7), 1, -4)),
    case(aten.slice.Tensor, "0", lambda t: (t("b", 7), 1, 0, 7, 2)),
    case(aten.narrow, "01", lambda t: (t("b", 7), 1, 2, 4)),
    case(aten.narrow.Tensor, "", lambda t: (t("b", 7), 1, torch.tensor(2), 4)),
    case(aten.constant_pad_nd, "012", lambda t: (t("b", "s", 6), [1, 2, -1, 3], 0.5)),
    case(aten.constant_pad_nd, "1", lambda t: (t(1, 2), [9, 4])),
    case(aten.pad, "012", lambda t: (t("b", "s", "d"), [0, 1])),
    case(aten.pad, "01", lambda t: (t("b", "s", 4), [1, 1], "reflect")),
    case(aten.gather, "01", lambda t: (t("b", 7), 1, t.below(7, "b", "s"))),
    case(aten.index_select, "01", lambda t: (t("b", 7), 1, t.below(7, "s"))),
    case(aten.index.Tensor, "0123", lambda t: (t("b", 7, "d"), [None, t.below(7, "m", "n")])),
    case(
        aten.index.Tensor,
        "012",
        lambda t: (t(7, "s", 5), [t.below(7, "n"), None, t.below(5, "m", 1)]),
    ),
    case(
        aten.index.Tensor,
        "012",
        lambda t: (t("b", 7, 5), [None, t.below(7, "n"), t.below(5, "m", 1)]),
    ),
    case(aten.index.Tensor, "", lambda t: (t(7, "s"), [t(7) > 0])),
    case(aten.embedding, "012", lambda t: (t(9, "d"), t.below(9, "b", "s"))),
]

ATTENTION = [
    case(
        op := aten.scaled_dot_product_attention,
        "012",
        lambda t: (t("b", "h", "s", 4), t("b", "h", "k", 4), t("b", "h", "k", 3)),
    ),
    case(op, "01", lambda t: (t("h", "s", 4), t("h", "k", 4), t("h", "k", 4))),
    case(op, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), None, 0.0, True)),
    case(op, "12", lambda t: (*(t(1, "h", 9, 4) for _ in "qkv"), None, 0.0, True)),
    case(
        op,
        "01",
        lambda t: (t("b", "h", 3, 4), t("b", "h", 5, 4), t("b", "h", 5, 4), None, 0.0, True),
    ),
    case(op, "", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), None, 0.5)),
    case(op, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), t("b", 1, "s", "s"))),
    case(op, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), t("h", 1, "s") > -1)),
    case(
        op,
        "012",
        lambda t: (t("b", 6, "s", 4), t("b", 2, "s", 4), t("b", 2, "s", 4), None, 0.0, True),
        enable_gqa=True,
    ),
    case(
        op,
        "012",
        lambda t: (t("b", 4, "s", 4), t("b", 1, "s", 4), t("b", 1, "s", 4)),
        enable_gqa=True,
    ),
]

SPACE = [
    case(aten.conv1d, "012", lambda t: (t("b", "c", 9), t("o", "c", 3), t("o"), [2], [1])),
    case(aten.conv1d, "01", lambda t: (t("c", 9), t("o", "c", 4), None, [3], [2], [1])),
    case(
        aten.conv1d.padding,
        "012",
        lambda t: (t("b", "c", 9), t("o", "c", 3), None, [1], "same", [2]),
    ),
    case(aten.conv1d.padding, "01", lambda t: (t("b", "c", 9), t("o", "c", 4), None, [1], "same")),
    case(aten.conv1d.padding, "012", lambda t: (t("b", "c", 9), t("o", "c", 4))),
    case(
        aten.conv2d,
        "0123",
        lambda t: (t("b", "c", 9, 7), t("o", "c", 3, 3), t("o"), [1, 1], [1, 1]),
    ),
    case(
        aten.conv2d,
        "0123",
        lambda t: (t("b", "c", 12, 11), t("o", "c", 3, 2), None, [2, 3], [4, 1], [2, 1]),
    ),
    case(
        aten.conv2d,
        "023",
        lambda t: (t("b", 4, 9, 7), t(6, 2, 1, 3), t(6), [2, 1], [0, 1], [1, 1], 2),
    ),
    case(
        aten.conv3d,
        "01234",
        lambda t: (t("b", "c", 5, 6, 7), t("o", "c", 3, 3, 2), None, [1, 2, 1], [1, 1, 0]),
    ),
    case(
        aten.convolution,
        "0123",
        lambda t: (
            t("b", "c", 9, 7),
            t("o", "c", 3, 3),
            None,
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
        ),
    ),
    case(
        aten.convolution,
        "0",
        lambda t: (
            t("b", "c", 5, 5),
            t("c", "o", 3, 3),
            None,
            [2, 2],
            [1, 1],
            [1, 1],
            True,
            [0, 0],
            1,
        ),
    ),
    case(aten.conv_transpose1d, "0", lambda t: (t("b", "c", 5), t("c", "o", 3))),
    case(aten.conv_transpose2d.input, "0", lambda t: (t("b", "c", 5, 5), t("c", "o", 3, 3))),
    case(aten.conv_transpose2d.input, "", lambda t: (t("c", 5, 5), t("c", "o", 3, 3))),
    case(aten.conv_transpose3d.input, "0", lambda t: (t("b", "c", 3, 3, 3), t("c", "o", 2, 2, 2))),
    case(aten.max_pool1d, "012", lambda t: (t("b", "c", 9), [3], [2], [1])),
    case(aten.max_pool2d, "0123", lambda t: (t("b", "c", 9, 8), [3, 3], [2, 1], [1, 1], [1, 2])),
    case(
        aten.max_pool2d, "01", lambda t: (t("b", "c", 9, 8), [3, 3], [2, 2], [0, 0], [1, 1], True)
    ),
    case(aten.max_pool3d, "01234", lambda t: (t("b", "c", 4, 4, 6), [2, 2, 2])),
    case(aten.avg_pool1d, "012", lambda t: (t("b", "c", 9), [3], [2], [1])),
    case(aten.avg_pool2d, "0123", lambda t: (t("b", "c", 8, 8), [2, 2])),
    case(
        aten.avg_pool2d, "01", lambda t: (t("b", "c", 9, 8), [3, 3], [2, 2], [1, 1], False, False)
    ),
    case(aten.avg_pool3d, "01234", lambda t: (t("b", "c", 4, 4, 6), [2, 2, 2], [], [1, 0, 1])),
    case(aten.adaptive_avg_pool1d, "01", lambda t: (t("b", "c", 9), [4])),
    case(aten.adaptive_avg_pool2d, "01", lambda t: (t("b", "c", 9, 6), [4, 4])),
    case(aten.adaptive_avg_pool3d, "01", lambda t: (t("b", "c", 4, 6, 6), [2, 2, 2])),
    case(aten.reflection_pad1d, "01", lambda t: (t("b", "c", 5), [1, 2])),
    case(aten.reflection_pad2d, "01", lambda t: (t("b", "c", 5, 5), [1, 2, 1, 1])),
    case(aten.reflection_pad3d, "01", lambda t: (t("b", "c", 5, 5, 5), [1] * 6)),
    case(aten.replication_pad1d, "01", lambda t: (t("b", "c", 5), [1, 2])),
    case(aten.replication_pad2d, "01", lambda t: (t("b", "c", 5, 5), [1, 2, 1, 1])),
    case(aten.replication_pad3d, "01", lambda t: (t("b", "c", 5, 5, 5), [1] * 6)),
    case(aten.upsample_nearest1d, "012", lambda t: (t("b", "c", 5), [10])),
    case(aten.upsample_nearest2d, "013", lambda t: (t("b", "c", 5, 4), [8, 12])),
    case(aten.upsample_nearest2d.vec, "0123", lambda t: (t("b", "c", 5, 4), None, [2.0, 3.0])),
    case(aten.upsample_nearest2d.vec, "013", lambda t: (t("b", "c", 2, 4), None, [2.4, 2.0])),
    case(aten.upsample_nearest2d.vec, "0123", lambda t: (t("b", "c", 5, 4), [10, 8], None)),
    case(aten.upsample_nearest3d, "01234", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2])),
    case(aten._upsample_nearest_exact1d, "012", lambda t: (t("b", "c", 5), [15])),
    case(aten._upsample_nearest_exact2d, "0123", lambda t: (t("b", "c", 5, 4), [10, 8])),
    case(aten._upsample_nearest_exact3d, "01234", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2])),
    case(aten.upsample_bicubic2d, "01", lambda t: (t("b", "c", 5, 4), [10, 8], False)),
    case(aten.upsample_bilinear2d, "01", lambda t: (t("b", "c", 5, 4), [10, 8], False)),
    case(aten.upsample_linear1d, "01", lambda t: (t("b", "c", 5), [10], False)),
    case(aten.upsample_trilinear3d, "01", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2], False)),
    case(aten.pixel_shuffle, "0", lambda t: (t("b", 8, 3, 3), 2)),
    case(aten.pixel_unshuffle, "0", lambda t: (t("b", 2, 4, 6), 2)),
    case(
        aten.batch_norm,
        "0123",
        lambda t: (t("b", 3, 4, 5), t(3), t(3), t(3), t(3).exp(), False, 0.1, 1e-5, False),
    ),
    case(
        aten.batch_norm,
        "",
        lambda t: (t("b", 3, 4, 5), t(3), t(3), t(3), t(3).exp(), True, 0.1, 1e-5, False),
    ),
    case(aten.group_norm, "0", lambda t: (t("b", 6, 4, 5), 3, t(6), t(6))),
    case(group_statistics, "0", lambda t: (t("b", 6, 4, 5), 3, 1e-5)),
    case(group_normalize, "023", lambda t: (t("b", 6, 4, 5), t("b", 3, 2), 3, t(6), t(6))),
    case(group_normalize, "02", lambda t: (t("b", 6, 4), t("b", 3, 2), 3, None, None)),
]

CASES = [*POINTWISE, *VIEWS, *PRODUCTS, *ALONG, *SELECT, *ATTENTION, *SPACE]
