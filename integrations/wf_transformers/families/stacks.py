"""Models that take whole batches on every rank, and are cut inside: ViT, CLIP, Whisper, BART, T5.

What stands before a stack of layers and behind it is computed on every rank alike, the loss too;
the layers see this rank's rows. In between a rank's gradients are its share x the ranks, outside
they are the whole: gradients of all parameters are then averaged, as data parallelism does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from wf_backends.schedule import padding_multiple
from wf_transformers.draws import RankDraws, draws_in_training
from wf_transformers.handle import Handle
from wf_transformers.models import own_class

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


def cut_stacks(model: nn.Module, handle: Handle) -> None:
    """Cut what the first layer of every stack gets, and make whole what its last one returns."""
    for stack in stacks_of(model):
        for name, module in stack.named_modules():
            if name.endswith(ATTENTION):
                handle.set(module, "wallfacer_stack", "cross" if name.endswith(CROSS) else "self")
        cut, (first, last) = _Cut(handle, stack), _ends(stack)
        for hook in (
            stack.register_forward_pre_hook(cut.states, with_kwargs=True),
            first.register_forward_pre_hook(cut.enter, with_kwargs=True),
            last.register_forward_hook(cut.leave),
        ):
            handle.undo.callback(hook.remove)


def _ends(stack: Any) -> tuple[nn.Module, nn.Module]:
    """The modules between which rows are cut, called as such where layers are recomputed, too."""
    if hasattr(stack, "block"):  # T5 calls forward of its blocks, around their hooks
        return stack.block[0].layer[0], stack.block[-1].layer[-1]
    return stack.layers[0], stack.layers[-1]


class _Cut:
    """The hooks of one stack. Shards may be uneven: nothing is padded."""

    def __init__(self, handle: Handle, stack: nn.Module) -> None:
        self._sp, self._documents = handle.sp, handle.attention.documents
        self._stack, self._draws = stack, RankDraws(handle.sp.rank)

    def states(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        """Before a decoder: the rows of its encoder that this rank has keys and values of."""
        whole = kwargs.get(STATES)
        return args, kwargs if whole is None else kwargs | {STATES: self._rows(whole)}

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: Words) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        rows = self._rows(given)
        self._documents.expect(rows.shape[1], given.shape[1])
        if self._stack.training and self._sp.size > 1 and draws_in_training(self._stack):
            self._draws.enter(given.device)
        return ((rows, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": rows})

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        self._draws.leave()
        rows = output if isinstance(output, Tensor) else output[0]
        whole = self._sp.unshard(rows, dim=1)
        self._documents.expect(0)
        scale_gradient(whole, self._sp.size)
        return whole if isinstance(output, Tensor) else (whole, *output[1:])

    def _rows(self, whole: Tensor) -> Tensor:
        whole = whole.view_as(whole)  # what else is made of it has gradients of the whole
        scale_gradient(whole, 1 / self._sp.size)
        return self._sp.shard(whole, dim=1)


def shard_between(handle: Handle, first: nn.Module, last: nn.Module) -> None:
    """Shard what `first` returns, and give `last` the rows of all ranks: for encoders like ViT.

    What runs in between sees this rank's rows (b, s, width) of (b, S, width), padded to equal
    shards; the padding is a document of its own and gone again before `last`. Everything else
    is computed on every rank alike, so that all ranks have the same loss. Gradients of all
    parameters are then to be averaged over the ranks, as data parallelism does.

    Args:
        handle: what `apply` gave for the model; its `remove()` takes this back too.
        first, last: modules of the model; `first` returns the rows, `last` takes them as its
            first argument.
    """
    sp, documents = handle.sp, handle.attention.documents
    multiple = padding_multiple(sp.config.layout, sp.size)
    lengths: list[int] = []
    draws = RankDraws(sp.rank)

    def shard(_: nn.Module, __: Any, full: Tensor) -> Tensor:
        lengths[:] = [full.shape[1]]
        padding = -full.shape[1] % multiple
        if padding:
            documents.replace({"cu_seqlens": (0, full.shape[1], full.shape[1] + padding)})
        scale_gradient(full, 1 / sp.size)
        rows = sp.shard(pad(full, (0, 0, 0, padding)), dim=1)
        documents.expect(rows.shape[1])
        if first.training and sp.size > 1 and draws_in_training(first):
            draws.enter(full.device)
        return rows

    def unshard(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        draws.leave()
        full = sp.unshard(args[0], dim=1)
        documents.expect(0)
        scale_gradient(full, sp.size)
        return (full[:, : lengths[0]], *args[1:])

    handle.undo.callback(first.register_forward_hook(shard).remove)
    handle.undo.callback(last.register_forward_pre_hook(unshard).remove)


def scale_gradient(x: Tensor, factor: float) -> None:
    """In between, a rank's gradients are its share of a sum; outside they are the whole."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad * factor)
