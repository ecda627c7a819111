"""Repeats the comparison of `verify` on a few tokens of the first training batch.

A random batch has ids and labels only. Other arguments (masks of a collator, weights per token,
noise on embeddings), and the loss that a Trainer computes from the outputs, are only known at the
first step. By then engines have wrapped the model; see `Changes`.
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
from wf_backends.schedule import SLICE_ARGUMENTS
from wf_transformers.attention.documents import MASK_ARGUMENTS
from wf_transformers.calls import LABELS, TOKENS, by_name, parameter_names, tokens_of
from wf_transformers.comparison.changes import Changes
from wf_transformers.comparison.random_batch import (
    SAMPLES,
    random_tokens,
    short_seqlen,
    with_required_positions,
)
from wf_transformers.comparison.runs import Comparison, ModelCall
from wf_transformers.comparison.verify import Mode, as_before, compare, conclude, find_obstacle
from wf_transformers.families.media_table import OF_MEDIA, language_model
from wf_transformers.families.stacks import stacks_of
from wf_transformers.handle import Handle
from wf_transformers.models import inner_models, outermost
from wf_transformers.whole_batches.arguments import with_cu_seqlens

MIN_TOKENS = 3  # of fewer a rank's part with its padding may have as many rows as the whole
MAX_UNCUT_TOKENS = 2048  # tokens of a batch that cannot be cut
TOO_LONG = (
    "its first batch cannot be cut short: it has a mask in slices, several sequences a sample, or "
    f"images in more than {MAX_UNCUT_TOKENS} tokens"
)


class FirstStep:
    """The comparison before the first training step of an attached model.

    Attributes:
        changes: what attaching changed on the model.
        due: whether the comparison has not run yet.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self.model, self.changes = model, Changes(model)
        self.mode: Mode = mode
        self.due = mode is not False

    def compare(
        self,
        handle: Handle,
        arguments: Mapping[str, Any],
        whole_batches: bool = True,
        call: ModelCall | None = None,
    ) -> None:
        """Compare on a few tokens of the first batch that has enough, while it is `due`.

        Args:
            handle: of the attached model.
            arguments: the whole batch, as this rank has it.
            whole_batches: whether the model is called with the whole batch, not with this rank's
                part.
            call: computes the loss of a batch, if the training step does more than call the model.
        """
        self.due = False
        if handle.sp.size == 1:
            return
        arguments = with_cu_seqlens(arguments)
        # embeddings that the caller computed: their graph is for the caller's backward
        arguments = {k: x.detach() if isinstance(x, Tensor) else x for k, x in arguments.items()}
        if not whole_batches:
            names = [name for name in parameter_names(self.model) if name not in LABELS]
            arguments = {key: x for key, x in arguments.items() if key in (*names, "cu_seqlens")}
        batch, source = shorten(arguments, handle.sp), "a few tokens of its first batch"
        tokens = tokens_of(batch or {})
        if tokens is not None and tokens.shape[1] < MIN_TOKENS:
            self.due = True  # a later batch may have more
            return
        if batch is not None and tokens is not None:
            batch = with_required_positions(self.model, batch)
        device = next(self.model.parameters(), torch.empty(0)).device
        if batch is not None and device.type != "cpu":  # on a CPU they may be offloaded
            # a training loop may move the batch to the device later
            batch = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}
        self.run(self.model, handle, batch, TOO_LONG, source, whole_batches, call)

    def run(
        self,
        model: nn.Module,
        handle: Handle,
        batch: Mapping[str, Any] | None,
        no_batch_reason: str,
        source: str,
        whole_batches: bool,
        call: ModelCall | None,
    ) -> None:
        """Compare the attached model, or one inside it, and the ranks' dropout if that is possible.

        `batch` is None for `no_batch_reason`; `source` names the batch in errors.
        """
        with self.changes.undone():
            problem = find_obstacle(model, handle.sp, sharded=True)
        problem = no_batch_reason if batch is None else problem
        batch = {} if problem else batch or {}
        comparison = Comparison(model, handle.sp, batch, whole_batches, call=call)
        if problem is None:
            problem = compare(comparison, handle, self.changes.undone())
        report = conclude(comparison, problem, self.mode, source)
        if report is not None and comparison.uses_dropout:
            _refuse_equal_dropout(comparison, handle)


class InnerCalls:
    """Compares the models inside those that `handle` attached, when they are first called.

    A training loop may call an inner model directly, for hidden states and a loss in chunks. Then
    the hooks of the attached model do not run. So the first such call is compared, on a random
    batch, with the arguments that this call has.

    Args:
        first_step: of `model`; it must record the hooks of this object among its changes.
    """

    def __init__(self, model: nn.Module, handle: Handle, first_step: FirstStep) -> None:
        self._handle, self._first_step = handle, first_step
        models = [language_model(x) for x in outermost(model) if not stacks_of(x)]
        self._due = {inner for pretrained in models for inner in inner_models(pretrained)}
        for inner in self._due:
            handle.before(inner, self._before)

    @eager
    def _before(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = by_name(parameter_names(inner), args, kwargs)
        is_outer_running = self._handle.attention.documents.running is not None
        is_comparing = self._handle.first is None
        trains = inner.training and torch.is_grad_enabled() and tokens_of(arguments) is not None
        if not is_outer_running and not is_comparing and trains and inner in self._due:
            self._due -= set(inner.modules())
            self._compare(inner, [name for name, x in arguments.items() if x is not None])

    def _compare(self, inner: nn.Module, names: list[str]) -> None:
        handle = self._handle
        no_documents = dict.fromkeys(name for name in MASK_ARGUMENTS if name in names)
        no_cache = {"use_cache": False} if "use_cache" in parameter_names(inner) else {}

        def call(batch: Mapping[str, Any], alone: bool) -> Any:
            if alone:
                return inner(**no_cache | dict(batch))
            used = {k: x for k, x in batch.items() if k in (*TOKENS, *names)}
            return inner(**no_cache | no_documents | used)

        batch = random_tokens(inner, handle.sp)
        source = f"a random batch, with {', '.join(names)} alone as here"
        unknown = "what inputs it takes is not known"
        self._first_step.run(inner, handle, batch, unknown, source, handle.whole_batches, call)


def _refuse_equal_dropout(comparison: Comparison, handle: Handle) -> None:
    """Refuse dropout with the same mask for the different tokens of several ranks."""
    if isinstance(comparison.sp.comm, ThreadComm):  # threads share a generator
        return
    with as_before(comparison.model, comparison.sp):
        where = comparison.first_equal_dropout(handle)
    if where is not None:
        raise NotImplementedError(
            f"{type(comparison.model).__name__} drops the same places of different tokens on "
            f"several ranks, the first in {where}: they draw from the same random state. Outside "
            "of Hugging Face models seed each rank by its own, torch.manual_seed(seed + rank), "
            'before the first batch; "verify": false trains all the same'
        )


def shorten(arguments: Mapping[str, Any], sp: SequenceParallel) -> dict[str, Any] | None:
    """The first samples of a batch, with a few tokens for each rank from its longest document.

    The tokens begin with the first label that counts: before it the two answers of a preference are
    the same prompt, on which their gradients cancel. Every tensor is cut in all dimensions that are
    as long as the sequence: a mask (b, 1, S, S) in two. If no label counts among these tokens, the
    tokens become the labels. None if the batch cannot be cut.
    """
    batch = {key: x for key, x in arguments.items() if x is not None}
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim()]
    tokens = tokens_of(batch)
    if tokens is None:
        samples = len(tensors[0]) if tensors else 0
        return {key: _first_samples(x, samples) for key, x in batch.items()}
    samples, seqlen = tokens.shape[:2]
    if batch.get(SLICE_ARGUMENTS[0]) is not None or batch.get("input_ids", tokens[:, 0]).dim() > 2:
        return None
    is_uncut = any(x.dim() > 1 and seqlen not in x.shape[1:] for x in tensors)
    if is_uncut or OF_MEDIA & batch.keys():  # images, maybe as wide as the sequence
        return batch if seqlen <= MAX_UNCUT_TOKENS else None
    start, stop = _longest_document(batch, seqlen)
    if batch.get("position_ids") is None:  # they must start at 0
        start = max(start, min(_first_label(batch), stop - short_seqlen(sp)))
    stop = min(stop, start + short_seqlen(sp))
    short: dict[str, Any] = {}
    for key, x in batch.items():
        short[key] = x = _first_samples(x, samples)
        if isinstance(x, Tensor):
            for dim in (1,) if key == "inputs_embeds" else range(1, x.dim()):
                x = x.narrow(dim, start, stop - start) if x.shape[dim] == seqlen else x
            short[key] = x.contiguous()  # losses call `view` on labels
    short.pop("cu_seqlens", None)
    return _with_some_labels(short)


def _first_samples(x: Any, samples: int) -> Any:
    has_row_per_sample = isinstance(x, list) or isinstance(x, Tensor) and x.dim()
    return x[:SAMPLES] if has_row_per_sample and len(x) == samples else x


def _longest_document(batch: Mapping[str, Any], seqlen: int) -> tuple[int, int]:
    """(start, stop) of the longest document: an unattached model can only run a single one."""
    borders: Sequence[int] = (0, seqlen)
    positions = batch.get("position_ids")
    if batch.get("cu_seqlens") is not None:
        borders = batch["cu_seqlens"]
    elif isinstance(positions, Tensor) and positions.dim() == 2:
        borders = [*(positions[0] == 0).nonzero().flatten().tolist(), seqlen]
    spans = list(zip(borders, borders[1:], strict=False)) or [(0, seqlen)]
    return max(spans, key=lambda span: span[1] - span[0])


def _first_label(batch: Mapping[str, Any]) -> int:
    """The first position at which a sample has a label that counts; 0 if there is none."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return 0
    counted = (labels != IGNORE_INDEX).any(dim=0).nonzero()
    return int(counted[0]) if len(counted) else 0


def _with_some_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch; if none of its labels counts, with its ids as labels."""
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.shape == ids.shape:
        if bool((labels == IGNORE_INDEX).all()):
            mask = batch.get("attention_mask")
            padded = mask == 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else ids < 0
            batch["labels"] = ids.masked_fill(padded, IGNORE_INDEX)
    return batch
