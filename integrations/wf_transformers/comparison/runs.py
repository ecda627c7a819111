"""One model run twice, attached on a rank's part of a batch and as it is on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import World, sum_on_all_ranks
from wf_backends.dsp import (
    NARROW_TOLERANCES,
    RECEIVER,
    TOLERANCE,
    error_between,
    named_tensors,
    receivers,
)
from wf_backends.parallel import IGNORE_INDEX
from wf_backends.schedule import LAYOUTS
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import parameter_names, takes_any_keyword, tokens_of
from wf_transformers.comparison.draws import SeenDropouts
from wf_transformers.comparison.gradients import gradients_of, is_partitioned, summary
from wf_transformers.comparison.rows import Rows
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.handle import OPERATIONS, Handle
from wf_transformers.replace import set_until

SMALL_GRADIENT = 0.1  # of the largest of all: key biases have gradients of rounding errors alone
KEPT_BYTES = 1 << 28  # of a part's module outputs; those of later modules are not compared
LOSS = "loss"
UNLABELLED = "loss without labels"

Gather = Callable[[nn.Module], AbstractContextManager[Any]]
Call = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""From a batch, and whether the model is alone, to outputs."""
See = Callable[[str, Any], None]
Named = dict[str, Tensor]


class Comparison:
    """What a model gives on one rank of several, and on one.

    Attributes:
        errors: (what, error, tolerance) in the order of the whole model's forward, then gradients.
        cut: whether some module had this rank's part of the rows.
        drops: whether the model may drop something in training.
    """

    def __init__(
        self,
        model: nn.Module,
        sp: SequenceParallel,
        batch: Mapping[str, Any],
        whole_batches: bool = False,
        gather: Gather | None = None,
        call: Call | None = None,
    ) -> None:
        self.model, self.sp, self.batch, self._gather = model, sp, dict(batch), gather
        self._call = call
        self._backward = gather is None and not any(map(is_partitioned, model.parameters()))
        inside = is_cut_inside(model)
        if inside and "use_cache" in parameter_names(model):
            self.batch["use_cache"] = False  # keys and values would be of this rank's rows
        inside = inside or tokens_of(batch) is None
        self.whole_batches = whole_batches or inside
        self.errors: list[tuple[str, float, float]] = []
        self.cut = self.drops = False
        self._rows = Rows(sp, batch, uneven=inside)
        self._kept: dict[str, list[Named]] = {}
        self._bytes = 0
        self._narrowest = 0.0

    def run(self, handle: Handle, alone: AbstractContextManager[Any]) -> None:
        """Run the model that `handle` attached both ways and compare; its errors pass through.

        Args:
            alone: inside, the model is not attached.
        """
        with _compared_alone(handle):
            self.batch = handle.without_padded_labels(self.batch)
            words = self._words(handle)
            part, gradients = self._run(words, self._keep, whole=False)
            beside = self._beside(words, handle.whole_batches, self.sp.size)
        with alone:
            one = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
            for module in receivers(self.model):
                getattr(module, RECEIVER)(one)
            no_cache = {"use_cache": False} if "use_cache" in parameter_names(self.model) else {}
            words = self.batch | ({} if self._call else no_cache)
            whole, wanted = self._run(words, self._compare_output, whole=True)
            its_beside = self._beside(words, handle.whole_batches)
        compared = [
            self._compare(f"its {key}", part[key], whole[key]) for key in part if key in whole
        ]
        if not any(compared):
            raise ValueError(
                f"none of its outputs has rows that could be compared: {_shapes(part)} on a rank, "
                f"{_shapes(whole)} alone"
            )
        if all(compared) and part.keys() == whole.keys() or LOSS in whole:
            self._compare_gradients(gradients, wanted)
        for key in beside.keys() & its_beside.keys():
            self._compare(f"its {key}", beside[key], its_beside[key])

    def like_draws(self, handle: Handle) -> str | None:
        """The module whose dropout falls on the same places of different tokens on some ranks.

        The attached model is run once more, with draws.
        """
        with _compared_alone(handle), SeenDropouts() as seen:
            self._run(self._words(handle), seen.returned, whole=False)
        return seen.alike(self.sp.comm)

    def _beside(self, words: Mapping[str, Any], counted: bool, size: int = 1) -> Named:
        """What a Trainer asks of a model that takes whole batches, beside outputs.

        Its operations, of which it sums those of `size` ranks, if they are `counted`, and the loss
        of an evaluation without labels.
        """
        found: Named = {}
        if not self.whole_batches or not self._backward or not self._rows.shape or self._call:
            return found
        operations: Any = getattr(self.model, OPERATIONS, None)
        if operations is not None and counted:
            found[OPERATIONS] = torch.tensor(float(operations(words)) * size, dtype=torch.float64)
        labels = words.get("labels")
        if isinstance(labels, Tensor):
            none = {"labels": torch.full_like(labels, IGNORE_INDEX)}
            self.model.eval()
            with torch.no_grad(), suppress(Exception):  # some models cannot
                outputs = dict(named_tensors(self.model(**{**words, **none})))
                found |= {UNLABELLED: outputs[LOSS]} if LOSS in outputs else {}
            self.model.train()
        return found

    def _words(self, handle: Handle) -> dict[str, Any]:
        """What the attached model is called with."""
        given = self.batch
        if self._rows.shape and LAYOUTS[self.sp.config.layout].needs_documents:
            given = {**given, "cu_seqlens": (0, self._rows.shape[1])}
        if self.whole_batches:
            return given
        local = handle.shard_batch(given)
        words = forward_kwargs(self.model, local)
        if isinstance(self.model, PreTrainedModel) or takes_any_keyword(self.model):
            return words
        names = parameter_names(self.model)
        return {key: value for key, value in words.items() if key in names}

    def _run(self, words: Mapping[str, Any], see: See, whole: bool) -> tuple[Named, Named]:
        """The outputs, and the gradients of a loss that counts each element of them once."""
        gradients: Named = {}
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._backward))
            if self._gather is not None:
                stack.enter_context(_gathered(self.model, self._gather))
            with _watched(self.model, see):
                output = self._call(words, whole) if self._call else self.model(**words)
                found = self._tensors(output, whole)
            if self._backward and (loss := self._loss(found, whole)) is not None:
                gradients = gradients_of(self.model, loss)
        return {key: x.detach() for key, x in found.items()}, gradients

    def _tensors(self, output: Any, whole: bool) -> Named:
        return {key: self._rows.unflatten(x, whole) for key, x in named_tensors(output)}

    def _loss(self, outputs: Named, whole: bool) -> Tensor | None:
        """The model's own, or a sum of all outputs with weights; over the ranks, counted once."""
        if LOSS in outputs:
            return outputs[LOSS] / (1 if whole else self.sp.size)
        parts = [(x * self._rows.weights(x, whole)).sum() for x in outputs.values() if x.grad_fn]
        return torch.stack([part.to(parts[0].dtype) for part in parts]).sum() if parts else None

    def _keep(self, name: str, output: Any) -> None:
        """Of the part: what the module returned, for `_compare_output`."""
        picks = "experts" in name.split(".")  # tokens, and other ones than of the whole
        wanted = self._bytes < KEPT_BYTES and not picks
        found = self._tensors(output, whole=False) if wanted else {}
        self._bytes += sum(x.nbytes for x in found.values())
        narrow = (NARROW_TOLERANCES.get(x.dtype, 0.0) for x in found.values())
        self._narrowest = max(self._narrowest, *narrow, 0.0)  # under autocast
        kept = {key: x.detach().clone() for key, x in found.items()}
        self._kept.setdefault(name, []).append(kept)

    def _compare_output(self, name: str, output: Any) -> None:
        """Of the whole: against what the module returned at its call of the same number."""
        part = self._kept[name].pop(0) if self._kept.get(name) else {}
        whole = self._tensors(output, whole=True) if part else {}
        for key in part:
            if key in whole:
                self._compare(f"the output of {name}", part[key], whole[key])

    def _compare(self, what: str, part: Tensor, whole: Tensor) -> bool:
        """Note how far rows are from each other; whether it is known which rows they are."""
        pair = self._rows.pair(part.detach(), whole.detach())
        if pair is None:
            return False
        mine, theirs, cut = pair
        self.cut |= cut
        self._note(what, error_between(mine, theirs), whole.dtype)
        return True

    def _compare_gradients(self, mine: Named, wanted: Named) -> None:
        """The sum over the ranks against the whole; in one message for all parameters."""
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not parameters or not self._backward:
            return
        none = {name: torch.zeros_like(summary(p)) for name, p in parameters.items()}
        mine, wanted = none | mine, none | wanted
        flat = torch.cat([mine[name] for name in parameters])
        summed = sum_on_all_ranks(self.sp.comm, flat, "gradients", 1)
        pieces = summed.split([len(x) for x in none.values()])
        largest = max((float(x.abs().max()) for x in wanted.values() if x.numel()), default=0.0)
        for (name, p), piece in zip(parameters.items(), pieces, strict=True):
            error = error_between(piece, wanted[name], max(SMALL_GRADIENT * largest, 1e-30))
            self._note(f"the gradient of {name}", error, p.dtype)

    def _note(self, what: str, error: float, dtype: torch.dtype) -> None:
        least = max(NARROW_TOLERANCES.get(dtype, TOLERANCE), self._narrowest)
        self.errors.append((what, error, least))


def _shapes(outputs: Named) -> str:
    return ", ".join(f"{key} {tuple(x.shape)}" for key, x in outputs.items()) or "no tensors"


@contextmanager
def _compared_alone(handle: Handle) -> Iterator[None]:
    """Inside, attention drops nothing, since draws differ, and no first batch is compared."""
    with ExitStack() as stack:
        set_until(stack, handle, "first", None)
        set_until(stack, handle.attention, "drops", False)
        yield


@contextmanager
def _watched(model: nn.Module, see: See) -> Iterator[None]:
    """Inside, `see` gets the name and the output of every module but the model, as they return."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _, __, output: see(name, output)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(hook(name)).remove)
        yield


@contextmanager
def _gathered(model: nn.Module, gather: Gather) -> Iterator[None]:
    """Inside, a module's own parameters are whole while it runs."""
    running: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(gather(module))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
