"""`SequenceParallelConfig.from_dict` accepts any values, or refuses them by the name of the key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.drawn_configs import VALUES, assert_refusal_names_key, mutated
from wf_backends import SequenceParallelConfig

BASES: tuple[dict[str, Any], ...] = (
    {"sequence_parallel_size": 8},
    {"sequence_parallel_size": 8, "route": {"name": "mesh", "rows": 2, "cols": 4, "order": [1, 0]}},
    {"sequence_parallel_size": 8, "route": {"name": "concentric", "team_size": 2}},
    {
        "sequence_parallel_size": 8,
        "route": {"name": "double_ring", "inner": 2},
        "backward_route": "ring",
        "backward_moves": "queries",
        "ulysses_degree": 2,
        "ulysses_stride": 2,
        "ulysses_chunks": 2,
        "layout": "contiguous",
        "kernel": "sdpa",
    },
    {
        "sequence_parallel_size": 4,
        "keep_gathered": "auto",
        "kept_layers": 3,
        "topology": "one-host",
    },
    {"sequence_parallel_size": 4, "strategy": "lss"},
)


@settings(max_examples=300, deadline=None)
@given(drawn=mutated(BASES, VALUES))
def test_drawn_options_are_accepted_or_refused_by_name(
    drawn: tuple[tuple[str, ...], dict[str, Any]],
) -> None:
    path, options = drawn
    assert_refusal_names_key(path, lambda: SequenceParallelConfig.from_dict(options))


@pytest.mark.parametrize("options", [None, 3, "ring", [("route", "ring")], {3: 4}, b"", object()])
def test_options_that_are_no_dict_of_strings_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="configuration|unknown key 3"):
        SequenceParallelConfig.from_dict(options)


def test_a_refusal_of_a_huge_value_is_short() -> None:
    value = [{"": 10**400, "x" * 300: 10**400}] * 3
    with pytest.raises(ValueError, match="sequence_parallel_size must be a positive") as refusal:
        SequenceParallelConfig.from_dict({"sequence_parallel_size": value})
    assert len(str(refusal.value)) < 500  # of 3,400
