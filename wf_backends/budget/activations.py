"""What activations of one rank take in a training step. Pure: standard library only.

Counted are the tensors that autograd saves in transformers' Llama (4.51) with our attention, and
those that the backward makes while it is at one layer, and in the experts of transformers 5, which
are one product over all tokens (`"grouped_mm"`). n tokens of the rank, e bytes of an element, h
hidden size, i width of the MLP, a elements of q, k, v and out, all heads; of E experts a token goes
to c, each of width w.
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends._validation import one_of
from wf_backends.budget.model import Decoder

CHECKPOINTS = ("none", "device", "host")
WIDE = 4  # bytes in which norms and the loss are computed, at least
LOSS_ELEMENTS = 1 << 24  # logits that the loss has in WIDE bytes at one time
POSITIONS = 32  # bytes a token: ids, labels, positions


@dataclass(frozen=True, slots=True)
class Options:
    """How a training step keeps memory low.

    Raises:
        ValueError: for checkpoints that there are not, or a tile below 0.
    """

    checkpoints: str = "device"
    """Whether of a layer its input alone is kept for the backward, and where."""
    tile: int = 0
    """Tokens that MLP and loss are computed for at a time, in the backward again; 0 = all."""

    def __post_init__(self) -> None:
        one_of("checkpoints", self.checkpoints, CHECKPOINTS)
        if self.tile < 0:
            raise ValueError(f"tile must be a number of tokens, 0 for all, got {self.tile!r}")


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one rank's device, and in the host's memory for it."""

    kept: float
    """Of all layers, from the forward to the backward."""
    attention: float
    """Of one layer while its attention's backward runs, buffers of the route included."""
    mlp: float
    """Of one layer while the backward of its MLP runs, or of the norm before it."""
    loss: float
    """While logits and loss are computed."""
    host: float

    @property
    def peak(self) -> float:
        """kept + max(attention, mlp, loss), bytes on the device."""
        return self.kept + max(self.attention, self.mlp, self.loss)


def activations(
    model: Decoder, tokens: int, attention_bytes: float, options: Options
) -> Activations:
    """What the activations of a step take.

    Args:
        tokens: of this rank, of all samples of its batch.
        attention_bytes: buffers of the attention's route, queries and incoming gradients of the
            rows that stay among them.
    """
    inputs = model.hidden * model.itemsize * tokens
    half = tokens * _attention_saved(model)
    layer = half + tokens * _mlp_saved(model, options)
    attention = half + inputs + attention_bytes  # the gradient of the sum that goes around it
    mlp = max(layer + _mlp_alive(model, tokens, options), half + tokens * _norm_alive(model))
    fixed = tokens * (2 * model.itemsize * model.head_dim + POSITIONS)
    if options.checkpoints == "none":
        others = (model.layers - 1) * layer
        loss = layer + _loss(model, tokens, options)
        return Activations(fixed + others, attention, mlp, loss, 0.0)
    own = inputs if model.itemsize < WIDE else 0.0  # a norm in WIDE bytes saves it itself
    kept = fixed if options.checkpoints == "host" else fixed + model.layers * inputs
    beside = own if options.checkpoints == "host" else own - inputs
    host = model.layers * inputs if options.checkpoints == "host" else 0.0
    loss = _loss(model, tokens, options)
    return Activations(kept, attention + beside, mlp + beside, loss, host)


def _norm_saved(model: Decoder) -> float:
    """Bytes a token: its input in WIDE bytes, what is normed, and that times the weight."""
    wide = max(WIDE, model.itemsize)
    return (wide + 2 * model.itemsize) * model.hidden + wide


def _norm_alive(model: Decoder) -> float:
    """Bytes a token of a norm's backward: a gradient; its input and five more in WIDE bytes."""
    return (6 * max(WIDE, model.itemsize) + model.itemsize) * model.hidden


def _attention_saved(model: Decoder) -> float:
    """Bytes a token: the norm before it, q, k, v, out, and lse for each head.

    norm + e a + 4 heads
    """
    wide = max(WIDE, model.itemsize)
    rows = model.itemsize * model.attention_width
    return _norm_saved(model) + rows + wide * model.heads


def _mlp_saved(model: Decoder, options: Options) -> float:
    """Bytes a token: the norm before it; gate, activated gate, up, and their product: 4 e i."""
    if options.tile:
        return _norm_saved(model)
    inner = 4 * model.itemsize * model.intermediate
    return _norm_saved(model) + inner + _experts_saved(model)


def _mlp_alive(model: Decoder, tokens: int, options: Options) -> float:
    """Beyond what is saved: e h n of the incoming gradient, and of the product's backward 2 e i n,
    or what experts have if that is more.

    In tiles of t tokens: e h n once more for the gradient that the tiles fill, and 6 e i t with one
    weight's gradient of a tile, or all of them rounded when the last tile is done.
    """
    rows, product = model.hidden * tokens, 2 * model.intermediate
    if not options.tile:
        inner = max(model.itemsize * product * tokens, _experts_alive(model, tokens))
        return model.itemsize * rows + inner
    some, weights = min(options.tile, tokens), _mlp_weights(model)
    tile = model.itemsize * (3 * product * some + model.hidden * model.intermediate)
    experts = _experts_saved(model) * some + _experts_alive(model, some)
    rounded = model.itemsize * weights if model.itemsize < WIDE else 0
    at_once = max(tile, experts, rounded)
    return 2 * model.itemsize * rows + at_once + _sums(model, weights, tokens, options)


def _experts_saved(model: Decoder) -> float:
    """Bytes a token: c times its row, those of an MLP and the result, and what the router chose.

    e c (2 h + 4 w) + 40 c + 4 E + 4
    """
    one = model.experts
    if one is None:
        return 0.0
    rows = model.itemsize * one.chosen * (2 * model.hidden + 4 * one.width)
    return rows + 40.0 * one.chosen + 4 * one.count + 4


def _experts_alive(model: Decoder, tokens: int) -> float:
    """Beyond what is saved, the most of: results times their weights, three of them in WIDE bytes,
    12 c h n; the product's backward, e c (2 w - h) n; the gradient of gate and up of all experts,
    when most of what was saved is gone, 2 e w (E h - c n).
    """
    one, e = model.experts, model.itemsize
    if one is None:
        return 0.0
    weighted = 3 * max(WIDE, e) * one.chosen * model.hidden * tokens
    product = e * one.chosen * (2 * one.width - model.hidden) * tokens
    gradient = 2 * e * one.width * (one.count * model.hidden - one.chosen * tokens)
    return max(weighted, product, gradient)


def _mlp_weights(model: Decoder) -> int:
    """Elements of all weights: 3 h (i + E w)."""
    experts = model.experts.weights(model.hidden) if model.experts else 0
    return 3 * model.hidden * model.intermediate + experts


def _sums(model: Decoder, weights: int, tokens: int, options: Options) -> float:
    """The gradients of weights, in WIDE bytes, that several tiles add up."""
    several = 0 < options.tile < tokens
    return float(several * max(WIDE, model.itemsize) * weights)


def _loss(model: Decoder, tokens: int, options: Options) -> float:
    """The last norm, logits and their gradient, and some probabilities in WIDE bytes.

    Where logits are narrower, these logits in WIDE bytes too. In tiles all of a tile are in WIDE
    bytes; beside them are e h n, the gradient that the tiles fill, and the head's.
    """
    some = min(options.tile, tokens) if options.tile else tokens
    wide = max(WIDE, model.itemsize)
    elements = model.vocabulary * some
    tensors = 1 if model.itemsize >= WIDE else 2
    upcast = elements if options.tile else min(elements, LOSS_ELEMENTS)
    logits = 2 * model.itemsize * elements + tensors * wide * upcast
    rows = model.itemsize * model.hidden * tokens if options.tile else 0
    sums = _sums(model, model.vocabulary * model.hidden, tokens, options)
    return tokens * _norm_saved(model) + logits + rows + sums
