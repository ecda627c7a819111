"""Compares a model with stages on several ranks and on one, at its first forward.

Before the first forward, every rank runs the model twice with the same inputs, in evaluation mode
and without gradients: over the ranks, and as on one device. The comparison finds every module that
mixes, counts or averages positions between stages, also modules that we do not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wf_backends._compile import uncompiled
from wf_backends.comm import Shared, World, gather_small
from wf_backends.dsp.closeness import NARROW_TOLERANCES, TOLERANCE, error_between, named_tensors
from wf_backends.dsp.layout_tracker import Cut, LayoutTracker
from wf_backends.parallel import SequenceParallel, SequenceParallelConfig

RECEIVER = "set_sequence_parallel"
Mode = bool | Literal["strict"]
KEPT_BYTES = 1 << 28  # of module outputs; those of later modules are not compared
NO_DIFFERENCE = 1 << 40  # in the place of the index of the first error that is too large
CAUSES = (
    "between stages it mixes positions that are on several ranks, counts them, or takes a mean "
    'over them. Name that module in "needs", or move it behind "leaves" (docs/dsp.md); '
    '"verify": false runs it all the same'
)
Observer = Callable[[str, Any], None]  # called with a module's name and output


def receivers(model: nn.Module) -> list[nn.Module]:
    """The modules with a method `set_sequence_parallel`: they attend over ranks themselves."""
    return [m for m in model.modules() if callable(getattr(m, RECEIVER, None))]


class Comparison(NamedTuple):
    """An output over the ranks, and the same on one rank."""

    what: str
    error: float  # see `error_between`; inf for another shape
    tolerance: float
    of_model: bool  # whether it is the model's own output, and not that of a module inside


class FirstForward(Shared):
    """Compares a model's first forward over the ranks with one on a single rank, by one hook.

    Args:
        sp: what the model's receivers were given.
        mode: True logs a warning where the model cannot be compared, or differs in a dtype narrower
            than float32; "strict" raises there, too.

    Attributes:
        hook: its `remove()` removes the comparison; the first forward removes it, too.
    """

    def __init__(
        self, model: nn.Module, tracker: LayoutTracker, sp: SequenceParallel, mode: Mode
    ) -> None:
        self._tracker, self._sp, self._mode = tracker, sp, mode
        self._outputs: dict[str, list[list[tuple[Tensor, Cut | None]]]] = {}
        """The tensors of each call of a module over the ranks, by the module's name."""
        self._kept_bytes, self._compared = 0, False
        self._comparisons: list[Comparison] = []
        self.hook = model.register_forward_pre_hook(self._compare, prepend=True, with_kwargs=True)

    def _compare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model both ways with these inputs.

        Raises:
            NotImplementedError: on every rank, if the outputs differ; names the first module whose
                output differs.
            ValueError: under "strict", if the model cannot be compared.
        """
        self.hook.remove()
        if self._compared:  # a copy of the model, whose hook stays
            return
        self._compared = True
        problem = None
        if any(type(p) is not nn.Parameter or not p.numel() for p in model.parameters()):
            problem = "its parameters are sharded or managed by the engine (ZeRO 3, FSDP, Gemini)"
        else:
            with in_mode(model, self._sp, training=False), torch.no_grad():
                over_ranks = self._run(model, args, kwargs, self._keep_output)
                try:
                    with self._tracker.paused(), on_one_rank(model, self._sp):
                        on_one = self._run(model, args, kwargs, self._compare_output)
                    for (name, output), (_, expected) in zip(over_ranks, on_one, strict=True):
                        self._record(f"its {name}", output, expected, of_model=True)
                    if not over_ranks:
                        problem = "its output has no tensor of floats that could be compared"
                except RuntimeError as error:  # out of memory
                    problem = str(error).splitlines()[0]
        self._conclude(type(model).__name__, problem)

    def _run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], observe: Observer
    ) -> list[tuple[str, Tensor]]:
        """The model's named outputs; `observe` sees the output of every module inside."""
        torch.manual_seed(0)
        with uncompiled(), observed_outputs(model, observe):  # observers would be compiled too
            return list(named_tensors(model(*args, **kwargs)))

    def _keep_output(self, name: str, output: Any) -> None:
        """Keep a module's output over the ranks, and how the hidden state is cut at this time."""
        tensors = [x for _, x in named_tensors(output)] if self._kept_bytes < KEPT_BYTES else []
        self._kept_bytes += sum(x.nbytes for x in tensors)
        kept = [(x.clone(), self._tracker.current_cut) for x in tensors]
        self._outputs.setdefault(name, []).append(kept)

    def _compare_output(self, name: str, output: Any) -> None:
        """Compare a module's output on one rank with that of the same call over the ranks.

        What cannot be compared counts as equal, so that errors have the same index on every rank.
        """
        kept = self._outputs[name].pop(0) if self._outputs.get(name) else []
        for index, (_, whole) in enumerate(named_tensors(output)):
            part, cut = kept[index] if index < len(kept) else (whole, None)
            expected = self._tracker.local_part(whole, cut)
            comparable = part if part.shape == expected.shape else expected
            self._record(f"the output of {name}", comparable, expected, of_model=False)

    def _record(self, what: str, output: Tensor, expected: Tensor, of_model: bool) -> None:
        same_shape = output.shape == expected.shape
        error = error_between(output, expected) if same_shape else inf
        tolerance = NARROW_TOLERANCES.get(expected.dtype, TOLERANCE)
        self._comparisons.append(Comparison(what, error, tolerance, of_model))

    def _conclude(self, name: str, problem: str | None) -> None:
        """Raise or warn if the model's own output differs on any rank; inner outputs may differ."""
        differing = [i for i, c in enumerate(self._comparisons) if c.error > c.tolerance]
        is_wrong = any(self._comparisons[i].of_model for i in differing)
        first_index = min(differing, default=NO_DIFFERENCE)
        finding = torch.tensor([problem is not None, is_wrong, first_index])
        failed, wrong, firsts = gather_small(self._sp.comm, finding).T.tolist()
        if any(failed):
            text = f"{name} was not verified: {problem or 'another rank could not run it alone'}"
            if self._mode == "strict":
                raise ValueError(text)
            return warn(text, self._sp)
        if any(wrong):
            first = self._comparisons[min(firsts)]
            errors = gather_small(self._sp.comm, torch.tensor(first.error, dtype=torch.float64))
            text = (
                f"{name} on {self._sp.size} ranks does not give what it gives on one: {first.what} "
                f"is the first that differs (by {errors.max():.1e} of its largest element on rank "
                f"{self._sp.comm.global_ranks[int(errors.argmax())]}): {CAUSES}"
            )
            if self._mode == "strict" or first.tolerance == TOLERANCE:
                raise NotImplementedError(text)
            warn(text, self._sp)


def warn(text: str, sp: SequenceParallel) -> None:
    """Log a warning on the first rank of the job."""
    if sp.comm.global_ranks[sp.rank] == 0:
        logging.getLogger(__name__).warning(text)


@contextmanager
def on_one_rank(model: nn.Module, sp: SequenceParallel) -> Iterator[None]:
    """Inside, the modules that attend over the ranks of `sp` attend on this rank alone."""
    alone = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    for module in receivers(model):
        getattr(module, RECEIVER)(alone)
    try:
        yield
    finally:
        for module in receivers(model):
            getattr(module, RECEIVER)(sp)


@contextmanager
def in_mode(model: nn.Module, sp: SequenceParallel, training: bool) -> Iterator[None]:
    """Inside, all modules train, or none; then restores modes, random states and byte counts."""
    modes = [(module, module.training) for module in model.modules()]
    sent = dict(sp.comm.sent)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            model.train(training)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        sp.comm.sent.clear()
        sp.comm.sent.update(sent)


@contextmanager
def observed_outputs(
    model: nn.Module, observe: Observer, left_out: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Inside, `observe` sees the output of every module inside the model that is not left out."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and module not in left_out:
                hook = module.register_forward_hook(
                    lambda _, __, output, name=name: observe(name, output)
                )
                stack.callback(hook.remove)
        yield
