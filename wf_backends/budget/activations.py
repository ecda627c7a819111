"""Bytes that the activations of one rank take in a training step.

Counted are the tensors that autograd saves in transformers' Llama (4.51) with our attention, and
the tensors that the backward makes while it is at one layer. Experts are those of transformers 5,
computed as one product over all tokens (`"grouped_mm"`).

    n  tokens of the rank                h  hidden size
    e  bytes of an element               i  width of the MLP
    E  experts of a layer                w  width of an expert
    c  experts that a token goes to      a  elements of a token's q, k, v and out, all heads
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends._validation import one_of
from wf_backends.budget.model import Decoder

CHECKPOINTS = ("none", "device", "host")
FP32_BYTES = 4  # norms and the loss are computed in float32, or wider where the model is wider
MAX_UPCAST_LOGITS = 1 << 24  # logits that the loss has in float32 at one time
TOKEN_BYTES = 32  # ids, labels and positions of one token


@dataclass(frozen=True, slots=True)
class Options:
    """How a training step keeps memory low.

    Raises:
        ValueError: for an unknown `checkpoints`, or a tile below 0.
    """

    checkpoints: str = "device"
    """Activation checkpointing: "none", or where the input of each layer is kept."""
    tile: int = 0
    """Tokens of one tile of MLP and loss, which the backward computes again; 0 = no tiles."""

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
    """The bytes of a step's activations on one rank.

    Args:
        tokens: of this rank, of all samples of its batch.
        attention_bytes: buffers of the attention's route, with the queries and incoming gradients
            of the rows that stay.
    """
    layer_input = model.hidden * model.itemsize * tokens
    attention_saved = tokens * _attention_saved(model)
    layer_saved = attention_saved + tokens * _mlp_saved(model, options)
    residual_gradient = layer_input
    attention = attention_saved + residual_gradient + attention_bytes
    norm = attention_saved + tokens * _norm_backward(model)
    mlp = max(layer_saved + _mlp_backward(model, tokens, options), norm)
    loss = _loss(model, tokens, options)
    shared = tokens * (2 * model.itemsize * model.head_dim + TOKEN_BYTES)  # rotary cos and sin
    if options.checkpoints == "none":
        kept = shared + (model.layers - 1) * layer_saved
        return Activations(kept, attention, mlp, layer_saved + loss, 0.0)
    checkpoints = model.layers * layer_input
    # In float32 a norm saves the layer's input itself, else a copy of it in float32.
    recomputed_input = layer_input if model.itemsize < FP32_BYTES else 0.0
    if options.checkpoints == "host":
        extra = recomputed_input
        return Activations(shared, attention + extra, mlp + extra, loss, checkpoints)
    extra = recomputed_input - layer_input  # the checkpoints hold this layer's input, too
    return Activations(shared + checkpoints, attention + extra, mlp + extra, loss, 0.0)


def _upcast_bytes(model: Decoder) -> int:
    """Bytes of an element of the norms and the loss."""
    return max(FP32_BYTES, model.itemsize)


def _norm_saved(model: Decoder) -> float:
    """Bytes a token: the input in float32, the normed input, and that times the weight."""
    return (_upcast_bytes(model) + 2 * model.itemsize) * model.hidden + _upcast_bytes(model)


def _norm_backward(model: Decoder) -> float:
    """Bytes a token: one gradient; the input and five tensors of its size in float32."""
    return (6 * _upcast_bytes(model) + model.itemsize) * model.hidden


def _attention_saved(model: Decoder) -> float:
    """Bytes a token: the norm before attention, q, k, v, out, and lse for each head.

    norm + e a + 4 heads
    """
    qkv_and_out = model.itemsize * model.attention_width
    return _norm_saved(model) + qkv_and_out + _upcast_bytes(model) * model.heads


def _mlp_saved(model: Decoder, options: Options) -> float:
    """Bytes a token: the norm before the MLP; gate, activated gate, up, their product: 4 e i."""
    if options.tile:
        return _norm_saved(model)
    inner = 4 * model.itemsize * model.intermediate
    return _norm_saved(model) + inner + _experts_saved(model)


def _mlp_backward(model: Decoder, tokens: int, options: Options) -> float:
    """Bytes beyond what is saved: e h n of the incoming gradient, and of the product's backward
    2 e i n, or what experts need if that is more.

    In tiles of t tokens: e h n once more for the gradient that the tiles fill, and 6 e i t with the
    gradient of one weight from a tile, or all of these rounded when the last tile is done.
    """
    rows, product = model.hidden * tokens, 2 * model.intermediate
    if not options.tile:
        inner = max(model.itemsize * product * tokens, _experts_backward(model, tokens))
        return model.itemsize * rows + inner
    tile_tokens, weights = min(options.tile, tokens), _mlp_weights(model)
    tile = model.itemsize * (3 * product * tile_tokens + model.hidden * model.intermediate)
    experts = _experts_saved(model) * tile_tokens + _experts_backward(model, tile_tokens)
    rounded = model.itemsize * weights if model.itemsize < FP32_BYTES else 0
    at_once = max(tile, experts, rounded)
    weight_grads = _weight_grad_sums(model, weights, tokens, options)
    return 2 * model.itemsize * rows + at_once + weight_grads


def _experts_saved(model: Decoder) -> float:
    """Bytes a token: c times its row, an MLP's tensors and the result; the router's choice.

    e c (2 h + 4 w) + 40 c + 4 E + 4
    """
    experts = model.experts
    if experts is None:
        return 0.0
    rows = model.itemsize * experts.chosen * (2 * model.hidden + 4 * experts.width)
    return rows + 40.0 * experts.chosen + 4 * experts.count + 4


def _experts_backward(model: Decoder, tokens: int) -> float:
    """Bytes beyond what is saved, the largest of three: results times the router's weights, three
    such tensors in float32, 12 c h n; the backward of the product, e c (2 w - h) n; the gradient of
    gate and up of all experts, when most of what was saved is freed, 2 e w (E h - c n).
    """
    experts, e = model.experts, model.itemsize
    if experts is None:
        return 0.0
    weighted = 3 * _upcast_bytes(model) * experts.chosen * model.hidden * tokens
    product = e * experts.chosen * (2 * experts.width - model.hidden) * tokens
    gradient = 2 * e * experts.width * (experts.count * model.hidden - experts.chosen * tokens)
    return max(weighted, product, gradient)


def _mlp_weights(model: Decoder) -> int:
    """Elements of the weights of a layer's MLP and experts: 3 h (i + E w)."""
    experts = model.experts.weights(model.hidden) if model.experts else 0
    return 3 * model.hidden * model.intermediate + experts


def _weight_grad_sums(model: Decoder, weights: int, tokens: int, options: Options) -> float:
    """Bytes of the weights' gradients in float32, which several tiles add up; 0 for one tile."""
    if options.tile == 0 or options.tile >= tokens:
        return 0.0
    return float(_upcast_bytes(model) * weights)


def _loss(model: Decoder, tokens: int, options: Options) -> float:
    """Bytes of the last norm, the logits and their gradient, and probabilities in float32.

    Logits in 16 bits are there in float32, too. Without tiles at most MAX_UPCAST_LOGITS elements of
    a tensor are in float32 at one time, with tiles all of a tile. With tiles there are also e h n,
    the gradient that the tiles fill, and the gradient of the head's weight.
    """
    tile_tokens = min(options.tile, tokens) if options.tile else tokens
    elements = model.vocabulary * tile_tokens
    upcast = elements if options.tile else min(elements, MAX_UPCAST_LOGITS)
    upcast_tensors = 1 if model.itemsize >= FP32_BYTES else 2
    logits = 2 * model.itemsize * elements + upcast_tensors * _upcast_bytes(model) * upcast
    rows = model.itemsize * model.hidden * tokens if options.tile else 0
    head_grad = _weight_grad_sums(model, model.vocabulary * model.hidden, tokens, options)
    return tokens * _norm_saved(model) + logits + rows + head_grad
