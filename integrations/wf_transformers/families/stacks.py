"""Models that take whole batches on every rank, and are cut inside: BART, T5, encoders of images,
videos and sounds.

Every rank computes what comes before and after a stack of layers, including the loss; the layers
see this rank's rows. Inside a stack a rank's gradients are its share times the number of ranks,
outside they are those of the whole batch. So gradients of all parameters must be averaged over the
ranks, as data parallelism does.

Shapes: b batch, s rows of this rank, S rows of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import gather_small
from wf_transformers.attention.function import IN_STACK
from wf_transformers.calls import Kwargs, by_name, parameter_names, refuse_partial_states
from wf_transformers.handle import Handle
from wf_transformers.models import (
    file_of,
    outermost,
    row_of,
    transformers_class,
    with_torch_attention,
)
from wf_transformers.rng import RankRng

STACKS = frozenset(
    "BartEncoder BartDecoder MBartEncoder MBartDecoder T5Stack MT5Stack UMT5Stack WhisperEncoder "
    "WhisperDecoder CLIPEncoder SiglipEncoder Siglip2Encoder Dinov2Encoder VideoMAEEncoder "
    "Dinov2WithRegistersEncoder DINOv3ViTEncoder VideoMAEDecoder VJEPA2Encoder VJEPA2Predictor "
    "YolosEncoder ViTMAEDecoder Wav2Vec2Encoder Wav2Vec2EncoderStableLayerNorm HubertEncoder "
    "HubertEncoderStableLayerNorm "
    # in transformers 4, and in 5, where the model itself has the layers
    "DeiTEncoder DeiTModel ViTMSNEncoder ViTMSNModel IJepaEncoder IJepaModel ViTMAEEncoder "
    "ViTMAEModel VivitEncoder VivitModel ASTEncoder ASTModel DINOv3ViTModel".split()
)
"""Modules whose layers see this rank's rows, in models of the same file of transformers."""
LAYERS = ("layers", "layer", "decoder_layers", "block")
"""Names of the list of a stack's layers."""
BETWEEN: Mapping[str, tuple[str, str]] = MappingProxyType({"ViTModel": ("embeddings", "layernorm")})
"""Models -> modules as `shard_between` takes them. A pipeline (ColossalAI's) gives each stage other
layers and calls these two on every stage, so that what a stage sends is whole."""
ATTENTION = ("attn", "attention")
"""Suffixes of the names of their attention modules, in small letters."""
CROSS = ("encoder_attn", "EncDecAttention")  # suffixes for cross attention
ENCODER_STATES, STATES = "encoder_hidden_states", "hidden_states"
BETWEEN_LAYERS = "interpolation"
"""Attribute of YOLOS' encoder: a module that returns (layers - 1, 1, S, width), added to rows."""
NUM_SAMPLED, SAME = 4096, 1e-2  # elements; largest difference of their summaries, of about 1
Complete = Callable[[Any, int, torch.device], tuple[Tensor, ...]]


def _patch_numbers(given: Tensor | None, seqlen: int, device: torch.device) -> tuple[Tensor]:
    """(b or 1, S): V-JEPA 2 would count this rank's patches from 0."""
    return (torch.arange(seqlen, device=device)[None] if given is None else given,)


def _angles(given: tuple[Tensor, Tensor], seqlen: int, _: torch.device) -> tuple[Tensor, ...]:
    """DINOv3's cosines and sines (1, S, d), given for patches only; what precedes is not turned."""
    return tuple(
        pad(x, (0, 0, seqlen - len(x), 0), value=fill)[None]
        for x, fill in zip(given, (1.0, 0.0), strict=True)
    )


BY_ROW: Mapping[str, tuple[str, Complete]] = MappingProxyType(
    {
        **dict.fromkeys(("DINOv3ViTEncoder", "DINOv3ViTModel"), ("position_embeddings", _angles)),
        **dict.fromkeys(("VJEPA2Encoder", "VJEPA2Predictor"), ("position_mask", _patch_numbers)),
    }
)
"""Stacks -> an argument of each layer that must be this rank's, and what makes it whole."""


def stacks_of(model: nn.Module) -> list[Any]:
    """The stacks in a model that is cut inside; not those of a vision tower from another file."""
    file = file_of(model)
    if STACKS.isdisjoint(vars(file)):  # of most models: their modules need no search
        return []
    pairs = ((module, transformers_class(module)) for module in model.modules())
    known = (m for m, cls in pairs if cls.__name__ in STACKS and cls.__module__ == file.__name__)
    return [module for module in known if _layers_of(module)]


def _layers_of(stack: Any) -> Any:
    return next((getattr(stack, name) for name in LAYERS if hasattr(stack, name)), None)


def is_cut_inside(module: nn.Module) -> bool:
    """Whether a Hugging Face model in `module` is cut inside, so that it takes whole batches."""
    return any(stacks_of(m) or row_of(BETWEEN, m.base_model) for m in outermost(module))


def cut_inside(model: PreTrainedModel, handle: Handle) -> None:
    """Shard the input of every stack's first layer, and gather the output of its last layer."""
    if names := row_of(BETWEEN, model.base_model):
        first, last = map(model.base_model.get_submodule, names)
        shard_between(handle, first, last)
    _keep_own_masks(model, handle)
    for stack in stacks_of(model):
        sharding, layers, ends = _StackSharding(handle, stack), _layers_of(stack), _ends_of(stack)
        handle.before(stack, sharding.before)
        handle.before(ends[0], sharding.enter)
        handle.after(ends[1], sharding.leave)
        for name, module in stack.named_modules():
            if name.lower().endswith(ATTENTION):
                handle.set(module, IN_STACK, "cross" if name.endswith(CROSS) else "self")
                config = getattr(module, "config", None)  # its own, as in MAE's decoder
                if config is not None and handle.name:
                    handle.set(config, "_attn_implementation", handle.name)
        if (row := row_of(BY_ROW, stack)) is not None:
            for layer in layers:
                handle.before(layer, partial(sharding.take_rows, *row))
        if (between := getattr(stack, BETWEEN_LAYERS, None)) is not None:
            handle.after(between, sharding.between_layers)


def _keep_own_masks(model: nn.Module, handle: Handle) -> None:
    """Have modules around torch's own attention, as in SigLIP 2's head, build the masks for it."""
    for module in model.modules():
        if hasattr(module, "config") and any(
            isinstance(child, nn.MultiheadAttention) for child in module.children()
        ):
            handle.set(module, "config", with_torch_attention(module.config))


def _ends_of(stack: Any) -> tuple[nn.Module, nn.Module]:
    """The modules that get and return the stack's hidden states, also in recomputation."""
    first, last = _layers_of(stack)[0], _layers_of(stack)[-1]
    if hasattr(stack, "block"):  # T5 calls `forward` of its blocks, which skips their hooks
        return first.layer[0], last.layer[-1]
    return first, last


class _StackSharding:
    """Hooks that shard rows before the layers and gather them after the layers, without padding."""

    def __init__(self, handle: Handle, layers: nn.Module) -> None:
        self._sp, self._documents = handle.sp, handle.attention.documents
        self._layers, self._rng = layers, RankRng(handle.sp)
        self._is_cross = any(name.endswith(CROSS) for name, _ in layers.named_modules())

    def before(self, stack: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Before a decoder: shard the encoder's output, for the keys and values of this rank."""
        refuse_partial_states(stack, kwargs, inside=True)  # a backbone asks for them itself
        states = kwargs.get(ENCODER_STATES) if self._is_cross else None
        return args, kwargs if states is None else kwargs | {ENCODER_STATES: self.rows(states)}

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Before the first layer."""
        if args:
            return (self.shard(args[0]), *args[1:]), kwargs
        return args, kwargs | {STATES: self.shard(kwargs[STATES])}

    def take_rows(
        self, key: str, complete: Complete, layer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        """Before each layer: shard an argument that has a row for each row of the stack."""
        arguments = by_name(parameter_names(layer), args, kwargs)
        running = self._documents.running
        assert running is not None and running.seqlen is not None, "before `shard`"
        whole = complete(arguments.get(key), running.seqlen, arguments[STATES].device)
        if layer is _layers_of(self._layers)[0]:
            self._refuse_different(*whole)
        rows = [self.rows(x) for x in whole]
        return (), arguments | {key: rows if len(rows) > 1 else rows[0]}

    def between_layers(self, _: nn.Module, __: Any, whole: Tensor) -> Tensor:
        """After a module that returns for each layer what is added to its rows."""
        return self.rows(whole, dim=2)

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """After the last layer."""
        if isinstance(output, Tensor):
            return self.unshard(output)
        return self.unshard(output[0]), *output[1:]

    def shard(self, whole: Tensor) -> Tensor:
        """(b, S, width) -> (b, s, width); until `unshard`, attention knows its number of rows."""
        self._refuse_different(whole)
        rows = self.rows(whole)
        self._documents.expect(rows.shape[1], whole.shape[1])
        self._rng.enter(self._layers, whole.device)
        return rows

    def unshard(self, rows: Tensor) -> Tensor:
        """(b, s, width) -> (b, S, width)."""
        self._rng.leave()
        self._documents.expect(0)
        return whole_rows(self._sp, rows)

    @eager
    def _refuse_different(self, *whole: Tensor) -> None:
        """Refuse, on every rank, rows that differ: masks and dropout before them are random."""
        summaries = gather_small(self._sp.comm, torch.stack([sampled_summary(x) for x in whole]))
        if bool((summaries - summaries[0]).abs().max() > SAME):
            raise ValueError(
                f"the first layer of {type(self._layers).__name__} gets other rows on each rank: "
                "what is drawn before it (masked patches or frames, dropout) must be the same. "
                "Seed the ranks of a sequence alike, torch and NumPy, or pass what is drawn (noise)"
            )

    def rows(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank has."""
        whole = whole.view_as(whole)  # a view, so that other uses keep their gradients unscaled
        scale_gradient(whole, 1 / self._sp.size)
        return self._sp.shard(whole, dim)


def sampled_summary(x: Tensor) -> Tensor:
    """A number, the same for equal tensors up to rounding, and about normal for others."""
    sample = x.detach().flatten()[:: max(1, x.numel() // NUM_SAMPLED)].double()
    wave = torch.arange(len(sample), device=x.device).double().cos()
    return sample @ wave / sample.norm().clamp(min=1e-30)


def shard_between(handle: Handle, first: nn.Module, last: nn.Module) -> None:
    """Shard the output of `first`, and gather the input of `last`: for encoders like ViT.

    Modules in between see this rank's rows (b, s, width) of (b, S, width). Every rank computes all
    the rest, so that all ranks have the same loss. Gradients of all parameters must then be
    averaged over the ranks, as data parallelism does.

    Args:
        handle: returned by `apply` for the model; its `remove()` undoes this too.
        first, last: modules of the model; `first` returns the rows, `last` takes them as its
            first argument.
    """
    sharding = _StackSharding(handle, first)

    def shard(_: nn.Module, __: Any, whole: Tensor) -> Tensor:
        handle.attention.documents.used = True  # recomputed layers must know the sequence length
        return sharding.shard(whole)

    def unshard(_: nn.Module, args: tuple[Tensor, ...], kwargs: Kwargs) -> Any:
        return (sharding.unshard(args[0]), *args[1:]), kwargs

    handle.after(first, shard)
    handle.before(last, unshard)


def whole_rows(
    sp: SequenceParallel, rows: Tensor, seqlen: int | None = None, **mask_kwargs: Any
) -> Tensor:
    """Gather (b, S, ...) on every rank. If every rank computes the same loss from it, gradients
    averaged over the ranks are those of one loss.

    Args:
        rows: (b, s, ...), this rank's.
        seqlen: S, if the gathered rows end with padding.
        mask_kwargs: the documents or slices with which `rows` were cut.
    """
    whole = sp.unshard(rows, 1, **mask_kwargs)
    scale_gradient(whole, sp.size)  # averaging over the ranks divides by it
    return whole[:, :seqlen]


def scale_gradient(x: Tensor, factor: float) -> None:
    """Multiply the gradient of `x` by a factor in the backward."""
    if x.requires_grad:
        x.register_hook(lambda grad: None if grad is None else grad * factor)  # unused under DDP
