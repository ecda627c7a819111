"""Masks in slices: small ones of known models, drawn ones, and a brute-force reference by pairs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

SEQLEN = 37
"""A prime: no number of ranks divides it."""


def sliced(*slices):
    """Arguments of attention for slices, each (q start, q stop, k start, k stop, type)."""
    return {
        "q_ranges": [(q0, q1) for q0, q1, *_ in slices],
        "k_ranges": [(k0, k1) for _, _, k0, k1, _ in slices],
        "attn_mask_types": [mask_type for *_, mask_type in slices],
    }


def sees(slices, query, key):
    """Whether the query sees the key in any slice, by the definition of the mask types."""
    for (q0, q1), (k0, k1), mask_type in zip(*slices.values(), strict=True):
        if not (q0 <= query < q1 and k0 <= key < k1):
            continue
        beyond_end = key - (k1 - 1) > query - (q1 - 1)  # the last query sees up to the last key
        before_start = key - k0 < query - q0  # the first query sees from the first key on
        hidden = {
            "full": False,
            "causal": beyond_end,
            "inverse_causal": before_start,
            "bicausal": beyond_end or before_start,
        }
        if not hidden[mask_type]:
            return True
    return False


def prefix_lm(prefix, seqlen=SEQLEN):
    """A prefix that sees all of itself, then causal text that also sees the prefix."""
    return sliced((0, prefix, 0, prefix, "full"), (prefix, seqlen, 0, seqlen, "causal"))


def block_causal(frame, seqlen=SEQLEN):
    """Frames of a video: each sees itself and all earlier frames."""
    edges = [*range(0, seqlen, frame), seqlen]
    frames = [(a, b) for a, b in pairwise(edges) if a < b]
    return sliced(*((a, b, 0, b, "full") for a, b in frames))


def shared_question(question, answers):
    """One causal question and several answers, which end at `answers`.

    An answer sees the question and, causally, itself; it does not see the other answers.
    """
    slices, start = [(0, question, 0, question, "causal")], question
    for stop in answers:
        slices += [(start, stop, 0, question, "full"), (start, stop, start, stop, "causal")]
        start = stop
    return sliced(*slices)


def prefix_tree(nodes):
    """Nodes (start, stop, ancestors): each sees its ancestors and, causally, itself."""
    itself = [(start, stop, start, stop, "causal") for start, stop, _ in nodes]
    ancestors = [
        (start, stop, *nodes[ancestor][:2], "full")
        for start, stop, ancestors in nodes
        for ancestor in ancestors
    ]
    return sliced(*itself, *ancestors)


def window_with_sinks(window, sinks, seqlen=SEQLEN):
    """A query sees `window` tokens before it, itself, and the first `sinks` tokens."""
    return sliced(
        (0, window, 0, window, "causal"),
        (window, seqlen, 0, seqlen, "bicausal"),
        (window + 1, window + sinks + 1, 0, sinks, "causal"),
        (window + sinks + 1, seqlen, 0, sinks, "full"),
    )


SLICES = {
    "prefix_lm": prefix_lm(11),
    "block_causal": block_causal(8),
    "shared_question": shared_question(9, (17, 20, 33)),
    "prefix_tree": prefix_tree(
        [(0, 6, ()), (6, 13, (0,)), (13, 19, (0, 1)), (19, 23, (0, 1)), (23, SEQLEN, (0,))]
    ),
    "window_with_sinks": window_with_sinks(6, 3),
    "inverse_causal": sliced((0, 20, 10, 37, "inverse_causal"), (20, 37, 0, 9, "inverse_causal")),
    "bicausal": sliced((0, 15, 2, 30, "bicausal"), (20, 37, 5, 30, "bicausal")),
    "causal_of_other_lengths": sliced((0, 10, 0, 30, "causal"), (10, 37, 3, 9, "causal")),
    "few_rows": sliced((3, 8, 30, 36, "full"), (20, 22, 0, 1, "full")),
}


@st.composite
def drawn_slices(draw, seqlen=SEQLEN):
    """Disjoint slices: cells of a drawn grid over queries and keys, each of any type or empty."""

    def ranges():
        cuts = draw(st.sets(st.integers(1, seqlen - 1), max_size=4))
        return list(pairwise((0, *sorted(cuts), seqlen)))

    mask_types = st.sampled_from((None, "full", "causal", "inverse_causal", "bicausal"))
    cells = [(*q, *k, draw(mask_types)) for q in ranges() for k in ranges()]
    slices = [cell for cell in cells if cell[-1]] or [(0, seqlen, 0, seqlen, "causal")]
    return sliced(*draw(st.permutations(slices)))
