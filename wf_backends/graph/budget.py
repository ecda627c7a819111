"""How much memory activations may take, and how much time that may cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wf_backends._validation import parse_bytes


@dataclass(frozen=True)
class Budget:
    """What a plan has to keep: `memory` in bytes, a share below 1 of what the activations need as
    they are, or None for the least; `slowdown` as a share of the predicted time."""

    memory: int | float | None
    slowdown: float

    def in_bytes(self, before: int) -> Budget:
        """The same for a model that needs `before` bytes as it is, without a share."""
        if not isinstance(self.memory, float):
            return self
        return replace(self, memory=int(self.memory * before))


def checked_budget(
    max_memory: int | float | str | None, max_slowdown: float, names: str = "max_{}"
) -> Budget:
    """The budget as a user gives it; `names` is how the user calls its "memory" and "slowdown".

    Raises ValueError for what is none.
    """
    memory, slowdown = (names.format(word) for word in ("memory", "slowdown"))
    return Budget(_memory(memory, max_memory), _slowdown(slowdown, max_slowdown))


def _memory(name: str, value: int | float | str | None) -> int | float | None:
    if value is None:
        return None
    if not isinstance(value, float):
        return parse_bytes(name, value)
    if 0 < value < 1:
        return value
    raise ValueError(
        f"{name} as a float is a share of the peak as it is, between 0 and 1, got {value!r}; for "
        f'bytes give an int or a size such as "2GB"'
    )


def _slowdown(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} must be a number such as 0.1, 0 or more, got {value!r}")
    return float(value)
