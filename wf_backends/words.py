# pyright: reportUnnecessaryIsInstance=false
"""What a configuration's words may be, and what was meant by others.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from wf_backends.schedule import ROUTES
from wf_backends.suggest import nearest

AUTO = "auto"
KERNELS = ("reference", "sdpa", "flash")


def meant(key: str, known: Sequence[str]) -> str:
    """Where a key that stands outside its route belongs, or the nearest known key."""
    owner = next((name for name, kind in ROUTES.items() if key in kind.keys), None)
    if owner is None:
        return nearest(key, known)
    return f'; it belongs inside "route": {{"name": "{owner}", "{key}": ...}}'


def positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


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
