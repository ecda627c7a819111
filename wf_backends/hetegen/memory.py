"""Sizes as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf

from wf_backends._validation import nearest

UNITS = {
    **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix},
}
ACCELERATOR = "accelerator"
KEYS = ("0", ACCELERATOR, "cpu")


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


def parse_max_memory(max_memory: Mapping[int | str, int | str]) -> tuple[int, float]:
    """(bytes of the accelerator, bytes of the host: inf if not given).

    Raises:
        ValueError: for a key that there is not, a bad size, or no size for the accelerator.
    """
    sizes: dict[str, int] = {}
    for key, value in max_memory.items():
        if str(key) not in KEYS:
            raise ValueError(
                f'max_memory may have the keys 0 (or "{ACCELERATOR}") and "cpu", '
                f"got {key!r}{nearest(key, KEYS)}"
            )
        memory = ACCELERATOR if str(key) == "0" else str(key)
        if memory in sizes:
            raise ValueError(f'max_memory has both 0 and "{ACCELERATOR}", which are the same')
        sizes[memory] = parse_bytes(f"max_memory[{key!r}]", value)
    if ACCELERATOR not in sizes:
        raise ValueError(
            f'max_memory must say how much of the accelerator may be used, as {{0: "20GB"}}; '
            f"got {dict(max_memory)!r}"
        )
    return sizes[ACCELERATOR], sizes.get("cpu", inf)
