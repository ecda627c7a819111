"""The sizes of a decoder that its memory follows from. Pure: standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    def __post_init__(self) -> None:
        others = {"experts", "intermediate"} if self.experts else {"experts"}
        for name in (one.name for one in fields(self) if one.name not in others):
            positive(name, getattr(self, name), MOST_ELEMENTS)

    @property
    def queries(self) -> int:
        """Width of a token's queries, all heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of a token's keys, all heads together; as wide are its values."""
        return self.kv_heads * self.head_dim
