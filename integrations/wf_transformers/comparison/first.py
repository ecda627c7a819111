"""The comparison once more, on the first batch that a model trains on, cut short.

A drawn batch has ids and labels. What else a run gives its model (masks of a collator, weights by
token, noise on embeddings), and a loss that a Trainer makes of the outputs, are known at the first
step only. By then engines have wrapped the model; see `Changes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import ThreadComm
from wf_backends.parallel import IGNORE_INDEX
from wf_backends.schedule import SLICE_WORDS
from wf_transformers.calls import LABELS, TOKENS, by_name, parameter_names, tokens_of
from wf_transformers.comparison.changes import Changes
from wf_transformers.comparison.drawn import SAMPLES, drawn_length, drawn_tokens
from wf_transformers.comparison.runs import Call, Comparison
from wf_transformers.comparison.verify import Mode, as_before, compare, conclude, obstacle
from wf_transformers.documents import MASK_WORDS
from wf_transformers.families.stacks import stacks_of
from wf_transformers.handle import Handle
from wf_transformers.models import inner_models, outermost
from wf_transformers.whole_batches.arguments import own_words

LONGEST = 2048  # tokens of a batch that cannot be cut
TOO_LONG = (
    "its first batch cannot be cut short: it has a mask in slices, several sequences a sample, or "
    f"images in more than {LONGEST} tokens"
)
UNKNOWN = "what inputs it takes is not known"
LIKE_DRAWS = (
    "{name} drops the same places of different tokens on several ranks, the first in {where}: they "
    "draw from the same random state. Outside of Hugging Face models seed each rank by its own, "
    'torch.manual_seed(seed + rank), before the first batch; "verify": false trains all the same'
)


class FirstStep:
    """What is due before the first step of a model that was attached.

    Attributes:
        changes: what attaching did to the model.
        due: whether it is still to come.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.model, self.changes = model, Changes(model)
        self.mode: Mode = mode
        self.due = mode is not False

    def compare(
        self,
        handle: Handle,
        given: Mapping[str, Any],
        whole_batches: bool = True,
        call: Call | None = None,
    ) -> None:
        """Compare on the first rows of a batch, at the first call. Later calls do nothing.

        Args:
            handle: of the attached model.
            given: the whole batch, as this rank has it.
            whole_batches: whether the model is called with it, or with this rank's part.
            call: the step's own way from a model and a batch to a loss, where that is another
                than calling the model.

        Raises:
            NotImplementedError, ValueError: as `verify`.
        """
        due, self.due = self.due, False
        if not due or handle.sp.size == 1:
            return
        given = own_words(given)
        if not whole_batches:
            known = [name for name in parameter_names(self.model) if name not in LABELS]
            given = {key: x for key, x in given.items() if key in (*known, "cu_seqlens")}
        batch, on = shortened(given, handle.sp), "the first tokens of its first batch"
        device = next(self.model.parameters()).device
        if batch is not None and device.type != "cpu":  # on a CPU they may be offloaded
            # a loop of one's own may bring its part to the device afterwards
            batch = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}
        run = self.run(self.model, handle, batch, TOO_LONG, on, whole_batches, call)
        if run is not None and run.drops:
            _refuse_like_draws(run, handle)

    def run(
        self,
        model: nn.Module,
        handle: Handle,
        batch: Mapping[str, Any] | None,
        lacking: str,
        on: str,
        whole_batches: bool,
        call: Call | None,
    ) -> Comparison | None:
        """Compare the attached model, or one inside it; None where that could not be done.

        Args:
            batch: None for the reason that is `lacking`.
            on: what batch it is, in words.
        """
        with self.changes.taken_back():
            problem = obstacle(model, handle.sp, sharded=True)
        problem = lacking if batch is None else problem
        batch = {} if problem else batch or {}
        run = Comparison(model, handle.sp, batch, whole_batches, call=call)
        if problem is None:
            problem = compare(run, handle, self.changes.taken_back())
        return None if conclude(run, problem, self.mode, on) is None else run


class InnerCalls:
    """Compares the models inside those that `handle` attached, when they are first called.

    A loop of one's own calls such a model by itself, for hidden states, and a loss in chunks. That
    goes round the model that was attached, and round what knows whole batches. So a call is
    compared as it is made: on a drawn batch, with the arguments that this one has.

    Args:
        first: what knows how `model` was attached, the hooks of this among it.
    """

    def __init__(self, model: nn.Module, handle: Handle, first: FirstStep) -> None:
        self._handle, self._first = handle, first
        around = (one for one in outermost(model) if not stacks_of(one))
        self._due = {inner for one in around for inner in inner_models(one)}
        for inner in self._due:
            handle.hooks(inner.register_forward_pre_hook(self._before, with_kwargs=True))

    @eager
    def _before(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = by_name(parameter_names(inner), args, kwargs)
        by_itself = (
            self._handle.attention.documents.running is None and self._handle.first is not None
        )
        trains = inner.training and torch.is_grad_enabled() and tokens_of(given) is not None
        if by_itself and trains and inner in self._due:
            self._due -= set(inner.modules())
            self._compare(inner, [name for name, x in given.items() if x is not None])

    def _compare(self, inner: nn.Module, names: list[str]) -> None:
        handle = self._handle
        told = dict.fromkeys(name for name in MASK_WORDS if name in names)  # one document
        no_cache = {"use_cache": False} if "use_cache" in parameter_names(inner) else {}

        def call(words: Mapping[str, Any], alone: bool) -> Any:
            asked = {k: x for k, x in words.items() if alone or k in (*TOKENS, *names)}
            return inner(**no_cache | (asked if alone else told | asked))

        batch = drawn_tokens(inner, handle.sp)
        on = f"a drawn batch, with {', '.join(names)} alone as here"
        self._first.run(inner, handle, batch, UNKNOWN, on, handle.whole_batches, call)


def _refuse_like_draws(run: Comparison, handle: Handle) -> None:
    """Refuse dropout that drops the same of every rank's tokens."""
    if isinstance(run.sp.comm, ThreadComm):  # which share a generator
        return
    with as_before(run.model, run.sp):
        where = run.like_draws(handle)
    if where is not None:
        raise NotImplementedError(LIKE_DRAWS.format(name=type(run.model).__name__, where=where))


def shortened(given: Mapping[str, Any], sp: SequenceParallel) -> dict[str, Any] | None:
    """The first samples of a batch, and of its longest document a few tokens for each rank.

    Every tensor is cut in all dimensions that are as long as the sequence: a mask (b, 1, S, S) in
    two. Labels that all count for nothing there are the tokens themselves.

    Returns:
        None if it cannot be cut.
    """
    batch = {key: x for key, x in given.items() if x is not None}
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim()]
    tokens = tokens_of(batch)
    samples = len(tensors[0] if tokens is None else tokens) if tensors else 0
    if tokens is None:
        return {key: _first(x, samples) for key, x in batch.items()}
    seqlen = tokens.shape[1]
    if batch.get(SLICE_WORDS[0]) is not None or batch.get("input_ids", tokens[:, 0]).dim() > 2:
        return None
    if any(x.dim() > 1 and seqlen not in x.shape[1:] for x in tensors):  # images among tokens
        return batch if seqlen <= LONGEST else None
    start, stop = _longest_document(batch, seqlen)
    stop = min(stop, start + drawn_length(sp))
    found: dict[str, Any] = {}
    for key, x in batch.items():
        x = _first(x, samples)
        dims = (1,) if key == "inputs_embeds" else range(1, x.dim() if isinstance(x, Tensor) else 1)
        for dim in dims:
            x = x.narrow(dim, start, stop - start) if x.shape[dim] == seqlen else x
        found[key] = x
    found.pop("cu_seqlens", None)
    return _with_labels(found)


def _first(x: Any, samples: int) -> Any:
    return x[:SAMPLES] if isinstance(x, Tensor) and x.dim() and len(x) == samples else x


def _longest_document(batch: Mapping[str, Any], seqlen: int) -> tuple[int, int]:
    """Where it starts and stops: a model alone knows of no documents."""
    borders: Sequence[int] = (0, seqlen)
    positions = batch.get("position_ids")
    if batch.get("cu_seqlens") is not None:
        borders = batch["cu_seqlens"]
    elif isinstance(positions, Tensor) and positions.dim() == 2:
        borders = [*(positions[0] == 0).nonzero().flatten().tolist(), seqlen]
    pairs = list(zip(borders, borders[1:], strict=False)) or [(0, seqlen)]
    return max(pairs, key=lambda pair: pair[1] - pair[0])


def _with_labels(batch: dict[str, Any]) -> dict[str, Any]:
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
        if bool((labels == IGNORE_INDEX).all()):
            mask = batch.get("attention_mask")
            padded = mask == 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else ids < 0
            batch["labels"] = ids.masked_fill(padded, IGNORE_INDEX)
    return batch
