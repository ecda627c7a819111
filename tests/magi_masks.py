"""The named masks of MagiAttention's distributed tests: (number of tokens, arguments of slices).

Source: SandAI-org/MagiAttention, tests/test_pipeline.py and tests/test_pipeline_sdpa.py. Their mask
types 0, 1, 2, 3 are full, causal, inverse causal and bicausal. Their other cases differ from these
only in sinks and chunk sizes.
"""

from __future__ import annotations

from itertools import pairwise

TYPES = ("full", "causal", "inverse_causal", "bicausal")


def _mask(q_ranges, k_ranges, types=None):
    """(number of tokens, arguments); `types` are indices of TYPES, 0 if left out."""
    types = types or [0] * len(q_ranges)
    arguments = {
        "q_ranges": [*q_ranges],
        "k_ranges": [*k_ranges],
        "attn_mask_types": [TYPES[index] for index in types],
    }
    return max(stop for _, stop in q_ranges), arguments


def _pieces(*edges):
    """The ranges between the edges."""
    return [*pairwise(edges)]


def _from(starts, edges):
    """The ranges that end at the edges, each with its own start."""
    return [*zip(starts, edges[1:], strict=True)]


def _upto(edges, stops):
    """The ranges that start at the edges, each with its own stop."""
    return [*zip(edges[:-1], stops, strict=True)]


# edges of the ranges; the number is the length in thousands, or in tokens
E12 = (0, 2048, 4096, 6144, 8192, 10240, 12288)
E15 = (*E12, 15360)
E144 = (0, 20480, 40960, 61440, 81920, 102400, 122880, 147456)
E1050, E960, E840 = ((0, 128, 256, 384, 512, 640, 768, end) for end in (1050, 960, 840))
E1K = (*range(0, 1025, 128),)
E11, E900 = (0, 2000, 4000, 6000, 8000, 9500, 11021), (0, 150, 300, 450, 600, 750, 900)
LAST3 = [(0, 128), (0, 256), (0, 384), (0, 512)]

MASKS = {
    "full_attn_14k": _mask([(0, 14336)], [(0, 14336)]),
    "varlen_full_attn_12k": _mask(_pieces(*E12), _pieces(*E12)),
    "varlen_block_causal_15k": _mask(_pieces(*E15), _from((0, 0, 0, 0, 8192, 8192, 12288), E15)),
    "varlen_block_causal_12k_with_q_overlap": _mask(
        _upto(E12, (8192, 8192, 8192, 8192, 12288, 12288)), _pieces(*E12)
    ),
    "bi_causal_12k_with_q_overlap": _mask(
        [*_pieces(*E12), (1000, 4000), (10000, 12000)],
        [
            *((0, 3072), (0, 4096), (0, 6144), (6144, 12288), (8192, 12288), (9216, 12288)),
            *((8000, 12000), (0, 5000)),
        ],
        [3] * 8,
    ),
    "continuous_multi_masks_10k_with_q_overlap": _mask(
        [
            *[(0, 2048)] * 4,
            *((2048, 4096), (3072, 5120), (5120, 7168), (6144, 8192)),
            *[(8192, 10240)] * 4,
        ],
        [
            *((0, 2048), (2048, 4096), (4096, 6144), (6144, 10240)),
            *((0, 2048), (2048, 4096)) * 2,
            *((0, 2048), (2048, 4096), (4096, 6144), (6144, 10240)),
        ],
        [2, 0, 1, 3, 2, 1, 2, 1, 2, 0, 1, 3],
    ),
    "full_mask_assembled_from_small_pieces_with_8k": _mask(
        [(i * 512, (i + 1) * 512) for i in range(16) for _ in range(8)],
        [(i * 1024, (i + 1) * 1024) for _ in range(16) for i in range(8)],
    ),
    "uneven_full_attn_10k": _mask([(0, 10000)], [(0, 10000)]),
    "uneven_varlen_11k": _mask(
        _pieces(*E11), _from((0, 0, 0, 0, 8000, 8000), E11), [0, 1, 2, 3, 2, 1]
    ),
    "full_attn_144k": _mask([(0, 147456)], [(0, 147456)]),
    "varlen_block_causal_144k": _mask(
        _pieces(*E144), _from((0, 0, 0, 0, 81920, 81920, 122880), E144)
    ),
    "full_attn_1k": _mask([(0, 1024)], [(0, 1024)]),
    "varlen_full_attn_1050": _mask(_pieces(*E1050), _pieces(*E1050)),
    "reverse_varlen_full_attn_1k": _mask(_pieces(*E1K), _pieces(*E1K)[::-1]),
    "varlen_block_causal_960": _mask(_pieces(*E960), _from((0, 0, 0, 0, 512, 512, 768), E960)),
    "varlen_block_causal_840": _mask(_pieces(*E840), _from((0, 0, 0, 0, 512, 512, 768), E840)),
    "reverse_varlen_block_causal_1k": _mask(
        _pieces(*E1K), [(512, 1024), (512, 896), (512, 768), (512, 640), *LAST3[::-1]]
    ),
    "upper_diagonal_varlen_block_causal_1k": _mask(
        _pieces(*E1K), _upto(E1K, [512] * 4 + [1024] * 4)
    ),
    "block_slide_window_full_1k": _mask(
        _pieces(*E1K),
        [(max(0, a - 256), min(1024, a + 384)) for a in E1K[:-1]],
    ),
    "block_slide_window_causal_1k": _mask(
        _pieces(*E1K), [(max(0, a - 256), a + 128) for a in E1K[:-1]]
    ),
    "reverse_block_slide_window_causal_1k": _mask(
        _pieces(*E1K), [(max(0, a - 256), a + 128) for a in E1K[-2::-1]]
    ),
    "share_question_1k_with_q_overlap": _mask(
        [(0, 1024), (128, 256), (256, 512), (512, 1024)],
        [(0, 128), (128, 256), (256, 512), (512, 1024)],
    ),
    "varlen_block_causal_1k_with_q_overlap": _mask(_upto(E1K, [1024] * 8), _pieces(*E1K)),
    "random_overlap_mask_1k": (
        1024,
        _mask(
            [
                *((0, 64), (96, 128), (32, 96), (128, 320), (192, 256), (200, 448), (700, 896)),
                *((768, 832), (640, 800), (896, 1024), (928, 960)),
            ],
            [
                *((0, 32), (16, 64), (96, 128), (128, 256), (256, 384), (384, 512), (512, 640)),
                *((640, 768), (768, 896), (896, 960), (960, 1024)),
            ],
        )[1],
    ),
    "varlen_block_causal_840_with_q_overlap": _mask(
        _upto(E840, [512] * 4 + [840] * 3), _pieces(*E840)
    ),
    "sdpa_uneven_varlen_900": _mask(
        _pieces(*E900), _from((0, 0, 0, 0, 600, 600), E900), [1, 0, 2, 3, 2, 1]
    ),
}
