"""Makes the short random batch on which `verify` runs a model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends.parallel import prepare_batch
from wf_backends.schedule import LAYOUTS, padding_multiple
from wf_transformers.batch import documents_can_reach, is_causal
from wf_transformers.calls import parameter_names, takes_any_keyword
from wf_transformers.families.stacks import is_cut_inside
from wf_transformers.models import head_of, outermost, windows_of
from wf_transformers.whole_batches.heads import head_is_over_all_rows

SAMPLES = 2
CHUNK_TOKENS = 6  # tokens of the random sequence in each of a rank's chunks
MAX_TOKENS = 512  # of the whole sequence, unless chunks would get fewer than two tokens
PADDED_FRACTION = 3  # where attention is causal, 1/3 of one sample is padding


def random_batch(
    model: nn.Module, sp: SequenceParallel, labelled: bool = False
) -> dict[str, Any] | None:
    """Keyword arguments for `model`, the same on every rank: ids with padding on the right, or
    images; with `labelled` also "labels", if their meaning is known. None if the model's inputs are
    unknown."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(model.parameters()), torch.empty(0))
    models = outermost(model)
    config: Any = models[0].config if models else None
    if models and models[0].main_input_name == "pixel_values":
        batch = _images(config, generator)
    elif _takes(model, "input_ids"):
        batch = _tokens(model, config, sp, generator, labelled)
    else:
        batch = None
    if batch is None:
        return None
    if any(type(inner).__name__.endswith("ForMultipleChoice") for inner in models):
        batch = {key: x[:, None] for key, x in batch.items()}  # (b, choices, S)
    dtypes = {torch.get_default_dtype(): like.dtype}  # pixels of models that do not cast them
    return {key: x.to(like.device, dtypes.get(x.dtype, x.dtype)) for key, x in batch.items()}


def random_tokens(model: nn.Module, sp: SequenceParallel) -> dict[str, Tensor] | None:
    """A random batch of ids only, as many as need no padding; None if the model takes no ids."""
    ids = (random_batch(model, sp) or {}).get("input_ids")
    seqlen = 0 if ids is None else ids.shape[1] // _multiple(sp) * _multiple(sp)
    return {"input_ids": ids[:, :seqlen]} if ids is not None and seqlen else None


def _images(config: Any, generator: torch.Generator) -> dict[str, Tensor] | None:
    """(b, channels, height, width), or (b, frames, channels, height, width)."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if size is None or channels is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return {"pixel_values": torch.randn(SAMPLES, *frames, channels, *sides, generator=generator)}


def _tokens(
    model: nn.Module, config: Any, sp: SequenceParallel, generator: torch.Generator, labelled: bool
) -> dict[str, Tensor] | None:
    """(b, S) ids that fill every chunk of every rank, with padding where the model takes a mask."""
    vocabulary = _vocabulary(model, config)
    if vocabulary is None:
        return None
    multiple, seqlen = _multiple(sp), short_seqlen(sp)
    max_seqlen = getattr(config, "max_position_embeddings", None) or seqlen
    needs_padding = documents_can_reach(model)  # it becomes a document, within max_seqlen
    seqlen = min(seqlen, max_seqlen // multiple * multiple) - needs_padding
    if seqlen < 1:
        return None
    ids = torch.randint(1, vocabulary, (SAMPLES, seqlen), generator=generator)
    ids[ids == getattr(config, "pad_token_id", None)] = vocabulary - 1  # not taken for padding
    batch = {"input_ids": ids}
    pools = labelled and head_is_over_all_rows(model)  # takes the last token, even if it is masked
    if needs_padding and _takes(model, "attention_mask"):
        batch["attention_mask"] = torch.ones_like(ids) if pools else _padding(model, ids, sp)
    batch = with_required_positions(model, batch)
    if "decoder_input_ids" in parameter_names(model):
        batch["decoder_input_ids"] = ids.flip(1)  # T5 makes none from input_ids alone
    if labelled and _takes(model, "labels") and head_of(model) != "other":
        mask = batch.get("attention_mask", torch.ones_like(ids))
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


def with_required_positions(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, with "position_ids" if it has none and the model cannot be called without."""
    parameter = inspect.signature(model.forward).parameters.get("position_ids")
    if parameter is None or parameter.default is not inspect._empty or "position_ids" in batch:
        return batch
    return {**batch, "position_ids": prepare_batch(batch, multiple=1)["position_ids"]}


def short_seqlen(sp: SequenceParallel) -> int:
    """The length of a short sequence that fills every chunk of every rank."""
    return _multiple(sp) * max(2, min(CHUNK_TOKENS, MAX_TOKENS // _multiple(sp)))


def _multiple(sp: SequenceParallel) -> int:
    return max(padding_multiple(sp.config.layout, sp.size), sp.size)


def _padding(model: nn.Module, ids: Tensor, sp: SequenceParallel) -> Tensor:
    """(b, S) attention mask with padding on the right.

    One sample has padding where all attention is causal, or tells it. Otherwise, or if the layout
    follows from documents, all samples have the same padding: it becomes a document, and all
    samples have the same documents. Padding is shorter than any sliding window: in some models a
    row that sees nothing but padding is NaN.
    """
    seqlen = ids.shape[1]
    hides_padding = head_of(model) == "causal" and (is_causal(model) or is_cut_inside(model))
    is_ragged = hides_padding and not LAYOUTS[sp.config.layout].needs_documents
    padding = min(seqlen // PADDED_FRACTION, *(window - 1 for window in windows_of(model)), seqlen)
    lengths = (seqlen, seqlen - padding) if is_ragged else (seqlen - 1,) * SAMPLES
    return (torch.arange(seqlen)[None] < torch.tensor(lengths)[:, None]).long()


def _vocabulary(model: nn.Module, config: Any) -> int | None:
    if config is not None:
        return getattr(config.get_text_config(), "vocab_size", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return next(tables, None)


def _takes(model: nn.Module, name: str) -> bool:
    return name in parameter_names(model) or (bool(outermost(model)) and takes_any_keyword(model))
