"""Checks that a model computes on several ranks what it computes on one, on a short random batch.

Each rank runs the model twice with the same parameters: attached, on its part of the batch, and
unattached, on the whole batch. The outputs of all modules, the outputs and loss of the model, and
the gradients of all parameters, summed over the ranks, are compared with the same rows of the
whole. This finds anything besides attention that mixes tokens, counts them or takes a mean over
them, also in models that we do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wf_backends import SequenceParallel
from wf_backends.comm import fingerprint, gather_small
from wf_backends.dsp import TOLERANCE, Mode, in_mode, warn
from wf_backends.schedule import LAYOUTS
from wf_transformers.attention.registry import registered_for
from wf_transformers.comparison.dropout import FixedRandomness
from wf_transformers.comparison.random_batch import random_batch
from wf_transformers.comparison.runs import Comparison, Gather
from wf_transformers.handle import Handle
from wf_transformers.memory.checkpoints import ENABLED
from wf_transformers.models import outermost
from wf_transformers.replace import set_until

VERIFY = "verify"
NO_DIFFERENCE = 1 << 40  # the index of the first difference if there is none
NUM_SAMPLED = 512  # elements of a parameter that ranks compare
NO_INPUTS = (
    "what inputs it takes is not known. Of tokens, wrap it in a module whose argument is "
    "input_ids; for others wf_transformers.verify(model, sp, attach, batch=...) takes a batch of "
    "yours"
)
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
    """The result of a comparison without errors.

    Attributes:
        compared: how many outputs of modules and of the model, and gradients, were compared.
        largest: the largest error, relative to the largest element of the tensor.
        where: which tensor had the largest error.
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

    Afterwards parameters, buffers, gradients, training modes and random state are as before.
    During the comparison nothing is random: dropout drops nothing.

    Args:
        model: not yet attached.
        attach: attaches the model; the handle that it returns is removed again.
        mode: False compares nothing. True logs a warning if a model cannot be compared, or differs
            in a dtype narrower than float32; "strict" raises then, too.
        whole_batches: whether the attached model takes whole batches, with labels.
        batch: keyword arguments of the unattached model. None: a random batch.
        gather: a context in which a module's own parameters are whole, for models whose
            parameters are partitioned: only their forward is compared.

    Returns:
        None if nothing was compared.

    Raises:
        NotImplementedError: if the model on the ranks computes something else than on one; names
            the first module whose output differs. Also what `attach` raises.
        ValueError: under "strict", if the model cannot be compared.
    """
    check_mode(mode)
    if mode is False or sp.size == 1:
        return None
    problem = find_obstacle(model, sp)
    with _on_device(model, sp, problem is None):
        batch = random_batch(model, sp, whole_batches) if batch is None else batch
        if batch is None:
            problem = NO_INPUTS
        comparison = Comparison(model, sp, {} if problem else batch or {}, whole_batches, gather)
        if problem is None:
            with attach() as handle:
                problem = compare(comparison, handle, _removed(handle))
    return conclude(comparison, problem, mode)


def check_mode(mode: object) -> None:
    """Refuse a mode other than True, False and "strict"."""
    if not isinstance(mode, bool) and mode != "strict":
        raise ValueError(f'"{VERIFY}" must be true, false or "strict", got {mode!r}')


def compare(
    comparison: Comparison, handle: Handle, alone: AbstractContextManager[Any]
) -> str | None:
    """Run a comparison; return the error if the model could not be run."""
    try:
        with as_before(comparison.model, comparison.sp), FixedRandomness() as randomness:
            comparison.run(handle, alone)
        comparison.uses_dropout = randomness.saw_dropout
    except NotImplementedError:
        raise
    except Exception as error:  # the model may raise anything
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _removed(handle: Handle) -> Iterator[None]:
    handle.remove()
    yield


def find_obstacle(model: nn.Module, sp: SequenceParallel, sharded: bool = False) -> str | None:
    """Why a model cannot be compared, the same on every rank; None if it can.

    Args:
        sharded: whether an engine may have sharded its parameters and gathers them in the forward.
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
    if any(registered_for(inner) is not None for inner in outermost(model)):
        return "its attention is WallFacer's already, so it cannot run alone"
    checksums = [_checksum(p) for p in parameters if not isinstance(p, DTensor)]
    partitioned = sharded and any(hasattr(p, "ds_id") for p in parameters)
    value = fingerprint(torch.stack(checksums).tolist() if checksums and not partitioned else [])
    must_move = _must_move(parameters, sp)
    free = torch.cuda.mem_get_info()[0] if must_move else 0
    fits_device = not must_move or 2 * sum(p.nbytes for p in parameters) <= free  # and gradients
    local = torch.tensor([value, fits_device])
    fingerprints, fits = gather_small(sp.comm, local).T
    if not fits.all():
        return "its parameters do not fit the device in whole"
    if len(fingerprints.unique()) > 1:
        return (
            "the ranks of a sequence hold different parameters; draw them from the same seed, or "
            "load the same checkpoint, before the model is attached"
        )
    return None


def _checksum(p: Tensor) -> Tensor:
    """A float64 that depends on a sample of the elements."""
    sample = p.detach().flatten()[:: max(1, p.numel() // NUM_SAMPLED)].double()
    return (sample * torch.arange(1, len(sample) + 1, device=p.device)).sum()


def _must_move(parameters: Iterable[Tensor], sp: SequenceParallel) -> bool:
    """Whether a model is on the host, while messages must be on the device."""
    return {p.device.type for p in parameters} == {"cpu"} and not sp.comm.on_host


@contextmanager
def _on_device(model: nn.Module, sp: SequenceParallel, can_run: bool) -> Iterator[None]:
    """Inside, the model is on the device of messages, if it `can_run`."""
    moves = can_run and _must_move(model.parameters(), sp)
    if moves:
        model.to(torch.device("cuda", torch.cuda.current_device()))
    try:
        yield
    finally:
        if moves:
            model.to("cpu")


@contextmanager
def as_before(model: nn.Module, sp: SequenceParallel) -> Iterator[None]:
    """Inside, the model trains, without checkpointing, and linears of torchao compute in the dtype
    of their inputs. Afterwards its buffers and modes, the random state and the byte counts are
    restored."""
    with ExitStack() as stack:
        for buffer in model.buffers():
            stack.callback(buffer.detach().copy_, buffer.clone())
        for module in model.modules():
            if getattr(module, ENABLED, False) is True:  # a short batch fits without it
                set_until(stack, module, ENABLED, False)
            if isinstance(module, nn.Linear) and _is_of_torchao(module):
                set_until(stack, module, "forward", partial(_linear, module))
        stack.enter_context(in_mode(model, sp, training=True))
        yield


def _is_of_torchao(linear: nn.Linear) -> bool:
    """Whether torchao computes a linear, in float8 or less. A scale for all of a tensor, or for all
    tokens of a channel, follows from a rank's own tokens then, as it does under data parallelism.
    """
    return any(cls.__module__.startswith("torchao.") for cls in type(linear).__mro__)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """What the linear computes without float8; FSDP2 may have gathered its weight in float8."""
    weight: Any = linear.weight
    if hasattr(weight, "to_original_precision"):
        weight = weight.to_original_precision()
    return nn.functional.linear(x, weight, linear.bias)


def conclude(
    comparison: Comparison, problem: str | None, mode: Mode, source: str = "a random batch"
) -> Report | None:
    """Combine the results of all ranks: a report, an error, or None after a warning.

    `problem` says why this rank could not compare, `source` names the batch.
    """
    name, sp, errors = type(comparison.model).__name__, comparison.sp, comparison.errors
    too_large = [i for i, (_, error, tolerance) in enumerate(errors) if error > tolerance]
    first = too_large[0] if too_large else NO_DIFFERENCE
    local = torch.tensor([problem is not None, comparison.cut, first])
    try:
        failed, cut, firsts = gather_small(sp.comm, local).T.tolist()
    except RuntimeError as error:
        if problem is None:
            raise
        raise RuntimeError(f"{name} was not verified: {problem}") from error
    if any(failed):
        failed_ranks = sp.comm.names_of([rank for rank, x in enumerate(failed) if x])
        reason = problem or f"{failed_ranks} could not run it"
        if mode == "strict":
            raise ValueError(f"{name} was not verified: {reason}")
        return warn(f"{name} was not verified: {reason}", sp)
    if min(firsts) < NO_DIFFERENCE:
        description, error, tolerance = errors[min(min(firsts), len(errors) - 1)]
        on_ranks = gather_small(sp.comm, torch.tensor(error, dtype=torch.float64))
        message = (
            f"{name} on {sp.size} ranks does not give what it gives on one: {description} is the "
            f"first that differs (by {on_ranks.max():.1e} of its largest element on "
            f"{sp.comm.name_of(int(on_ranks.argmax()))}, on {source}): {CAUSES}"
        )
        if mode == "strict" or tolerance == TOLERANCE:
            raise NotImplementedError(message)
        return warn(f"{message}. {ROUNDING}", sp)
    if not any(cut):
        raise NotImplementedError(NEVER_CUT.format(name=name))
    where, largest, _ = max(errors, key=lambda entry: entry[1])
    return Report(len(errors), largest, where)
