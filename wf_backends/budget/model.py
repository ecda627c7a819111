"""The sizes of a decoder from which its memory is computed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from wf_backends._validation import positive

MAX_ELEMENTS = 10**15
SIZES = "layers hidden vocabulary heads kv_heads head_dim parameters itemsize".split()


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, each a gated MLP.

    Raises:
        ValueError: naming a size that is no positive integer.
    """

    count: int
    chosen: int
    """Experts that one token goes to."""
    width: int

    def __post_init__(self) -> None:
        for size in fields(self):
            positive(f"experts.{size.name}", getattr(self, size.name), MAX_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer holds in training: bytes a token, but for its weights.

    Parts of a backward: of the layer's end before the MLP, of the MLP, of attention, and the rest.
    """

    count: int
    """Layers of this kind."""
    mlp_weights: int
    """Elements of the weights of the MLP, experts included."""
    largest_weight: int
    """Elements of the largest of these."""
    saved: float
    """From the forward to the backward."""
    mlp_saved: float
    """Of these, what the MLP saves besides its input."""
    attention: float
    """When the backward of attention begins, without the buffers of its route."""
    mlp_begin: float
    """When the backward of the MLP begins."""
    mlp: float
    """At the peak of the MLP's backward."""
    before: float
    """At the peak before it."""
    rest: float
    """At the peak after it, attention left out."""
    recomputed: float
    """The layer's input if it is not among `saved`, else 0."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder like Llama, as its config describes it: gated MLPs, RMS norms.

    With `experts`, every layer is counted as a mixture of experts.

    Raises:
        ValueError: naming a size that is no positive integer.
    """

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP that every token goes through; 0 where there are only experts."""
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
    kinds: tuple[Layer, ...] = ()
    """Its layers, as counted in the model; none: they are counted by formulas for Llama's."""
    last_norm: float | None = None
    """Bytes a token in the backward of the norm after the layers; None = those of Llama's."""
    is_capped: bool = False
    """Whether a tanh caps its logits (Gemma 2)."""
    uncounted: str = ""
    """Why the layers could not be counted in the model."""

    def __post_init__(self) -> None:
        for name in SIZES:
            positive(name, getattr(self, name), MAX_ELEMENTS)
        if self.intermediate or not self.experts:
            positive("intermediate", self.intermediate, MAX_ELEMENTS)
        if self.value_dim is not None:
            positive("value_dim", self.value_dim, MAX_ELEMENTS)

    @property
    def expert_weights(self) -> int:
        """Elements of the weights of all experts of a layer: 3 h E w; 0 if it has none."""
        return 3 * self.hidden * self.experts.count * self.experts.width if self.experts else 0

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, keys, values and outputs, all heads together."""
        return (self.heads + self.kv_heads) * (self.head_dim + (self.value_dim or self.head_dim))
