# pyright: reportUnnecessaryIsInstance=false
"""Checks of a user's values, suggestions for misspelt ones, and plain data from JSON.

A check raises ValueError with the name and the value. Pure: standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from math import inf, isfinite
from reprlib import repr as short
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

AUTO = "auto"
UNITS = {  # in capital letters -> bytes
    "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", start=1)},
}
MAX_PARTS = 2**16  # ranks, layers or parts: no job has more, and planning for more takes long
MAX_TOKENS = 1 << 62
MIN_SECONDS, MAX_SECONDS = 1e-3, 1e9  # of a timeout; torch counts ms, or ns in 64 bits

_TYPE_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}
Data = TypeVar("Data")


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    close = get_close_matches(str(word), list(map(str, known)), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(values: Iterable[object]) -> str:
    """Values as text, for an error: "1, 2, 4"."""
    return ", ".join(map(str, values))


def check_block(name: str, block: object, known: Iterable[str], example: str) -> None:
    """Check that `block` is a JSON object whose keys are all known.

    Args:
        example: a correct block, for the error.

    Raises:
        ValueError: naming the block, and the unknown key with the nearest known one.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'"{name}" must be a block such as {example}, got {short(block)}')
    names = list(known)
    for key in cast(Mapping[object, object], block):
        if key not in names:
            raise ValueError(
                f'"{name}.{key}" is an unknown key{nearest(key, names)} (known: {", ".join(names)})'
            )


def check_keys(
    where: str, data: object, known: Iterable[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """The data itself, if it is a JSON object with these keys; those in `optional` may be missing.

    Raises:
        ValueError: naming `where`, and the key that is unknown (with the nearest known one) or
            missing.
    """
    keys = list(known)
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object with the keys {keys}, got {short(data)}")
    values = cast(Mapping[str, Any], data)
    for key in values:
        if key not in keys:
            hint = nearest(key, keys)
            raise ValueError(f"{where}: unknown key {key!r}{hint} (known keys: {keys})")
    for key in keys:
        if key not in values and key not in optional:
            raise ValueError(f"{where}: {key!r} is missing (known keys: {keys})")
    return values


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; json itself would silently take the last of two values of a key."""
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"key {key!r} is given twice: {members[key]!r} and {value!r}")
        members[key] = value
    return members


def of_type(name: str, value: object, expected_type: Any, expected: str) -> None:
    if not isinstance(value, expected_type):
        raise ValueError(f"{name} must be {expected}, got a {type(value).__name__}")


def is_real(value: object) -> bool:
    """Whether the value is an integer or a float, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(name: str, value: object, maximum: int = MAX_PARTS) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {short(value)}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {short(value)}")


def seconds(name: str, value: object) -> None:
    """Check that the value is None or a number of seconds from MIN_SECONDS to MAX_SECONDS."""
    if value is None:
        return
    if not is_real(value) or not MIN_SECONDS <= cast(float, value) <= MAX_SECONDS:
        raise ValueError(
            f"{name} must be a number of seconds from {MIN_SECONDS:g} to {MAX_SECONDS:g}, "
            f"got {short(value)}"
        )


def is_number(name: str, value: object) -> bool:
    """True for a positive integer, False for "auto"; ValueError for any other value."""
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
    """The bytes of an integer, or of a size such as "20GB" (20 * 10**9) or "20GiB" (20 * 2**30).

    Raises:
        ValueError: with `name` and the value, if it is no size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(value))
    size = inf
    if isinstance(value, str) and match is not None:
        size = float(match[1]) * UNITS.get(match[2].upper(), inf)
    if not isfinite(size):
        raise ValueError(
            f'{name} must be a number of bytes or a size with its unit, such as "20GB", "20GiB" '
            f'or "26B", got {short(value)}'
        )
    return int(size)


def read_plain(cls: type[Data], data: object, where: str) -> Data:
    """The dataclass `cls` from a JSON object that has its fields as keys.

    Fields are integers, floats, strings, booleans, literals, other such dataclasses, and tuples of
    these. `where` is the object's name in errors.

    Raises:
        ValueError: naming the key that is unknown, missing or of another type, and its value.
    """
    known = fields(cast(Any, cls))
    optional = [field.name for field in known if field.default is not MISSING]
    values = check_keys(where, data, [field.name for field in known], optional)
    types = get_type_hints(cls)
    return cls(**{key: _read(types[key], value, f"{where}.{key}") for key, value in values.items()})


def read_json(cls: type[Data], text: str, what: str) -> Data:
    """The plan of class `cls` that its `to_json` wrote as `text`; errors call it `what`.

    Raises:
        ValueError: if the text holds no such plan, naming the key that is wrong.
    """
    try:
        data = json.loads(text, object_pairs_hook=without_duplicates)
        return read_plain(cls, data, "plan")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this text is no {what} (see {cls.__name__}.to_json): {error}") from error


def _read(expected: Any, value: object, where: str) -> Any:
    """The value as the type `expected`."""
    if is_dataclass(expected):
        return read_plain(cast(type[Any], expected), value, where)
    if get_origin(expected) is Literal:
        one_of(where, value, get_args(expected))
        return value
    if get_origin(expected) is tuple:
        return tuple(_read_items(get_args(expected), value, where))
    is_right = type(value) is expected or (expected is float and type(value) is int)
    if not is_right or (expected is float and not isfinite(cast(float, value))):
        raise ValueError(f"{where} must be {_TYPE_NAMES[expected]}, got {short(value)}")
    return value


def _read_items(types: tuple[Any, ...], value: object, where: str) -> Iterable[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, got {short(value)}")
    items = cast(list[object], value)
    if types[-1] is Ellipsis:
        types = types[:1] * len(items)
    if len(items) != len(types):
        raise ValueError(f"{where} must have {len(types)} items, got {short(items)}")
    pairs = enumerate(zip(types, items, strict=True))
    return [_read(expected, item, f"{where}[{i}]") for i, (expected, item) in pairs]
