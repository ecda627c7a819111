"""Calls of every operator that has a rule, and the dimensions that can be sliced.

`case(operator, "02", arguments)`: the output can be sliced along its dimensions 0 and 2, and along
no other. `t("b", "s")` is a tensor of drawn sizes b and s: see `drawn.Draw`.
"""

from __future__ import annotations

import torch

from tests.autochunk.slicing.drawn import case
from tests.autochunk.slicing.rule_cases_space import ATTENTION, SPACE

aten = torch.ops.aten

COMPARISONS = aten.greater, aten.greater_equal, aten.less, aten.less_equal, aten.not_equal
COPIES = aten._to_copy, aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy
SCANS = aten.cummax, aten.cummin, aten.logcumsumexp, aten.cumprod, aten.cumsum
FFT_1D = tuple(getattr(aten, f"fft_{name}fft") for name in ("", "i", "r", "ir", "h", "ih"))
FFT_2D = aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2, aten.fft_irfft2
FFT_ND = aten.fft_fftn, aten.fft_ifftn, aten.fft_rfftn, aten.fft_irfftn
REDUCTIONS_OF_ONE_DIM = (
    aten.all.dim,
    aten.any.dim,
    aten.argmax,
    aten.argmin,
    aten.count_nonzero,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.prod.dim_int,
)
REDUCTIONS_OF_A_LIST_OF_DIMS = (
    aten.amax,
    aten.amin,
    aten.logsumexp,
    aten.mean.dim,
    aten.nansum,
    aten.sum.dim_IntList,
)

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
    case(aten.prelu, "012", lambda t: (t("b", "c", "s"), t("c"))),
    case(aten.prelu, "012", lambda t: (t("b", "c", "s"), t(1))),
    case(aten.prelu, "012", lambda t: (t("b", "c", "s"), t())),
    case(aten.view_as_complex, "01", lambda t: (t("b", "s", 2),)),
    case(aten.view_as_real, "01", lambda t: (torch.polar(t("b", "s"), t("b", "s")),)),
    case(aten.rsub.Tensor, "01", lambda t: (t("b", "s"), t("s"))),
    *(
        case(op, "01", lambda t: (t("b", "s") > 0, t("s") > 0))
        for op in (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor)
    ),
    *(
        case(op.Tensor, "01", lambda t: (t("b", "s"), t("s")))
        for op in (aten.divide, aten.true_divide, aten.multiply, aten.subtract)
    ),
    *(case(op.Tensor, "01", lambda t: (t("b", "s"), t("s"))) for op in COMPARISONS),
    *(
        case(op, "01", lambda t: (t("b", "s"),))
        for op in (*COPIES, aten.ones_like, aten.zeros_like, aten.zero, aten.zero_)
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
    case(aten.full, "01", lambda t: ([3, 4], 2.0)),
    case(aten.ones, "01", lambda t: ([3, 4],)),
    case(aten.zeros, "02", lambda t: ([3, 1, 4],)),
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
    case(aten.baddbmm, "012", lambda t: (t("b", 1, "m"), t("b", "n", "k"), t("b", "k", "m"))),
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
]

ALONG = [
    *(
        case(op, "02", lambda t: (t("b", "s", "d"), 1))
        for op in (*SCANS, aten.argsort, aten.sort, aten.log_softmax.int, aten.softmax.int)
    ),
    *(
        case(op, "01", lambda t: (t("b", "s", "d"), -1, False))
        for op in (aten._softmax, aten._log_softmax)
    ),
    *(case(op, "01", lambda t: (t("b", "s", "d"),)) for op in FFT_1D),
    *(case(op, "02", lambda t: (t("b", "s", "d"), 7, 1)) for op in FFT_1D),
    *(case(op, "01", lambda t: (t("b", "c", "s", "d"),)) for op in FFT_2D),
    *(case(op, "0", lambda t: (t("b", "s", "d"), None, [-1, 1])) for op in FFT_ND),
    *(case(op, "", lambda t: (t("b", "s", "d"),)) for op in FFT_ND),
    *(
        case(op, "02", lambda t: (t("b", "s", "d"), [1]))
        for op in (aten.fft_fftshift, aten.fft_ifftshift)
    ),
    case(aten.flip, "1", lambda t: (t("b", "s", "d"), [0, -1])),
    case(aten.roll, "02", lambda t: (t("b", "s", "d"), [1], [1])),
    case(aten.roll, "", lambda t: (t("b", "s"), [1])),
    case(aten.glu, "01", lambda t: (t("b", "s", 4),)),
    case(aten.topk, "01", lambda t: (t("b", "s", 4), 2)),
    case(aten.kthvalue, "01", lambda t: (t("b", "s", 4), 2)),
    *(case(op, "01", lambda t: (t("b", "s", "d"), 1)) for op in REDUCTIONS_OF_ONE_DIM),
    *(
        case(op, "02", lambda t: (t("b", "s", "d"), [-2], True))
        for op in REDUCTIONS_OF_A_LIST_OF_DIMS
    ),
    case(aten.sum.dim_IntList, "0", lambda t: (t("b", "s", "d"), [0, 2])),
    case(aten.sum, "", lambda t: (t("b", "s"),)),
    case(aten.linalg_norm, "12", lambda t: (t("b", "s", "d", 3), None, [0, 3], True)),
    case(aten.linalg_vector_norm, "01", lambda t: (t("b", "s", "d"), 2, [1])),
    case(aten.norm.ScalarOpt_dim, "01", lambda t: (t("b", "s", "d"), 2, [2], True)),
    *(
        case(op.correction, "01", lambda t: (t("b", "s", "d"), [-1]), correction=0, keepdim=True)
        for op in (aten.std, aten.std_mean, aten.var, aten.var_mean)
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
    case(aten.concatenate, "1", lambda t: ([t("b", "s"), t(3, "s")],)),
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
    *(
        case(op, "0", lambda t: (t("b", 7), 1, t.below(7, "b", 3), t("b", 3)))
        for op in (aten.scatter.src, aten.scatter_.src, aten.scatter_add)
    ),
    case(aten.scatter.value, "0", lambda t: (t("b", 7), 1, t.below(7, "b", 3), 2.0)),
    case(aten.scatter.src, "", lambda t: (t("b", 7), 1, t.below(7, 1, 3), t("b", 3))),
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
    case(
        aten.index.Tensor,
        "0123",
        lambda t: (t("b", 7, "d", 5), [None, t.below(7, "n"), None, t.below(5, "m", 1)]),
    ),
    case(aten.index.Tensor, "", lambda t: (t(7, "s"), [t(7) > 0])),
    case(aten.embedding, "012", lambda t: (t(9, "d"), t.below(9, "b", "s"))),
]

CASES = [*POINTWISE, *VIEWS, *PRODUCTS, *ALONG, *SELECT, *ATTENTION, *SPACE]
