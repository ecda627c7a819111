"""Configurations with one thing wrong, drawn by hypothesis: for tests of what refusals say."""

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
WORDS = st.sampled_from(
    ("", "auto", "ring", "zigzag", "true", "None", "4", "rnig", "mesh", "lss", "é", "x" * 300)
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(WORDS, st.just("name")), inner, max_size=3),
    ),
    max_leaves=5,
)
NO_JSON = st.sampled_from((b"ring", (1, 2), {1, 2}, object(), 3j, range(3), len, {1: 2}, {None: 1}))
"""Values that a Python dict may hold and no JSON."""
VALUES = st.one_of(JSON, NO_JSON)


def paths_of(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all keys, at any depth."""
    if not isinstance(config, Mapping):
        return []
    inner = [(*path, key) for key in config]
    return inner + [more for one in inner for more in paths_of(config[one[-1]], one)]


@st.composite
def mutated(
    draw: st.DrawFn, bases: tuple[dict[str, Any], ...], values: st.SearchStrategy[Any]
) -> Any:
    """(path of the key that was changed, the configuration)."""
    config = deepcopy(draw(st.sampled_from(bases)))
    path = draw(st.sampled_from(paths_of(config)))
    around = config
    for key in path[:-1]:
        around = around[key]
    kind = draw(st.sampled_from(("value", "value", "value", "name", "more")))
    if kind == "value":
        around[path[-1]] = draw(values)
    elif kind == "name":
        wrong = draw(st.sampled_from((path[-1][:-1], path[-1].upper(), path[-1] + "s", "")))
        around[wrong] = around.pop(path[-1])
        path = (*path[:-1], wrong)
    else:
        path = (*path[:-1], draw(WORDS))
        around[path[-1]] = draw(values)
    return path, config


def check_refusal(path: tuple[Any, ...], read: Callable[[], object]) -> None:
    """That it is accepted, or refused within a second by an error that names the key.

    Any key of the path will do: {"route": {"name": 3}} may be refused as a route or as its name.
    """
    start = time.process_time()
    try:
        read()
    except (ValueError, NotImplementedError) as error:
        said = str(error)
        assert any(str(key) in said for key in path), (path, said)
        assert len(said) < 2000, said
    assert time.process_time() - start < 1, path
