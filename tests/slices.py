"""Masks in slices: those that models ask for, small; drawn ones; what they mean, pair by pair."""

from __future__ import annotations

from hypothesis import strategies as st

SEQLEN = 37
"""Divides by nothing."""


def words(*slices):
    """The three lists of attention's arguments, of (start, stop, start, stop, type)."""
    return {
        "q_ranges": [(one[0], one[1]) for one in slices],
        "k_ranges": [(one[2], one[3]) for one in slices],
        "attn_mask_types": [one[4] for one in slices],
    }


def sees(slices, query, key):
    """Whether the query sees the key in some slice: the types as they are told in words."""
    for (q0, q1), (k0, k1), kind in zip(*slices.values(), strict=True):
        if not (q0 <= query < q1 and k0 <= key < k1):
            continue
        row, last = query - q0, query - (q1 - 1)
        beyond_end = key - (k1 - 1) > last  # the last query sees up to the last key
        before_start = key - k0 < row  # the first query sees from the first key on
        hidden = {
            "full": False,
            "causal": beyond_end,
            "inverse_causal": before_start,
            "bicausal": beyond_end or before_start,
        }
        if not hidden[kind]:
            return True
    return False


def prefix_lm(prefix, seqlen=SEQLEN):
    """A prefix that sees all of itself, and causal text behind it."""
    return words((0, prefix, 0, prefix, "full"), (prefix, seqlen, 0, seqlen, "causal"))


def block_causal(frame, seqlen=SEQLEN):
    """Frames of video that see themselves and all frames before."""
    edges = [*range(0, seqlen, frame), seqlen]
    return words(
        *((a, b, 0, b, "full") for a, b in zip(edges[:-1], edges[1:], strict=True) if a < b)
    )


def shared_question(question, answers):
    """Answers that see the question and themselves, and not each other."""
    found, start = [(0, question, 0, question, "causal")], question
    for stop in answers:
        found += [(start, stop, 0, question, "full"), (start, stop, start, stop, "causal")]
        start = stop
    return words(*found)


def prefix_tree(nodes):
    """Nodes that see their ancestors and, causally, themselves: [(start, stop, ancestors)]."""
    own = [(a, b, a, b, "causal") for a, b, _ in nodes]
    above = [(a, b, *nodes[up][:2], "full") for a, b, ups in nodes for up in ups]
    return words(*own, *above)


def window_with_sinks(window, sinks, seqlen=SEQLEN):
    """A query sees `window` tokens before it, itself, and the first `sinks` tokens."""
    return words(
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
    "inverse_causal": words((0, 20, 10, 37, "inverse_causal"), (20, 37, 0, 9, "inverse_causal")),
    "bicausal": words((0, 15, 2, 30, "bicausal"), (20, 37, 5, 30, "bicausal")),
    "causal_of_other_lengths": words((0, 10, 0, 30, "causal"), (10, 37, 3, 9, "causal")),
    "few_rows": words((3, 8, 30, 36, "full"), (20, 22, 0, 1, "full")),
}


@st.composite
def drawn_slices(draw, seqlen=SEQLEN):
    """Disjoint slices: cells of a grid over queries and keys, each with any type, or none."""

    def edges():
        cuts = draw(st.sets(st.integers(1, seqlen - 1), max_size=4))
        found = (0, *sorted(cuts), seqlen)
        return list(zip(found[:-1], found[1:], strict=True))

    kinds = st.sampled_from((None, "full", "causal", "inverse_causal", "bicausal"))
    cells = [(*q, *k, draw(kinds)) for q in edges() for k in edges()]
    found = [cell for cell in cells if cell[-1]] or [(0, seqlen, 0, seqlen, "causal")]
    return words(*draw(st.permutations(found)))
