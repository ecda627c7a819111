"""Models that take whole batches on every rank, and are cut inside: ViT, CLIP, Whisper, BART, T5.

What stands before a stack of layers and behind it is computed on every rank alike, the loss too;
the layers see this rank's rows. In between a rank's gradients are its share x the ranks, outside
they are the whole: gradients of all parameters are then averaged, as data parallelism does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_transformers.draws import RankDraws
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, own_class

Words = dict[str, Any]

STACKS = frozenset(
    {
        *("BartEncoder", "BartDecoder", "MBartEncoder", "MBartDecoder"),
        *("WhisperEncoder", "WhisperDecoder", "CLIPEncoder", "T5Stack", "MT5Stack", "UMT5Stack"),
    }
)
"""Modules whose layers are cut, in models of their own file."""
ATTENTION = ("attn", "Attention")
"""How the names of their attention modules end."""
CROSS = ("encoder_attn", "EncDecAttention")  # of a decoder: over `encoder_hidden_states`
STATES = "encoder_hidden_states"


def stacks_of(model: nn.Module) -> list[Any]:
    """The stacks in a model that is cut inside; none of another model's, a vision tower's."""
    file = own_class(model).__module__
    kinds = ((module, own_class(module)) for module in model.modules())
    return [one for one, kind in kinds if kind.__name__ in STACKS and kind.__module__ == file]


def is_cut_inside(module: nn.Module) -> bool:
    """Whether a Hugging Face model in `module` is, so that it takes whole batches."""
    return any(stacks_of(one) for one in outermost(module))


def cut_stacks(model: nn.Module, handle: Handle) -> None:
    """Cut what the first layer of every stack gets, and make whole what its last one returns."""
    for stack in stacks_of(model):
        for name, module in stack.named_modules():
            if name.endswith(ATTENTION):
                handle.set(module, "wallfacer_stack", "cross" if name.endswith(CROSS) else "self")
        cut, (first, last) = _Cut(handle, stack), _ends(stack)
        handle.hooks(
            stack.register_forward_pre_hook(cut.states, with_kwargs=True),
            first.register_forward_pre_hook(cut.enter, with_kwargs=True),
            last.register_forward_hook(cut.leave),
        )


def _ends(stack: Any) -> tuple[nn.Module, nn.Module]:
    """The modules between which rows are cut, called as such where layers are recomputed, too."""
    if hasattr(stack, "block"):  # T5 calls forward of its blocks, around their hooks
        return stack.block[0].layer[0], stack.block[-1].layer[-1]
    return stack.layers[0], stack.layers[-1]


class _Cut:
    """Rows are cut before layers, and made whole behind them. Nothing is padded."""

    def __init__(self, handle: Handle, layers: nn.Module) -> None:
        self._sp, self._documents = handle.sp, handle.attention.documents
        self._layers, self._draws = layers, RankDraws(handle.sp.rank)

    def states(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        """Before a decoder: the rows of its encoder that this rank has keys and values of."""
        whole = kwargs.get(STATES)
        return args, kwargs if whole is None else kwargs | {STATES: self._rows(whole)}

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        """Before the first layer."""
        if args:
            return (self.shard(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.shard(kwargs["hidden_states"])}

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """After the last one."""
        if isinstance(output, Tensor):
            return self.unshard(output)
        return self.unshard(output[0]), *output[1:]

    def shard(self, whole: Tensor) -> Tensor:
        """(b, S, width) -> (b, s, width), and what is known of it until `unshard`."""
        rows = self._rows(whole)
        self._documents.expect(rows.shape[1], whole.shape[1])
        self._draws.enter_for(self._layers, self._sp, whole.device)
        return rows

    def unshard(self, rows: Tensor) -> Tensor:
        """(b, s, width) -> (b, S, width)."""
        self._draws.leave()
        self._documents.expect(0)
        return whole_rows(self._sp, rows)

    def _rows(self, whole: Tensor) -> Tensor:
        whole = whole.view_as(whole)  # what else is made of it has gradients of the whole
        scale_gradient(whole, 1 / self._sp.size)
        return self._sp.shard(whole, dim=1)


def shard_between(handle: Handle, first: nn.Module, last: nn.Module) -> None:
    """Shard what `first` returns, and give `last` the rows of all ranks: for encoders like ViT.

    What runs in between sees this rank's rows (b, s, width) of (b, S, width). Everything else is
    computed on every rank alike, so that all ranks have the same loss. Gradients of all parameters
    are then to be averaged over the ranks, as data parallelism does.

    Args:
        handle: what `apply` gave for the model; its `remove()` takes this back too.
        first, last: modules of the model; `first` returns the rows, `last` takes them as its
            first argument.
    """
    cut = _Cut(handle, first)

    def shard(_: nn.Module, __: Any, full: Tensor) -> Tensor:
        handle.attention.documents.used = True  # layers that are recomputed must know the length
        return cut.shard(full)

    def unshard(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return cut.unshard(args[0]), *args[1:]

    handle.hooks(first.register_forward_hook(shard), last.register_forward_pre_hook(unshard))


def whole_rows(
    sp: SequenceParallel, rows: Tensor, seqlen: int | None = None, **told: Any
) -> Tensor:
    """(b, S, ...) on every rank. A loss that every rank makes of it counts once.

    Args:
        rows: (b, s, ...), this rank's.
        seqlen: S where the rows of all ranks have padding behind it.
        told: the documents or slices that `rows` were cut by.
    """
    whole = sp.unshard(rows, 1, **told)
    scale_gradient(whole, sp.size)  # the mean over the world divides by it
    return whole[:, :seqlen]


def scale_gradient(x: Tensor, factor: float) -> None:
    """In between, a rank's gradients are its share of a sum; outside they are the whole."""
    if x.requires_grad:
        x.register_hook(lambda grad: None if grad is None else grad * factor)  # unused under DDP
