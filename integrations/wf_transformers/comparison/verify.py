"""Does a model on several ranks give what it gives on one? Both are run on a short drawn batch.

Each rank runs the model twice with the same parameters: attached, on its part of the batch, and as
it is, on the whole. Compared with the same rows of the whole are the output of every module, the
model's outputs and its loss, and the gradient of every parameter, summed over the ranks. So it
is found if anything but attention mixes tokens, counts them or takes a mean over them, whether or
not we know of such a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wf_backends import SequenceParallel
from wf_backends.comm import fingerprint, gather_small
from wf_backends.dsp import TOLERANCE, Mode
from wf_backends.schedule import LAYOUTS
from wf_transformers.checkpoints import RUNNING
from wf_transformers.comparison.drawn import drawn_batch
from wf_transformers.comparison.draws import FixedDraws
from wf_transformers.comparison.runs import Comparison, Gather
from wf_transformers.handle import Handle
from wf_transformers.models import outermost
from wf_transformers.registry import registered_for

VERIFY = "verify"
NONE = 1 << 40  # the place of the first difference where there is none
SAMPLED = 512  # elements of a parameter that ranks compare
OWN_BATCH = "wf_transformers.verify(model, sp, attach, batch=...) takes a batch of yours"
CAUSES = (
    "something besides attention mixes tokens that are on several ranks (a convolution, a "
    "recurrence, a shift), counts them, or takes a mean over them. docs/verify.md says what to do; "
    '"verify": false trains all the same'
)
NEVER_CUT = (
    "no module of {name} works on a part of the sequence: every rank would compute all of it, and "
    "attention take it for a part. docs/transformers.md lists the models that are cut, and says "
    "how to cut another"
)
ROUNDING = (
    "In its dtype rounding alone may do that, where it sends a token to another expert: in float32 "
    "it would be known"
)


@dataclass(frozen=True)
class Report:
    """What was compared.

    Attributes:
        compared: outputs of modules and of the model, and gradients.
        largest: the largest error, relative to the largest element of what was compared.
        where: what had it.
    """

    compared: int
    largest: float
    where: str


def verify(
    model: nn.Module,
    sp: SequenceParallel,
    attach: Callable[[], Handle],
    mode: Mode = True,
    *,
    whole_batches: bool = False,
    batch: Mapping[str, Any] | None = None,
    gather: Gather | None = None,
) -> Report | None:
    """Compare `model` on the ranks of `sp` with the same model on one.

    Parameters, buffers, gradients, modes and random state are as before afterwards. Meanwhile
    nothing is drawn: dropout drops nothing.

    Args:
        model: as it is before it is attached.
        attach: attaches it as it will be; what it returns is removed again.
        mode: False compares nothing. True says by logging where a model cannot be compared, or
            differs in a dtype narrower than float32; "strict" raises there, too.
        whole_batches: whether the attached model takes whole batches, with labels.
        batch: keyword arguments of the whole model; None = drawn.
        gather: a context in which the own parameters of one module are whole, for models whose
            parameters are partitioned: only their forward is compared.

    Returns:
        None where nothing was compared.

    Raises:
        NotImplementedError: where the model on the ranks gives something else than on one; names
            the first module whose output differs. And what `attach` raises.
        ValueError: under "strict", where it cannot be compared.
    """
    check_mode(mode)
    if mode is False or sp.size == 1:
        return None
    problem = obstacle(model, sp)
    with _own_device(model, sp, problem is None):
        given = drawn_batch(model, sp, whole_batches) if batch is None else batch
        if given is None:
            problem = f"what inputs it takes is not known. {OWN_BATCH}"
        run = Comparison(model, sp, {} if problem else given or {}, whole_batches, gather)
        if problem is None:
            with attach() as handle:
                problem = compare(run, handle, _removed(handle))
    return conclude(run, problem, mode)


def check_mode(mode: object) -> None:
    """Refuse what is none of the three modes.

    Raises:
        ValueError: naming the option and its value.
    """
    if not isinstance(mode, bool) and mode != "strict":
        raise ValueError(f'"{VERIFY}" must be true, false or "strict", got {mode!r}')


def compare(run: Comparison, handle: Handle, alone: AbstractContextManager[Any]) -> str | None:
    """Why the comparison could not be made, if so; arguments as those of `Comparison.run`."""
    try:
        with as_before(run.model, run.sp), FixedDraws() as draws:
            run.run(handle, alone)
        run.drops = draws.asked
    except NotImplementedError:
        raise
    except Exception as error:  # whatever a model of somebody else's raises
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _removed(handle: Handle) -> Iterator[None]:
    handle.remove()
    yield


def obstacle(model: nn.Module, sp: SequenceParallel, sharded: bool = False) -> str | None:
    """What can be told of a model that cannot be compared, the same on every rank.

    Args:
        sharded: whether an engine may have sharded its parameters, and brings them together.
    """
    parameters = list(model.parameters())
    if any(p.is_meta or hasattr(p, "materialize") for p in parameters):
        return "its parameters are not there yet (a meta device, a lazy init)"
    if LAYOUTS[sp.config.layout].needs_slices:
        return f"the {sp.config.layout} layout follows from the slices of a mask"
    if not sharded and any(isinstance(p, DTensor) for p in parameters):
        return (
            "its parameters are in parts already: attach it before they are (fully_shard and such)"
        )
    if any(registered_for(one) is not None for one in outermost(model)):
        return "its attention is WallFacer's already, so it cannot run alone"
    samples = [_sample(p) for p in parameters if not isinstance(p, DTensor)]
    parts = sharded and any(hasattr(p, "ds_id") for p in parameters)
    told = fingerprint(torch.stack(samples).tolist() if samples and not parts else [])
    mine = torch.tensor([told, _fits(parameters, sp)])
    samples_told, fits = gather_small(sp.comm, mine).T
    if not fits.all():
        return "its parameters do not fit the device in whole"
    if len(samples_told.unique()) > 1:
        return (
            "the ranks of a sequence hold different parameters; draw them from the same seed, or "
            "load the same checkpoint, before the model is attached"
        )
    return None


def _sample(p: Tensor) -> Tensor:
    """A float64 that two tensors have in common if they are the same."""
    few = p.detach().flatten()[:: max(1, p.numel() // SAMPLED)].double()
    return (few * torch.arange(1, len(few) + 1, device=p.device)).sum()


def _is_away(parameters: Iterable[Tensor], sp: SequenceParallel) -> bool:
    """Whether a model is on the host, and messages do not pass through it."""
    return {p.device.type for p in parameters} == {"cpu"} and not sp.comm.on_host


def _fits(parameters: list[nn.Parameter], sp: SequenceParallel) -> bool:
    """Whether the device has room for the parameters, and as much again."""
    if not _is_away(parameters, sp):
        return True
    free, _ = torch.cuda.mem_get_info()
    return 2 * sum(p.nbytes for p in parameters) <= free


@contextmanager
def _own_device(model: nn.Module, sp: SequenceParallel, wanted: bool) -> Iterator[None]:
    """Inside, the model is where messages are, if it is wanted there and is not."""
    away = wanted and _is_away(model.parameters(), sp)
    if away:
        model.to(torch.device("cuda", torch.cuda.current_device()))
    try:
        yield
    finally:
        if away:
            model.to("cpu")


@contextmanager
def as_before(model: nn.Module, sp: SequenceParallel) -> Iterator[None]:
    """Inside, the model trains; then its buffers and modes, draws and counts are as before."""
    modes = [(module, module.training) for module in model.modules()]
    checkpointed = [module for module in model.modules() if getattr(module, RUNNING, False) is True]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    sent = dict(sp.comm.sent)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            model.train()
            for module in checkpointed:  # there is room for a short batch
                setattr(module, RUNNING, False)
            yield
    finally:
        for module in checkpointed:
            setattr(module, RUNNING, True)
        for module, training in modes:
            module.training = training
        for buffer, old in buffers:
            buffer.detach().copy_(old)
        sp.comm.sent.clear()
        sp.comm.sent.update(sent)


def conclude(
    run: Comparison, problem: str | None, mode: Mode, on: str = "a drawn batch"
) -> Report | None:
    """What all ranks found: the report, the refusal, or why there is none."""
    name = type(run.model).__name__
    first = next((i for i, (_, error, least) in enumerate(run.errors) if error > least), NONE)
    mine = torch.tensor([problem is not None, run.cut, first])
    try:
        failed, cut, firsts = gather_small(run.sp.comm, mine).T.tolist()
    except RuntimeError as error:
        if problem is None:
            raise
        raise RuntimeError(f"{name} could not be run on this rank alone: {problem}") from error
    if any(failed):
        others = run.sp.comm.names_of([rank for rank, x in enumerate(failed) if x])
        said = problem or f"{others} could not run it"
        if mode == "strict":
            raise ValueError(f"{name} was not verified: {said}")
        return _told(f"{name} was not verified: {said}", run.sp)
    if min(firsts) < NONE:
        what, error, least = run.errors[min(min(firsts), len(run.errors) - 1)]
        message = (
            f"{name} on {run.sp.size} ranks does not give what it gives on one: {what} is the "
            f"first that differs (by {error:.1e} of its largest element on {run.sp.comm.me}, on "
            f"{on}): "
            f"{CAUSES}"
        )
        if mode == "strict" or least == TOLERANCE:
            raise NotImplementedError(message)
        return _told(f"{message}. {ROUNDING}", run.sp)
    if not any(cut):
        raise NotImplementedError(NEVER_CUT.format(name=name))
    where, largest, _ = max(run.errors, key=lambda found: found[1])
    return Report(len(run.errors), largest, where)


def _told(message: str, sp: SequenceParallel) -> None:
    """Log it once, on the first rank of the job."""
    if sp.comm.global_ranks[sp.rank] == 0:
        logging.getLogger(__name__).warning(message)
