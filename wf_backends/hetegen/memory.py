"""Sizes as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from wf_backends._validation import nearest, parse_bytes

ACCELERATOR = "accelerator"
KEYS = ("0", ACCELERATOR, "cpu")


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
