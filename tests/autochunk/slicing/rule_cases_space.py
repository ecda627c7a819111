"""Calls of attention and of operators on images, and the dimensions that are sliced."""

from __future__ import annotations

import torch

from tests.autochunk.slicing.drawn import case
from wf_backends.autochunk.slicing.group_norm import group_normalize, group_statistics

aten = torch.ops.aten

sdpa = aten.scaled_dot_product_attention

# The last arguments of aten.convolution: dilation, transposed, output_padding, groups.
PLAIN = [1, 1], False, [0, 0], 1
TRANSPOSED = [1, 1], True, [0, 0], 1

ATTENTION = [
    case(
        sdpa,
        "012",
        lambda t: (t("b", "h", "s", 4), t("b", "h", "k", 4), t("b", "h", "k", 3)),
    ),
    case(sdpa, "01", lambda t: (t("h", "s", 4), t("h", "k", 4), t("h", "k", 4))),
    case(sdpa, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), None, 0.0, True)),
    case(sdpa, "12", lambda t: (*(t(1, "h", 9, 4) for _ in "qkv"), None, 0.0, True)),
    case(
        sdpa,
        "01",
        lambda t: (t("b", "h", 3, 4), t("b", "h", 5, 4), t("b", "h", 5, 4), None, 0.0, True),
    ),
    # Keys and values, or keys alone, that are broadcast to the queries.
    case(sdpa, "012", lambda t: (*(t(b, "h", "s", 4) for b in ("b", 1, 1)), None, 0.0, True)),
    case(sdpa, "012", lambda t: (*(t("b", h, "s", 4) for h in ("h", 1, "h")), None, 0.0, True)),
    case(sdpa, "", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), None, 0.5)),
    case(sdpa, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), t("b", 1, "s", "s"))),
    case(sdpa, "012", lambda t: (*(t("b", "h", "s", 4) for _ in "qkv"), t("h", 1, "s") > -1)),
    case(
        sdpa,
        "012",
        lambda t: (t("b", 6, "s", 4), t("b", 2, "s", 4), t("b", 2, "s", 4), None, 0.0, True),
        enable_gqa=True,
    ),
    case(
        sdpa,
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
        lambda t: (t("b", "c", 9, 7), t("o", "c", 3, 3), None, [1, 1], [1, 1], *PLAIN),
    ),
    case(
        aten.convolution,
        "0",
        lambda t: (t("b", "c", 5, 5), t("c", "o", 3, 3), None, [2, 2], [1, 1], *TRANSPOSED),
    ),
    case(aten.conv_transpose1d, "01", lambda t: (t("b", "c", 5), t("c", "o", 3))),
    case(
        aten.conv_transpose1d, "012", lambda t: (t("b", "c", 7), t("c", "o", 4), t("o"), [2], [1])
    ),
    case(
        aten.conv_transpose1d,
        "012",
        lambda t: (t("b", "c", 7), t("c", "o", 3), None, [3], [1], [0], 1, [2]),
    ),
    case(  # the last row is of no input
        aten.conv_transpose1d,
        "01",
        lambda t: (t("b", "c", 7), t("c", "o", 2), None, [3], [0], [1]),
    ),
    case(aten.conv_transpose2d.input, "01", lambda t: (t("b", "c", 5, 5), t("c", "o", 3, 3))),
    case(aten.conv_transpose2d.input, "", lambda t: (t("c", 5, 5), t("c", "o", 3, 3))),
    case(
        aten.conv_transpose2d.input,
        "0123",
        lambda t: (t("b", "c", 6, 5), t("c", "o", 3, 2), t("o"), [2, 2], [1, 0], [1, 0]),
    ),
    case(
        aten.conv_transpose2d.input,
        "023",
        lambda t: (t("b", 4, 6, 5), t(4, 3, 2, 6), t(6), [2, 2], [0, 2], [0], 2),
    ),
    case(
        aten.conv_transpose3d.input,
        "01234",
        lambda t: (t("b", "c", 3, 3, 4), t("c", "o", 2, 2, 2), None, [2]),
    ),
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
    case(aten.upsample_nearest2d.vec, "012", lambda t: (t("b", "c", 5, 10), None, [2.0, 1.15])),
    case(aten.upsample_nearest2d, "012", lambda t: (t("b", "c", 5, 10), [10, 11], 2.0, 1.15)),
    case(aten.upsample_nearest3d, "01234", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2])),
    case(aten._upsample_nearest_exact1d, "012", lambda t: (t("b", "c", 5), [15])),
    case(aten._upsample_nearest_exact2d, "0123", lambda t: (t("b", "c", 5, 4), [10, 8])),
    case(aten._upsample_nearest_exact3d, "01234", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2])),
    case(aten.upsample_bicubic2d, "01", lambda t: (t("b", "c", 5, 4), [10, 8], False)),
    case(aten.upsample_bilinear2d, "01", lambda t: (t("b", "c", 5, 4), [10, 8], False)),
    case(aten.upsample_linear1d, "01", lambda t: (t("b", "c", 5), [10], False)),
    case(aten.upsample_trilinear3d, "01", lambda t: (t("b", "c", 2, 3, 2), [4, 6, 2], False)),
    case(aten.pixel_shuffle, "0123", lambda t: (t("b", 8, 3, 3), 2)),
    case(aten.pixel_unshuffle, "0123", lambda t: (t("b", 2, 4, 6), 2)),
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
