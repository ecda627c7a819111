"""What `verify` runs a model on: a short batch as its config asks for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends import SequenceParallel
from wf_backends.parallel import prepare_batch
from wf_backends.schedule import LAYOUTS, padding_multiple
from wf_transformers.calls import parameter_names, takes_any_keyword
from wf_transformers.models import head_of, outermost
from wf_transformers.whole_batches.heads import head_is_over_all_rows

SAMPLES = 2
CHUNK_TOKENS = 6  # of the drawn sequence, in each of a rank's chunks
MAX_TOKENS = 512  # of the whole sequence, where that leaves two tokens a chunk
PADDING = 3  # one sample is 1/3 padding where attention is causal
WINDOWS = ("sliding_window", "window_size", "local_attention")  # what configs call them


def drawn_batch(
    model: nn.Module, sp: SequenceParallel, labelled: bool = False
) -> dict[str, Any] | None:
    """A batch for `model`, the same on every rank: ids with padding on the right, or images.

    Args:
        labelled: whether "labels" are wanted, where what they are is known.

    Returns:
        Keyword arguments; None if it is not known what the model takes.
    """
    drawing = torch.Generator().manual_seed(0)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found = outermost(model)
    config: Any = found[0].config if found else None
    if found and found[0].main_input_name == "pixel_values":
        batch = _images(config, drawing)
    elif _takes(model, "input_ids"):
        batch = _tokens(model, config, sp, drawing, labelled)
    else:
        batch = None
    return None if batch is None else {key: x.to(device) for key, x in batch.items()}


def drawn_tokens(model: nn.Module, sp: SequenceParallel) -> dict[str, Tensor] | None:
    """Of such a batch the tokens alone, as many as need no padding; None if it has no tokens."""
    ids = (drawn_batch(model, sp) or {}).get("input_ids")
    length = 0 if ids is None else ids.shape[1] // _multiple(sp) * _multiple(sp)
    return {"input_ids": ids[:, :length]} if ids is not None and length else None


def _images(config: Any, drawing: torch.Generator) -> dict[str, Tensor] | None:
    """(b, channels, height, width), or (b, frames, channels, height, width)."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if size is None or channels is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return {"pixel_values": torch.randn(SAMPLES, *frames, channels, *sides, generator=drawing)}


def _tokens(
    model: nn.Module, config: Any, sp: SequenceParallel, drawing: torch.Generator, labelled: bool
) -> dict[str, Tensor] | None:
    """(b, S) ids that fill every chunk of every rank, with padding where the model takes a mask."""
    vocabulary = _vocabulary(model, config)
    if vocabulary is None:
        return None
    multiple, seqlen = _multiple(sp), drawn_length(sp)
    longest = getattr(config, "max_position_embeddings", None) or seqlen
    seqlen = min(seqlen, longest // multiple * multiple) - 1  # with padding there are positions
    if seqlen < 1:
        return None
    ids = torch.randint(1, vocabulary, (SAMPLES, seqlen), generator=drawing)
    ids[ids == getattr(config, "pad_token_id", None)] = vocabulary - 1  # some count without it
    batch = {"input_ids": ids}
    pools = labelled and head_is_over_all_rows(model)  # by the last token, whatever the mask says
    if _takes(model, "attention_mask"):
        batch["attention_mask"] = torch.ones_like(ids) if pools else _padding(model, ids, sp)
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters and parameters["position_ids"].default is inspect._empty:
        batch["position_ids"] = prepare_batch(batch, multiple=1)["position_ids"]
    if labelled and _takes(model, "labels") and head_of(model) != "other":
        mask = batch.get("attention_mask", torch.ones_like(ids))
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


def drawn_length(sp: SequenceParallel) -> int:
    """Tokens of a short sequence that fills every chunk of every rank."""
    return _multiple(sp) * max(2, min(CHUNK_TOKENS, MAX_TOKENS // _multiple(sp)))


def _multiple(sp: SequenceParallel) -> int:
    return max(padding_multiple(sp.config.layout, sp.size), sp.size)


def _padding(model: nn.Module, ids: Tensor, sp: SequenceParallel) -> Tensor:
    """A mask with padding on the right: of one sample, or alike of all where that is not known
    to be causal (full attention knows padding only as a document that all samples have) or the
    layout follows from documents.

    Padding is shorter than a window: a row that sees nothing else is NaN in some models.
    """
    seqlen = ids.shape[1]
    ragged = head_of(model) == "causal" and not LAYOUTS[sp.config.layout].needs_documents
    padding = min(seqlen // PADDING, *(window - 1 for window in _windows(model)), seqlen)
    ends = (seqlen, seqlen - padding) if ragged else (seqlen - 1,) * SAMPLES
    return (torch.arange(seqlen)[None] < torch.tensor(ends)[:, None]).long()


def _windows(model: nn.Module) -> list[int]:
    """As the config says them, or as layers do where they differ (transformers 5)."""
    config = getattr(model, "config", None)
    try:
        found = [getattr(config, name, None) for name in WINDOWS]
    except Exception:  # transformers has one of its own for it
        found = [getattr(module, WINDOWS[0], None) for module in model.modules()]
    return [window for window in found if isinstance(window, int) and window > 0]


def _vocabulary(model: nn.Module, config: Any) -> int | None:
    if config is not None:
        return getattr(config.get_text_config(), "vocab_size", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return next(tables, None)


def _takes(model: nn.Module, name: str) -> bool:
    return name in parameter_names(model) or (bool(outermost(model)) and takes_any_keyword(model))
