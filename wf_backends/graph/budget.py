"""How much memory activations may take, and how much time that may cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wf_backends._validation import is_real, parse_bytes


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
    if isinstance(max_memory, float):
        if not 0 < max_memory < 1:
            raise ValueError(
                f"{memory} as a float is a share of the peak as it is, between 0 and 1, got "
                f'{max_memory!r}; for bytes give an int or a size such as "2GB"'
            )
    elif max_memory is not None:
        max_memory = parse_bytes(memory, max_memory)
    if not is_real(max_slowdown) or not max_slowdown >= 0:
        raise ValueError(
            f"{slowdown} must be a number such as 0.1, 0 or more, got {max_slowdown!r}"
        )
    return Budget(max_memory, float(max_slowdown))
