"""The memory that activations may take, and the slowdown that this may cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wf_backends._validation import is_real, parse_bytes


@dataclass(frozen=True)
class Budget:
    """The limits of a plan: `memory` in bytes, as a share below 1 (float) of what the activations
    need without a plan, or None for as little as possible; `slowdown` is a share of the time."""

    memory: int | float | None
    slowdown: float

    def in_bytes(self, bytes_before: int) -> Budget:
        """This budget with `memory` in bytes, for a model that needs `bytes_before` as it is."""
        if not isinstance(self.memory, float):
            return self
        return replace(self, memory=int(self.memory * bytes_before))


def checked_budget(
    max_memory: int | float | str | None, max_slowdown: float, names: str = "max_{}"
) -> Budget:
    """The budget from a user's values; `names` is the pattern of their names, for errors.

    Raises ValueError for a value that is no memory or no slowdown.
    """
    memory, slowdown = names.format("memory"), names.format("slowdown")
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
