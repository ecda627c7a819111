"""Images and videos of a prompt: a rank encodes those of its own tokens.

They do not pass through transformers' `generate`, which in version 5 encodes all on every rank.

Shapes: b samples, r times each where beams or several sequences are wanted, S tokens, s of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wf_backends import SequenceParallel
from wf_transformers.attention.blocks import BLOCKS
from wf_transformers.calls import MEDIA
from wf_transformers.families.media import FEATURE_ROWS, cut_media, rope_positions
from wf_transformers.families.media_table import TABLE, media_arguments, media_of, token_of


def take_media(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take images and videos, and what describes them, out of the options of a call."""
    names = media_arguments(model)
    media = {name: x for name in names if (x := options.pop(name, None)) is not None}
    unknown = next((name for name in MEDIA if options.get(name) is not None), None)
    if unknown is not None:
        raise NotImplementedError(
            f"{type(model).__name__} with {unknown}: generation over ranks takes tokens, and "
            f"images and videos of {', '.join(TABLE)}"
        )
    return media if media.keys() & set(MEDIA) else {}


def cut_with_media(
    model: Any,
    sp: SequenceParallel,
    rows: Mapping[str, Tensor],
    media: Mapping[str, Any],
    mask: Tensor | None,
    repeats: int,
) -> tuple[dict[str, Any], list[int], int]:
    """This rank's part of a prompt: its tokens, and the media that they stand for.

    Args:
        rows: "input_ids" and "position_ids" (b r, S), as of text.
        media: of the samples, not repeated.
        mask: attention_mask (b r, S), or None.
        repeats: r.

    Returns:
        A batch for `forward_kwargs`; for each sample by how much positions of tokens after the
        media are less than their numbers; and the first of these tokens.
    """
    batch, row = {name: x[::repeats] for name, x in rows.items()} | {**media}, media_of(model)
    if row is not None and row.rope:
        del batch["position_ids"]
        seen = torch.ones_like(batch["input_ids"]) if mask is None else mask[::repeats]
        batch["position_ids"] = rope_positions(model, batch | {"attention_mask": seen})
    behind, first_text = _after_media(batch["position_ids"])
    local = cut_media(model, sp, batch, lambda rows: {k: sp.shard(x) for k, x in rows.items()})
    local = _repeated(model, local, repeats) if repeats > 1 else local
    return local, behind.repeat_interleave(repeats).tolist(), first_text


def _after_media(positions: Tensor) -> tuple[Tensor, int]:
    """From positions (b, S) or (3, b, S) of a prompt: by how much those of its last tokens, which
    are text, are less than their numbers (b,), and from which token on they are. Media may have
    larger ones: Qwen2.5-VL's in transformers 5.3 count seconds from the start of the prompt."""
    *_, samples, seqlen = positions.shape
    positions = positions.reshape(-1, samples, seqlen)
    behind = seqlen - 1 - positions[..., -1].amax(dim=0)
    numbers = torch.arange(seqlen, device=positions.device)
    others = (positions != numbers - behind[:, None]).any(dim=1).any(dim=0).nonzero()
    return behind, int(others.max()) + 1 if len(others) else 0


def _repeated(model: Any, local: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Each sample of a rank's part `repeats` times, with the features of the same media."""
    row, ids, rows = media_of(model), local["input_ids"], list[Tensor]()
    assert row is not None
    tokens = [token_of(model, x) for x in row.modalities if x.values in local]
    for of_all, token in zip(local[FEATURE_ROWS], tokens, strict=True):
        of_samples = of_all.split((ids == token).sum(dim=1).tolist())
        rows += [torch.cat([x.repeat(repeats) for x in of_samples])]
    positions = local["position_ids"].repeat_interleave(repeats, dim=-2)
    ids = ids.repeat_interleave(repeats, dim=0)
    if BLOCKS in local:
        seqlen, samples, in_windows = local[BLOCKS]
        repeated = tuple(x for x in samples for _ in range(repeats))
        local |= {BLOCKS: (seqlen, repeated, in_windows)}
    return local | {"input_ids": ids, "position_ids": positions, FEATURE_ROWS: rows}
