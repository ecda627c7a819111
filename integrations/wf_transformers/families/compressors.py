"""Layers whose compressor makes one key of several tokens: DeepSeek-V4.

In place of a compressor's forward, ranks pool the groups of tokens that end in their rows, and get
the entries of all ranks (`CompressedAttention`). Modules are called once, for all rows, so that
ZeRO 3 and FSDP gather them on all ranks alike.

Shapes: b batch, s rows of this rank, d head_dim, n groups of m tokens, T entries of the sequence,
h heads of the indexer.
Source: DeepSeek-V4, section 2.3, of which the equations are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.runtime import accumulator_dtype
from wf_backends.sparse import Entries, Groups
from wf_transformers.attention.chosen import ENTRIES, MASK_IS_CHOICE, RATIO
from wf_transformers.attention.function import Attention
from wf_transformers.calls import Kwargs
from wf_transformers.families.indexers import SCORES_OF_BLOCK
from wf_transformers.handle import Handle
from wf_transformers.models import file_of, row_of

COMPRESSED: Mapping[str, bool] = MappingProxyType({"DeepseekV4Attention": True})
"""Attention with a compressor, by the name of a class of transformers; its `compressor` is None in
layers that have only a window."""


def compress_over_ranks(model: nn.Module, handle: Handle) -> None:
    """Make the compressors of a model pool over the ranks, until `handle.remove()`."""
    for layer in model.modules():
        compressor = getattr(layer, "compressor", None)
        if row_of(COMPRESSED, layer) and compressor is not None:
            attention, indexer = handle.attention, getattr(compressor, "indexer", None)
            handle.set(compressor, "forward", partial(_compress, attention, compressor))
            if indexer is not None:
                handle.set(indexer, "forward", partial(_choose, attention, indexer))
            handle.before(layer, partial(_change_arguments, attention))


def _change_arguments(
    attention: Attention, layer: Any, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[tuple[Any, ...], Kwargs]:
    """Give a layer a mask of integers without columns, to which it appends the chosen entries, as
    it appends the entries to its keys."""
    hidden = args[0] if args else kwargs["hidden_states"]
    window = layer.sliding_window - 1, -1
    with attention.refusing_on_all_ranks():
        attention.check_mask(kwargs.get("attention_mask"), causal=True, window=window)
    no_columns = hidden.new_empty(len(hidden), 1, hidden.shape[1], 0, dtype=torch.long)
    sees_all = getattr(layer.compressor, "indexer", None) is None
    options = {MASK_IS_CHOICE: ENTRIES, RATIO: layer.compressor.compress_rate if sees_all else None}
    return args, kwargs | options | {"attention_mask": no_columns}


@eager
def _compress(
    attention: Attention,
    compressor: Any,
    hidden: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """In place of a compressor's forward: the entries of all ranks (b, 1, T, d), and those that
    an indexer chose for this rank's rows (b, 1, s, t), -1 = none; without one t is 0."""
    entries = _entries(attention, compressor, hidden, position_ids)
    indexer = getattr(compressor, "indexer", None)
    if indexer is None:
        chosen = hidden.new_empty(*hidden.shape[:2], 0, dtype=torch.long)
    else:
        chosen = indexer(hidden, q_residual, position_ids)
    return entries.values.unsqueeze(1), chosen.unsqueeze(1)


def _entries(
    attention: Attention, compressor: Any, hidden: Tensor, position_ids: Tensor
) -> Entries:
    """The entries of a compressor, or of an indexer's own (section 2.3.1; equations 20 to 23)."""
    ratio, name = compressor.compress_rate, type(compressor).__name__
    kv, gate = compressor.kv_proj(hidden), compressor.gate_proj(hidden)
    has_two_series = kv.shape[-1] == 2 * compressor.head_dim  # the group before is in the first
    return attention.chosen.compressed.compress(
        torch.cat((kv, gate), -1),
        ratio,
        partial(_pool, compressor, position_ids),
        2 * ratio if has_two_series else ratio,
        attention.documents.borders(name),
        name,
    )


def _pool(compressor: Any, position_ids: Tensor, groups: Groups) -> Tensor:
    """The entries of groups: means of their keys, weighted by a softmax over a group's tokens in
    each channel, with a norm and the rotation of the group's first token, whose position may count
    from the start of the sequence, as those of the queries do then."""
    kv, gate = groups.rows.chunk(2, -1)
    gate = gate + compressor.position_bias.repeat(kv.shape[2] // compressor.compress_rate, 1)
    kv, gate = (_series(compressor, x) for x in (kv, gate))
    gate = gate.masked_fill(~groups.is_there.unsqueeze(-1), -torch.inf)
    weights = gate.softmax(2, dtype=accumulator_dtype(kv.dtype)).to(kv.dtype)
    pooled = compressor.kv_norm((kv * weights).sum(2))
    starts = position_ids[:, groups.last] + 1 - compressor.compress_rate
    return _rotate(compressor, pooled.unsqueeze(2), starts).squeeze(2)


def _series(compressor: Any, x: Tensor) -> Tensor:
    """(b, n, reach, d): of two series the first of the group before, the second of the group."""
    ratio, width = compressor.compress_rate, compressor.head_dim
    if x.shape[-1] == width:
        return x
    return torch.cat((x[:, :, :ratio, :width], x[:, :, ratio:, width:]), 2)


def _rotate(module: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """x (b, s, h, d), rotated by the module's own angles at positions (b, s)."""
    cos, sin = module.rotary_emb(x, position_ids=position_ids, layer_type=module.rope_layer_type)
    rotate = file_of(module).apply_rotary_pos_emb
    return rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)


@torch.no_grad()
def _choose(
    attention: Attention, indexer: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor
) -> Tensor:
    """In place of an indexer's forward: (b, s, t), the entries that this rank's rows see; -1 =
    none (equations 13 to 17)."""
    entries, scorer = _entries(attention, indexer, hidden, position_ids), indexer.scorer
    q = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim))
    q = _rotate(indexer, q, position_ids).to(accumulator_dtype(q.dtype))
    weights = scorer.weights_proj(hidden).to(q.dtype) * scorer.weights_scaling
    width = min(indexer.index_topk, int(entries.count.max()))
    chosen = torch.full((*hidden.shape[:2], width), -1, device=hidden.device)
    for first in entries.first.unique().tolist():
        rows = (entries.first == first).nonzero().flatten()
        num_seen = int(entries.count[rows].max())
        keys = entries.values[:, first : first + num_seen].to(q.dtype)
        size = max(1, SCORES_OF_BLOCK // max(1, len(q) * q.shape[2] * num_seen))
        for block in rows.split(size):
            scores = torch.einsum("bshd,btd->bsht", q[:, block], keys).relu_()
            scores = (scores * scorer.softmax_scale * weights[:, block].unsqueeze(-1)).sum(2)
            count = entries.count[block].to(hidden.device).unsqueeze(-1)
            scores.masked_fill_(torch.arange(num_seen, device=hidden.device) >= count, -torch.inf)
            best = scores.topk(min(width, num_seen), -1).indices
            best = torch.where(best < count, best + first, -1)
            chosen[:, block, : best.shape[-1]] = best
    return chosen
