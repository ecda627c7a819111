"""Configurations with one drawn change, for tests of the messages of refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

HUGE = (2**31, 2**53 + 1, 2**63, 2**64 - 59, 10**30, 10**400)
NUMBERS = st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, -1, -8, *HUGE, -(10**400)))
FLOATS = st.sampled_from(
    (0.0, 1.0, 2.0, 0.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
)
STRINGS = st.sampled_from(
    ("", "auto", "ring", "zigzag", "true", "None", "4", "rnig", "mesh", "lss", "é", "x" * 300)
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, STRINGS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(STRINGS, st.just("name")), inner, max_size=3),
    ),
    max_leaves=5,
)
NO_JSON = st.sampled_from((b"ring", (1, 2), {1, 2}, object(), 3j, range(3), len, {1: 2}, {None: 1}))
"""Values that a Python dict can hold and JSON cannot."""
VALUES = st.one_of(JSON, NO_JSON)


def paths_of(config: Any) -> list[tuple[Any, ...]]:
    """The paths of all keys, at any depth, the keys of the outermost mapping first."""
    if not isinstance(config, Mapping):
        return []
    nested = [(key, *path) for key in config for path in paths_of(config[key])]
    return [(key,) for key in config] + nested


@st.composite
def mutated(
    draw: st.DrawFn, bases: tuple[dict[str, Any], ...], values: st.SearchStrategy[Any]
) -> Any:
    """(path of the changed key, configuration): a base with one value, name or additional key."""
    config = deepcopy(draw(st.sampled_from(bases)))
    path = draw(st.sampled_from(paths_of(config)))
    *outer, key = path
    mapping = config
    for outer_key in outer:
        mapping = mapping[outer_key]
    change = draw(st.sampled_from(("value", "value", "value", "name", "additional key")))
    if change == "value":
        mapping[key] = draw(values)
        return path, config
    if change == "name":
        new_key = draw(st.sampled_from((key[:-1], key.upper(), key + "s", "")))
        mapping[new_key] = mapping.pop(key)
    else:
        new_key = draw(STRINGS)
        mapping[new_key] = draw(values)
    return (*outer, new_key), config


def assert_refusal_names_key(path: tuple[Any, ...], read: Callable[[], object]) -> None:
    """`read` accepts a configuration, or refuses it within a second and names a key of `path`.

    Any key of the path: {"route": {"name": 3}} may be refused as a route or as its name.
    """
    start = time.process_time()
    try:
        read()
    except (ValueError, NotImplementedError) as error:
        message = str(error)
        assert any(str(key) in message for key in path), (path, message)
        assert len(message) < 2000, message
    assert time.process_time() - start < 1, path
