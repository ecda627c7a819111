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

from wf_backends.budget.model import Decoder, Experts, Layer

CHECKPOINTS = ("none", "device", "host")
FP32_BYTES = 4  # norms and the loss are computed in float32, or wider where the model is wider
MAX_UPCAST_LOGITS = 1 << 24  # logits that the loss has in float32 at one time
TOKEN_BYTES = 32  # ids, labels and positions of one token


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How a training step keeps memory low."""

    checkpoints: str = "device"
    """Activation checkpointing, one of CHECKPOINTS: none, or where each layer's input is kept."""
    tile: int = 0
    """Tokens of one tile of MLP and loss, which the backward computes again; 0 = no tiles."""


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
    model: Decoder, tokens: int, attention_bytes: float, options: MemoryOptions
) -> Activations:
    """The bytes of a step's activations on one rank.

    Args:
        tokens: of this rank, of all samples of its batch.
        attention_bytes: buffers of the attention's route, with the queries and incoming gradients
            of the rows that stay.
    """
    kinds = model.kinds or (_llama_layer(model),)
    layer_input = model.hidden * model.itemsize * tokens
    saved = sum(k.count * (k.saved - (k.mlp_saved if options.tile else 0.0)) for k in kinds)
    layer_saved = saved * tokens / model.layers
    loss = _loss(model, tokens, options)
    shared = tokens * (2 * model.itemsize * model.head_dim + TOKEN_BYTES)  # rotary cos and sin
    if options.checkpoints == "none":
        kept = shared + (model.layers - 1) * layer_saved
        extras, host, loss = [0.0 for _ in kinds], 0.0, layer_saved + loss
    else:
        checkpoints = float(model.layers * layer_input)
        on_host = options.checkpoints == "host"
        kept, host = (shared, checkpoints) if on_host else (shared + checkpoints, 0.0)
        # Checkpoints on the device hold the layer's input, too.
        extras = [tokens * kind.recomputed - (0 if on_host else layer_input) for kind in kinds]
    pairs = list(zip(kinds, extras, strict=True))
    attention = max(tokens * kind.attention + extra for kind, extra in pairs) + attention_bytes
    mlp = max(_mlp(model, kind, tokens, options) + extra for kind, extra in pairs)
    return Activations(kept, attention, mlp, loss, host)


def _mlp(model: Decoder, layer: Layer, tokens: int, options: MemoryOptions) -> float:
    """Bytes of a layer at the peak of its backward, attention left out.

    In tiles of t tokens: for the MLP e h n beyond the incoming gradient, which the tiles fill, what
    t tokens save and need, and the gradient of one weight from a tile, or of all weights rounded
    when the last tile is done.
    """
    weight_grad = model.itemsize * layer.largest_weight
    mlp_backward = layer.mlp - layer.mlp_begin
    if not options.tile:
        mlp = tokens * layer.mlp_begin + max(tokens * mlp_backward, weight_grad)
        return max(mlp, tokens * max(layer.before, layer.rest))
    tile = min(options.tile, tokens) * (layer.mlp_saved + mlp_backward) + weight_grad
    rounded = model.itemsize * layer.mlp_weights if model.itemsize < FP32_BYTES else 0
    filled = layer.mlp_begin - layer.mlp_saved + model.itemsize * model.hidden
    weight_grads = _weight_grad_sums(model, layer.mlp_weights, tokens, options)
    mlp = tokens * filled + max(tile, rounded) + weight_grads
    return max(mlp, tokens * max(layer.before - layer.mlp_saved, layer.rest))


def _llama_layer(model: Decoder) -> Layer:
    """A layer by formulas.

    saved      norm + e a + 4 heads for attention, norm + 4 e i for the MLP; experts
    backward   of the product 2 e i, or what experts need if that is more
    """
    e, norm = model.itemsize, _norm_saved(model)
    gradient, width = e * model.hidden, model.intermediate
    attention = norm + e * model.attention_width + _upcast_bytes(model) * model.heads
    mlp_saved, backward = 4.0 * e * width, 2.0 * e * width
    if experts := model.experts:
        experts_saved, experts_backward = _experts_bytes(model, experts)
        mlp_saved, backward = mlp_saved + experts_saved, max(backward, experts_backward)
        width = max(width, 2 * experts.count * experts.width)  # gate and up of all are one weight
    saved = attention + norm + mlp_saved
    return Layer(
        count=model.layers,
        mlp_weights=3 * model.hidden * model.intermediate + model.expert_weights,
        largest_weight=model.hidden * width,
        saved=saved,
        mlp_saved=mlp_saved,
        attention=attention + gradient,
        mlp_begin=saved + gradient,
        mlp=saved + gradient + backward,
        before=0.0,
        rest=attention + _norm_backward(model),
        recomputed=gradient if e < FP32_BYTES else 0.0,  # in float32 norms save the input itself
    )


def _upcast_bytes(model: Decoder) -> int:
    """Bytes of an element of the norms and the loss."""
    return max(FP32_BYTES, model.itemsize)


def _norm_saved(model: Decoder) -> float:
    """Bytes a token: the input in float32, the normed input, and that times the weight."""
    return (_upcast_bytes(model) + 2 * model.itemsize) * model.hidden + _upcast_bytes(model)


def _norm_backward(model: Decoder) -> float:
    """Bytes a token: one gradient; the input and five tensors of its size in float32."""
    return (6 * _upcast_bytes(model) + model.itemsize) * model.hidden


def _experts_bytes(model: Decoder, experts: Experts) -> tuple[float, float]:
    """(saved, backward) bytes a token.

    saved      c times its row, an MLP's tensors and the result, e c (2 h + 4 w);
               the router's choice, 40 c + 4 E + 4
    backward   beyond these, the larger of: results times the router's weights, three such tensors
               in float32, 12 c h; the backward of the product, e c (2 w - h)
    """
    rows = model.itemsize * experts.chosen * (2 * model.hidden + 4 * experts.width)
    weighted = 3 * _upcast_bytes(model) * model.hidden
    product = model.itemsize * (2 * experts.width - model.hidden)
    saved = rows + 40.0 * experts.chosen + 4 * experts.count + 4
    return saved, float(experts.chosen * max(weighted, product))


def _weight_grad_sums(model: Decoder, weights: int, tokens: int, options: MemoryOptions) -> float:
    """Bytes of the weights' gradients in float32, which several tiles add up; 0 for one tile."""
    if options.tile == 0 or options.tile >= tokens:
        return 0.0
    return float(_upcast_bytes(model) * weights)


def _loss(model: Decoder, tokens: int, options: MemoryOptions) -> float:
    """Bytes of the last norm, the logits and their gradient, and probabilities in float32; or of
    the backward of that norm if these are more.

    Logits in 16 bits are there in float32, too. Without tiles at most MAX_UPCAST_LOGITS elements of
    a tensor are in float32 at one time, with tiles all of a tile. With tiles there are also e h n,
    the gradient that the tiles fill, and the gradient of the head's weight. A cap saves its tanh,
    and its backward makes another gradient.
    """
    tile_tokens = min(options.tile, tokens) if options.tile else tokens
    elements = model.vocabulary * tile_tokens
    upcast = elements if options.tile else min(elements, MAX_UPCAST_LOGITS)
    upcast_tensors = 1 if model.itemsize >= FP32_BYTES else 2
    logits = 2 * model.itemsize * elements + upcast_tensors * _upcast_bytes(model) * upcast
    if model.is_capped:
        logits = model.itemsize * elements + max(logits, 3 * model.itemsize * elements)
    rows = model.itemsize * model.hidden * tokens if options.tile else 0
    head_grad = _weight_grad_sums(model, model.vocabulary * model.hidden, tokens, options)
    last_norm = _norm_backward(model) if model.last_norm is None else model.last_norm
    return max(tokens * _norm_saved(model) + logits + rows + head_grad, tokens * last_norm)
