"""Runs one model twice, attached on a rank's part of a batch and unattached on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_backends._compile import uncompiled
from wf_backends.autochunk.tiling import modules_in_tiles
from wf_backends.comm import sum_on_all_ranks
from wf_backends.dsp import (
    NARROW_TOLERANCES,
    TOLERANCE,
    error_between,
    named_tensors,
    observed_outputs,
    on_one_rank,
)
from wf_backends.schedule import LAYOUTS
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import parameter_names, takes_any_keyword, tokens_of
from wf_transformers.comparison.dropout import DropoutRecorder, restored_draws
from wf_transformers.comparison.gradients import gradients_of, is_partitioned, summary
from wf_transformers.comparison.rows import RankRows
from wf_transformers.families.media_table import media_modules
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.handle import Handle
from wf_transformers.replace import set_until
from wf_transformers.whole_batches.heads import head_is_over_all_rows

SMALL_GRADIENT = 0.1  # of the largest gradient: key biases only have gradients of rounding errors
MAX_KEPT_BYTES = 1 << 28  # of a part's module outputs; those of later modules are not compared
LOSS = "loss"

Gather = Callable[[nn.Module], AbstractContextManager[Any]]
ModelCall = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""(batch, whether the model is unattached) -> outputs."""
Observer = Callable[[str, Any], None]
"""Called with the name and the output of a module."""
Named = dict[str, Tensor]


class Comparison:
    """The differences between a model on one rank of several, its part, and on a single rank.

    Attributes:
        errors: (description, error, tolerance) in the order of the forward, then gradients.
        cut: whether some module had this rank's part of the rows.
        uses_dropout: whether the model called dropout in training.
    """

    def __init__(
        self,
        model: nn.Module,
        sp: SequenceParallel,
        batch: Mapping[str, Any],
        whole_batches: bool = False,
        gather: Gather | None = None,
        call: ModelCall | None = None,
    ) -> None:
        self.model, self.sp, self.batch, self._gather = model, sp, dict(batch), gather
        self._call = call
        trains = any(p.requires_grad for p in model.parameters())
        is_whole = gather is None and not any(map(is_partitioned, model.parameters()))
        self._backward = trains and is_whole
        cut_inside, has_tokens = is_cut_inside(model), tokens_of(batch) is not None
        if cut_inside and "use_cache" in parameter_names(model):
            self.batch["use_cache"] = False  # keys and values would be of this rank's rows
        self.whole_batches = whole_batches or cut_inside or not has_tokens
        uneven = cut_inside or (call is None and not has_tokens)  # else hooks cut unknown rows
        self.errors: list[tuple[str, float, float]] = []
        self.cut = whole_batches and call is not None  # hooks cut, maybe other rows than `batch`
        self.uses_dropout = False
        whole_outputs = self.whole_batches and head_is_over_all_rows(model)
        self._rows = RankRows(sp, batch, uneven, whole_outputs)
        self._other_rows = {"experts", *media_modules(model)}
        """Modules and outputs whose rows on the part are not those of the part's tokens."""
        self._part_outputs: dict[str, list[Named]] = {}
        self._kept_bytes = 0
        self._min_tolerance = 0.0

    def run(self, handle: Handle, alone: AbstractContextManager[Any]) -> None:
        """Run the model that `handle` attached both ways and compare; raises what the model raises.

        Args:
            alone: a context in which the model is not attached.
        """
        with _prepared(handle):
            self.batch = handle.without_padded_labels(self.batch)
            kwargs = self._attached_kwargs(handle)
            part, part_gradients = self._run(kwargs, self._keep_output, whole=False)
        with alone, on_one_rank(self.model, self.sp):
            no_cache = {"use_cache": False} if "use_cache" in parameter_names(self.model) else {}
            kwargs = self.batch | ({} if self._call else no_cache)
            whole, whole_gradients = self._run(kwargs, self._compare_output, whole=True)
        compared = [
            self._compare(f"its {key}", part[key], whole[key]) for key in part if key in whole
        ]
        if not any(compared):
            raise ValueError(
                f"none of its outputs has rows that could be compared: {_shapes(part)} on a rank, "
                f"{_shapes(whole)} alone"
            )
        if all(compared) and part.keys() == whole.keys() or LOSS in whole:
            self._compare_gradients(part_gradients, whole_gradients)

    def first_equal_dropout(self, handle: Handle) -> str | None:
        """Run once more, with dropout: see `DropoutRecorder.first_equal_mask`."""
        with _prepared(handle), DropoutRecorder() as recorder:
            self._run(self._attached_kwargs(handle), recorder.record_module, whole=False)
        return recorder.first_equal_mask(self.sp.comm)

    def _attached_kwargs(self, handle: Handle) -> dict[str, Any]:
        """The keyword arguments for the attached model."""
        batch = self.batch
        if self._rows.shape and LAYOUTS[self.sp.config.layout].needs_documents:
            batch = {**batch, "cu_seqlens": (0, self._rows.shape[1])}
        if self.whole_batches:
            return batch
        kwargs = forward_kwargs(self.model, handle.shard_batch(batch))
        if isinstance(self.model, PreTrainedModel) or takes_any_keyword(self.model):
            return kwargs
        names = parameter_names(self.model)
        return {key: value for key, value in kwargs.items() if key in names}

    def _run(
        self, kwargs: Mapping[str, Any], observe: Observer, whole: bool
    ) -> tuple[Named, Named]:
        """(outputs, gradients of a loss in which every element of the outputs counts once)."""
        gradients: Named = {}
        gathered = _gathered_parameters(self.model, self._gather) if self._gather else nullcontext()

        def observe_graph(name: str, output: Any) -> None:
            if torch.is_grad_enabled() == self._backward:  # not while a loss generates
                observe(name, output)

        # a checkpoint around the call would count what is saved here
        unhooked = saved_tensors_hooks(lambda x: x, lambda x: x)
        # what observes the model would be compiled, too
        with restored_draws(), uncompiled(), torch.set_grad_enabled(self._backward), gathered:
            # a tile of a part has other rows than one of the whole
            with (
                unhooked,
                observed_outputs(self.model, observe_graph, modules_in_tiles(self.model)),
            ):
                output = self._call(kwargs, whole) if self._call else self.model(**kwargs)
                outputs = self._tensors(output, whole)
            loss = self._loss(outputs, whole) if self._backward else None
            if loss is not None and loss.requires_grad:
                gradients = gradients_of(self.model, loss)
        return {key: x.detach() for key, x in outputs.items()}, gradients

    def _tensors(self, output: Any, whole: bool) -> Named:
        tensors = {k: x for k, x in named_tensors(output) if self._is_by_token(k)}
        return {key: self._rows.unflatten(x, whole) for key, x in tensors.items()}

    def _is_by_token(self, name: str) -> bool:
        """Whether the rows of a module, or of an output, are those of the part's tokens."""
        return self._other_rows.isdisjoint(name.split("."))

    def _loss(self, outputs: Named, whole: bool) -> Tensor | None:
        """The model's loss, or a weighted sum of all outputs; on ranks, their share of it."""
        if LOSS in outputs:
            return outputs[LOSS] / (1 if whole else self.sp.size)
        sums = [(x * self._rows.weights(x, whole)).sum() for x in outputs.values() if x.grad_fn]
        return torch.stack([x.to(sums[0].dtype) for x in sums]).sum() if sums else None

    def _keep_output(self, name: str, output: Any) -> None:
        """Keep what a module returned on the part, for `_compare_output`."""
        is_kept = self._kept_bytes < MAX_KEPT_BYTES and self._is_by_token(name)
        outputs = self._tensors(output, whole=False) if is_kept else {}
        self._kept_bytes += sum(x.nbytes for x in outputs.values())
        tolerances = (NARROW_TOLERANCES.get(x.dtype, 0.0) for x in outputs.values())
        self._min_tolerance = max(self._min_tolerance, *tolerances, 0.0)  # for autocast
        copies = {key: x.detach().clone() for key, x in outputs.items()}
        self._part_outputs.setdefault(name, []).append(copies)

    def _compare_output(self, name: str, output: Any) -> None:
        """Compare what a module returned on the whole with the same call on the part."""
        part = self._part_outputs[name].pop(0) if self._part_outputs.get(name) else {}
        whole = self._tensors(output, whole=True) if part else {}
        for key in part:
            if key in whole and key != LOSS:  # that of TRL's head in PEFT is of the part's tokens
                self._compare(f"the output of {name}", part[key], whole[key])

    def _compare(self, description: str, part: Tensor, whole: Tensor) -> bool:
        """Record the error between the same rows; False if it is unknown which rows `part` has."""
        pair = self._rows.pair(part.detach(), whole.detach())
        if pair is None:
            return False
        part_rows, whole_rows, cut = pair
        self.cut |= cut
        self._record_error(description, error_between(part_rows, whole_rows), whole.dtype)
        return True

    def _compare_gradients(self, part: Named, whole: Named) -> None:
        """Compare the sum of gradients over the ranks with those of the whole, in one message."""
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self._backward:
            return
        zeros = {name: torch.zeros_like(summary(p)) for name, p in parameters.items()}
        part, whole = zeros | part, zeros | whole
        flat = torch.cat([part[name] for name in parameters])
        summed = sum_on_all_ranks(self.sp.comm, flat, "gradients", 1)
        sums = summed.split([len(x) for x in zeros.values()])
        largest = max((float(x.abs().max()) for x in whole.values() if x.numel()), default=0.0)
        for (name, p), gradient in zip(parameters.items(), sums, strict=True):
            error = error_between(gradient, whole[name], max(SMALL_GRADIENT * largest, 1e-30))
            self._record_error(f"the gradient of {name}", error, p.dtype)

    def _record_error(self, description: str, error: float, dtype: torch.dtype) -> None:
        tolerance = max(NARROW_TOLERANCES.get(dtype, TOLERANCE), self._min_tolerance)
        self.errors.append((description, error, tolerance))


def _shapes(outputs: Named) -> str:
    return ", ".join(f"{key} {tuple(x.shape)}" for key, x in outputs.items()) or "no tensors"


@contextmanager
def _prepared(handle: Handle) -> Iterator[None]:
    """Inside, attention has no dropout, since masks would differ, and compares no first batch."""
    with ExitStack() as stack:
        set_until(stack, handle, "first", None)
        set_until(stack, handle.attention, "drops", False)
        yield


@contextmanager
def _gathered_parameters(model: nn.Module, gather: Gather) -> Iterator[None]:
    """Inside, every module has its parameters gathered by `gather` while it runs."""
    contexts: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, _: Any) -> None:
        contexts.append(gather(module))
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
