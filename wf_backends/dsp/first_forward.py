"""Does a model with stages give on several ranks what it gives on one? Its first forward tells.

Before it, every rank runs the model twice with the first inputs, in evaluation mode and without
gradients: over the ranks, and as on one device. Found is whatever mixes, counts or averages
positions between stages, whether or not we know of such a thing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wf_backends.comm import World, gather_small
from wf_backends.dsp.closeness import NARROW_TOLERANCES, TOLERANCE, error_between, named_tensors
from wf_backends.dsp.stages import Cut, LayoutTracker
from wf_backends.parallel import SequenceParallel, SequenceParallelConfig

RECEIVER = "set_sequence_parallel"
Mode = bool | Literal["strict"]
KEPT_BYTES = 1 << 28  # of module outputs; those of later modules are not compared
NONE = 1 << 40  # the place of the first difference where there is none
CAUSES = (
    "between stages it mixes positions that are on several ranks, counts them, or takes a mean "
    'over them. Name that module in "needs", or move it behind "leaves" (docs/dsp.md); '
    '"verify": false runs it all the same'
)
See = Callable[[str, Any], None]


def receivers(model: nn.Module) -> list[nn.Module]:
    """The modules that have a method `set_sequence_parallel`: they attend over ranks themselves."""
    return [m for m in model.modules() if callable(getattr(m, RECEIVER, None))]


class FirstForward:
    """Compares a model's first forward over the ranks with that on one; then it is gone.

    Args:
        sp: what the model's receivers were given.
        mode: True says by logging where the model cannot be compared, or differs in a dtype
            narrower than float32; "strict" raises there, too.

    Attributes:
        hook: removes the comparison.
    """

    def __init__(
        self, model: nn.Module, tracker: LayoutTracker, sp: SequenceParallel, mode: Mode
    ) -> None:
        self._tracker, self._sp, self._mode = tracker, sp, mode
        self._kept: dict[str, list[list[tuple[Tensor, Cut | None]]]] = {}
        self._bytes = 0
        self._errors: list[tuple[str, float, float]] = []  # of what, how large, how large it may be
        self.hook = model.register_forward_pre_hook(self._compare, prepend=True, with_kwargs=True)

    def _compare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model both ways with these inputs.

        Raises:
            NotImplementedError: on every rank, where it gives something else; names the first
                module whose output differs.
            ValueError: under "strict", where it cannot be compared.
        """
        self.hook.remove()
        problem = _obstacle(model)
        if problem is None:
            with _as_before(model, self._sp):
                part = self._run(model, args, kwargs, self._keep)
                try:
                    with self._tracker.paused(), _alone(model, self._sp):
                        whole = self._run(model, args, kwargs, self._compare_output)
                    for (name, mine), (_, right) in zip(part, whole, strict=True):
                        self._note(f"its {name}", mine, right)
                except RuntimeError as error:  # out of memory
                    problem = str(error).splitlines()[0]
        self._conclude(type(model).__name__, problem)

    def _run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], see: See
    ) -> list[tuple[str, Tensor]]:
        torch.manual_seed(0)
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name:
                    hook = module.register_forward_hook(
                        lambda _, __, output, name=name: see(name, output)
                    )
                    stack.callback(hook.remove)
            return list(named_tensors(model(*args, **kwargs)))

    def _keep(self, name: str, output: Any) -> None:
        """What a module gave over the ranks, and how the hidden state was cut then."""
        tensors = [x for _, x in named_tensors(output)] if self._bytes < KEPT_BYTES else []
        self._bytes += sum(x.nbytes for x in tensors)
        self._kept.setdefault(name, []).append([(x.clone(), self._tracker.now) for x in tensors])

    def _compare_output(self, name: str, output: Any) -> None:
        """What a module gave alone, beside what it gave over the ranks at that call."""
        kept = self._kept[name].pop(0) if self._kept.get(name) else []
        for (mine, place), (_, whole) in zip(kept, named_tensors(output), strict=False):
            right = self._tracker.local_part(whole, place)
            if right.shape == mine.shape:
                self._note(f"the output of {name}", mine, right)

    def _note(self, what: str, mine: Tensor, right: Tensor) -> None:
        same = mine.shape == right.shape
        error = error_between(mine, right) if same else float("inf")
        self._errors.append((what, error, NARROW_TOLERANCES.get(right.dtype, TOLERANCE)))

    def _conclude(self, name: str, problem: str | None) -> None:
        """What all ranks found, of which only differences of the model's own output count."""
        differing = [i for i, (_, error, least) in enumerate(self._errors) if error > least]
        wrong = any(self._errors[i][0].startswith("its ") for i in differing)
        mine = torch.tensor([problem is not None, wrong, min(differing, default=NONE)])
        failed, wrongs, firsts = gather_small(self._sp.comm, mine).T.tolist()
        size = self._sp.size
        if any(failed):
            text = f"{name} was not verified: {problem or 'another rank could not run it alone'}"
            if self._mode == "strict":
                raise ValueError(text)
            return self._tell(text)
        if any(wrongs):
            what, error, least = self._errors[min(firsts)]
            text = (
                f"{name} on {size} ranks does not give what it gives on one: {what} is the first "
                f"that differs (by {error:.1e} of its largest element on {self._sp.comm.me}): "
                f"{CAUSES}"
            )
            if self._mode == "strict" or least == TOLERANCE:
                raise NotImplementedError(text)
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self._sp.comm.global_ranks[self._sp.rank] == 0:
            logging.getLogger(__name__).warning(text)


def _obstacle(model: nn.Module) -> str | None:
    """Why a model cannot run on this rank alone, the same on every rank."""
    if any(type(p) is not nn.Parameter or not p.numel() for p in model.parameters()):
        return "its parameters are sharded or managed by the engine (ZeRO 3, FSDP, Gemini)"
    return None


@contextmanager
def _alone(model: nn.Module, sp: SequenceParallel) -> Iterator[None]:
    """Inside, modules that attend over ranks attend alone."""
    alone = SequenceParallel(SequenceParallelConfig(), World(1).comm(0))
    for module in receivers(model):
        getattr(module, RECEIVER)(alone)
    try:
        yield
    finally:
        for module in receivers(model):
            getattr(module, RECEIVER)(sp)


@contextmanager
def _as_before(model: nn.Module, sp: SequenceParallel) -> Iterator[None]:
    """Inside, the model is evaluated; then its modes, draws and counts are as before."""
    modes = [(module, module.training) for module in model.modules()]
    sent = dict(sp.comm.sent)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        sp.comm.sent.clear()
        sp.comm.sent.update(sent)
