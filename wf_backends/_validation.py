# pyright: reportUnnecessaryIsInstance=false
"""Checks of a user's values, and what was meant by a misspelt one; plain data read back.

Pure: standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from math import inf, isfinite
from reprlib import repr as short
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

AUTO = "auto"
UNITS = {
    **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix},
}
MOST = 2**16  # ranks, layers and parts that anyone has; more would take long to look at
MOST_SECONDS = 1e9  # of a timeout; torch counts nanoseconds in 64 bits

_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}
Data = TypeVar("Data")


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
    units = {unit.upper(): size for unit, size in UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(value))
    size = inf
    if isinstance(value, str) and match is not None:
        size = float(match[1]) * units.get(match[2].upper(), inf)
    if not isfinite(size):
        raise ValueError(
            f'{name} must be a number of bytes or a size such as "20GB" or "20GiB", '
            f"got {short(value)}"
        )
    return int(size)


def read_plain(kind: type[Data], words: object, where: str) -> Data:
    """The dataclass `kind` of a JSON object that has its fields as keys.

    Fields are integers, floats, strings, booleans, literals, other such dataclasses, and tuples of
    these. `where` is what the object is called in errors.

    Raises:
        ValueError: naming the key that is unknown, missing or of another type, and its value.
    """
    known = {field.name: field for field in fields(cast(Any, kind))}
    if not isinstance(words, Mapping):
        raise ValueError(
            f"{where} must be an object with the keys {list(known)}, got {short(words)}"
        )
    given = cast(Mapping[str, object], words)
    for key in given:
        if key not in known:
            raise ValueError(
                f"{where} has no key {key!r}{nearest(key, known)} (keys: {list(known)})"
            )
    for key, field in known.items():
        if key not in given and field.default is MISSING:
            raise ValueError(f"{where}: {key!r} is missing (keys: {list(known)})")
    kinds = get_type_hints(kind)
    return kind(**{key: _read(kinds[key], value, f"{where}.{key}") for key, value in given.items()})


def read_json(kind: type[Data], text: str, what: str) -> Data:
    """The plan of a text that its `to_json` wrote; `what` is what it is called.

    Raises:
        ValueError: for a text that holds none, with the key that is wrong.
    """
    try:
        return read_plain(kind, json.loads(text), "plan")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"this text is no {what} (see {kind.__name__}.to_json): {error}"
        ) from error


def _read(kind: Any, value: object, where: str) -> Any:
    if is_dataclass(kind):
        return read_plain(cast(type[Any], kind), value, where)
    if get_origin(kind) is Literal:
        one_of(where, value, get_args(kind))
        return value
    if get_origin(kind) is tuple:
        return tuple(_items(get_args(kind), value, where))
    right = type(value) is kind or (kind is float and type(value) is int)
    if not right or (kind is float and not isfinite(cast(float, value))):
        raise ValueError(f"{where} must be {_NAMES[kind]}, got {short(value)}")
    return value


def _items(kinds: tuple[Any, ...], value: object, where: str) -> Iterable[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, got {short(value)}")
    items = cast(list[object], value)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(items)
    if len(items) != len(kinds):
        raise ValueError(f"{where} must have {len(kinds)} items, got {short(items)}")
    each = enumerate(zip(kinds, items, strict=True))
    return [_read(kind, item, f"{where}[{i}]") for i, (kind, item) in each]
