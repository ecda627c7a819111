"""Models that take whole batches on every rank, and are cut inside: ViT, CLIP, Whisper, BART, T5.

Every rank computes what comes before and after a stack of layers, including the loss; the layers
see this rank's rows. Inside a stack a rank's gradients are its share times the number of ranks,
outside they are those of the whole batch. So gradients of all parameters must be averaged over the
ranks, as data parallelism does.

Shapes: b batch, s rows of this rank, S rows of the whole sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.vit.modeling_vit import ViTModel

from wf_backends import SequenceParallel
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, transformers_class
from wf_transformers.rng import RankRng

Kwargs = dict[str, Any]

STACKS = frozenset(
    {
        *("BartEncoder", "BartDecoder", "MBartEncoder", "MBartDecoder"),
        *("WhisperEncoder", "WhisperDecoder", "CLIPEncoder", "T5Stack", "MT5Stack", "UMT5Stack"),
    }
)
"""Modules whose layers see this rank's rows, in models of the same file of transformers."""
ATTENTION = ("attn", "Attention")
"""Suffixes of the names of their attention modules."""
CROSS = ("encoder_attn", "EncDecAttention")  # suffixes for cross attention
ENCODER_STATES = "encoder_hidden_states"


def stacks_of(model: nn.Module) -> list[Any]:
    """The stacks in a model that is cut inside; not those of a vision tower from another file."""
    file = transformers_class(model).__module__
    pairs = ((module, transformers_class(module)) for module in model.modules())
    return [module for module, cls in pairs if cls.__name__ in STACKS and cls.__module__ == file]


def is_cut_inside(module: nn.Module) -> bool:
    """Whether a Hugging Face model in `module` is cut inside, so that it takes whole batches."""
    return any(stacks_of(model) or is_vit(model) for model in outermost(module))


def is_vit(model: PreTrainedModel) -> bool:
    """Whether it is a ViT, whose patches are cut after they are embedded."""
    return isinstance(model.base_model, ViTModel)


def cut_stacks(model: nn.Module, handle: Handle) -> None:
    """Shard the input of every stack's first layer, and gather the output of its last layer."""
    for stack in stacks_of(model):
        for name, module in stack.named_modules():
            if name.endswith(ATTENTION):
                handle.set(module, "wallfacer_stack", "cross" if name.endswith(CROSS) else "self")
        sharding, (first, last) = _StackSharding(handle, stack), _first_and_last(stack)
        handle.hooks(
            stack.register_forward_pre_hook(sharding.shard_encoder_states, with_kwargs=True),
            first.register_forward_pre_hook(sharding.enter, with_kwargs=True),
            last.register_forward_hook(sharding.leave),
        )


def _first_and_last(stack: Any) -> tuple[nn.Module, nn.Module]:
    """The modules that get and return the stack's hidden states, also in recomputation."""
    if hasattr(stack, "block"):  # T5 calls `forward` of its blocks, which skips their hooks
        return stack.block[0].layer[0], stack.block[-1].layer[-1]
    return stack.layers[0], stack.layers[-1]


class _StackSharding:
    """Hooks that shard rows before the layers and gather them after the layers, without padding."""

    def __init__(self, handle: Handle, layers: nn.Module) -> None:
        self._sp, self._documents = handle.sp, handle.attention.documents
        self._layers, self._rng = layers, RankRng(handle.sp.rank)

    def shard_encoder_states(self, _: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Before a decoder: shard the encoder's output, for the keys and values of this rank."""
        states = kwargs.get(ENCODER_STATES)
        return args, kwargs if states is None else kwargs | {ENCODER_STATES: self._rows(states)}

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Before the first layer."""
        if args:
            return (self.shard(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.shard(kwargs["hidden_states"])}

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """After the last layer."""
        if isinstance(output, Tensor):
            return self.unshard(output)
        return self.unshard(output[0]), *output[1:]

    def shard(self, whole: Tensor) -> Tensor:
        """(b, S, width) -> (b, s, width); until `unshard`, attention knows its number of rows."""
        rows = self._rows(whole)
        self._documents.expect(rows.shape[1], whole.shape[1])
        self._rng.enter_for(self._layers, self._sp, whole.device)
        return rows

    def unshard(self, rows: Tensor) -> Tensor:
        """(b, s, width) -> (b, S, width)."""
        self._rng.leave()
        self._documents.expect(0)
        return whole_rows(self._sp, rows)

    def _rows(self, whole: Tensor) -> Tensor:
        whole = whole.view_as(whole)  # a view, so that other uses keep their gradients unscaled
        scale_gradient(whole, 1 / self._sp.size)
        return self._sp.shard(whole, dim=1)


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

    def unshard(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return sharding.unshard(args[0]), *args[1:]

    handle.hooks(first.register_forward_hook(shard), last.register_forward_pre_hook(unshard))


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
