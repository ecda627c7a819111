# pyright: reportUnnecessaryIsInstance=false
"""Checks of a user's values, and what was meant by a misspelt one.

Pure: standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any, cast

AUTO = "auto"
UNITS = {
    **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix},
}
MOST = 2**16  # ranks, layers and parts that anyone has; more would take long to look at
MOST_SECONDS = 1e9  # of a timeout; torch counts nanoseconds in 64 bits


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    close = get_close_matches(str(word), list(map(str, known)), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_block(name: str, words: object, known: Iterable[str], such: str) -> None:
    """Refuse what is no block of a JSON, or has a key that is not known.

    Args:
        such: a block that is right.

    Raises:
        ValueError: naming the block, and the key with the nearest known one.
    """
    if not isinstance(words, Mapping):
        raise ValueError(f'"{name}" must be a block such as {such}, got {words!r}')
    names = list(known)
    for key in cast(Mapping[object, object], words):
        if key not in names:
            raise ValueError(
                f'"{name}.{key}" is no known key{nearest(key, names)} (known: {", ".join(names)})'
            )


def of_type(name: str, value: object, kind: Any, right: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {right}, got a {type(value).__name__}")


def is_real(value: object) -> bool:
    """Whether it is an integer or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(name: str, value: object, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {short(value)}")


def seconds(name: str, value: object) -> None:
    """None, or a positive and finite number of seconds; ValueError otherwise."""
    if value is None:
        return
    if not is_real(value) or not 0 < cast(float, value) < MOST_SECONDS:
        raise ValueError(
            f"{name} must be a positive number of seconds below {MOST_SECONDS:g}, got {value!r}"
        )


def is_number(name: str, value: object) -> bool:
    """Whether it is a number and not "auto"; ValueError if it is neither."""
    if value == AUTO:
        return False
    if isinstance(value, str):
        raise ValueError(f'{name} must be a positive integer or "{AUTO}", got {value!r}')
    positive(name, value)
    return True


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"{name} must be one of {list(known)}, got {value!r}{nearest(value, known)}"
        )


def parse_bytes(name: str, value: object) -> int:
    """Bytes of a number, or of words such as "20GB" (10**9) and "20GiB" (2**30).

    Raises:
        ValueError: with `name` and the value, if it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(value))
    units = {unit.upper(): size for unit, size in UNITS.items()}
    if not isinstance(value, str) or match is None or match[2].upper() not in units:
        raise ValueError(
            f'{name} must be a number of bytes or a size such as "20GB" or "20GiB", got {value!r}'
        )
    return int(float(match[1]) * units[match[2].upper()])
