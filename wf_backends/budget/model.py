"""The sizes of a decoder that its memory follows from. Pure: standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from wf_backends._validation import positive

MOST_ELEMENTS = 10**15


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, each a gated MLP.

    Raises:
        ValueError: naming a size that is no positive integer.
    """

    count: int
    chosen: int
    """How many of them a token goes to."""
    width: int

    def weights(self, hidden: int) -> int:
        """Elements of all of them in a layer: 3 h E w."""
        return 3 * hidden * self.count * self.width

    def __post_init__(self) -> None:
        for one in fields(self):
            positive(f"experts.{one.name}", getattr(self, one.name), MOST_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder of Llama's kind, as its config describes it: gated MLPs, RMS norms.

    Of a mixture of experts every layer counts as one.

    Raises:
        ValueError: naming a size that is no positive integer.
    """

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP that every token goes through; 0: there are experts alone."""
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    """Elements of all parameters."""
    itemsize: int = 2
    """Bytes of one element of a parameter and of an activation."""
    experts: Experts | None = None
    value_dim: int | None = None
    """head_dim of the values; None = that of queries and keys."""

    def __post_init__(self) -> None:
        others: dict[str, Any] = {"experts": self.experts, "value_dim": None}
        others |= {"intermediate": 0} if self.experts else {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in others or value != others[one.name]:
                positive(one.name, value, MOST_ELEMENTS)

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, keys, values and outputs, all heads together."""
        return (self.heads + self.kv_heads) * (self.head_dim + (self.value_dim or self.head_dim))
