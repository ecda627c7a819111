"""Masks of a text's padding, and calls of a batch whose samples have texts of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, cat
from torch.utils._pytree import tree_map, tree_map_only

from wf_diffusers.cuts import Family
from wf_transformers.calls import Kwargs


def lengths_differ(arguments: Mapping[str, Any], family: Family) -> bool:
    """Whether the samples of a call have texts, or other items of a list, of different lengths."""
    lengths = [_text_lengths(arguments, *names) for names in family.text_masks]
    tensors = (
        [x.shape for x in arguments.get(name) or () if isinstance(x, Tensor)]
        for name in family.lists
    )
    return any(len(set(of_samples)) > 1 for of_samples in (*lengths, *tensors))


def _text_lengths(arguments: Mapping[str, Any], mask_name: str, text_name: str) -> list[int]:
    mask = _mask(arguments, mask_name, text_name)
    if mask is None:
        return []
    lengths = mask.count_nonzero(1).tolist()
    if not all(row[:length].all() for row, length in zip(mask, lengths, strict=True)):
        raise NotImplementedError(
            f"{mask_name} has padding before tokens of the text, of which it counts {lengths} in "
            "the samples: put the padding behind the text"
        )
    return lengths


def _mask(arguments: Mapping[str, Any], mask_name: str, text_name: str) -> Tensor | None:
    mask = arguments.get(mask_name)
    if mask is None or arguments.get(text_name) is None:
        return None
    return mask.any(-1) if mask_name == text_name else mask


def take_off_padding(arguments: Kwargs, family: Family) -> None:
    """Shorten texts (b, n, ...) of one length, and their masks (b, n), to what is not padding.

    No token attends to the padding, and nothing reads its rows, so the sample stays the same.
    """
    for mask_name, text_name in family.text_masks:
        mask = _mask(arguments, mask_name, text_name)
        if mask is not None:
            length = int(mask[0].count_nonzero())
            for name in {mask_name, text_name}:
                arguments[name] = arguments[name][:, :length]


def leave_out_unused(arguments: Kwargs, family: Family) -> None:
    """Set refused arguments to None that change nothing: masks of ones, caches that are skipped."""
    for name, _ in family.refused:
        value = arguments.get(name)
        is_mask = name.endswith("attention_mask") and isinstance(value, Tensor)
        modes = {cache.mode for cache in getattr(value, "caches", ())}
        if (is_mask and (value == 1).all()) or (modes and modes <= {None, "skip"}):
            arguments[name] = None


def samples_of(arguments: Mapping[str, Any], family: Family) -> list[Kwargs]:
    """Return the arguments of a call for each sample, as a batch of one."""
    first = arguments[family.lists[0]] if "x" in family.lists else arguments["hidden_states"]
    return [_sample_of(arguments, family, i, len(first)) for i in range(len(first))]


def _sample_of(arguments: Mapping[str, Any], family: Family, i: int, samples: int) -> Kwargs:
    def take(x: Tensor) -> Tensor:
        return x[i : i + 1] if x.dim() and len(x) == samples else x

    def of_sample(name: str, value: Any) -> Any:
        if name.startswith(family.shared) or value is None:
            return value
        return value[i : i + 1] if name in family.lists else tree_map_only(Tensor, take, value)

    return {name: of_sample(name, value) for name, value in arguments.items()}


def join(outputs: Sequence[Any]) -> Any:
    """Return the output of a batch: tensors (b, ...), lists, tuples and dicts of samples."""

    def joined(*parts: Any) -> Any:
        return cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts))

    return tree_map(joined, *outputs, is_leaf=lambda x: isinstance(x, list))
