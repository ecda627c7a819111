"""Layers whose indexer chooses the keys that each query sees: DeepSeek Sparse Attention and others.

An indexer has a key of its own for each token, scores the keys for a query, and chooses the best. A
rank gets the indexer's keys of all tokens, by one all-gather, and chooses for its own rows with the
indexer's own code, document by document and a block of rows at a time. That code takes the keys of
a document from `Keys`, which it believes to be its cache, and its projections from `Recorded`: its
modules are called once, for all rows, so that ZeRO 3 and FSDP gather them on all ranks alike.

Shapes: b batch, s rows of this rank, S rows of the sequence, n rows of a block, g key heads that
choose (1 if all see the same keys), t chosen keys of a row, w numbers of an indexer's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from inspect import signature
from itertools import pairwise
from types import MappingProxyType, MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_transformers.attention.chosen import KEYS, MASK_IS_CHOICE
from wf_transformers.attention.function import Attention
from wf_transformers.calls import Kwargs
from wf_transformers.families.forwards import read_by_all_heads, weight_of
from wf_transformers.handle import Handle
from wf_transformers.models import row_of

SCORES_OF_BLOCK = 1 << 26
"""Scores of all heads of an indexer that a block holds: 256 MiB in float32."""
MAKES_MASK = "build_attention_mask_from_topk"
"""Method of layers that give the registry a mask of what they chose, and not the choice."""


class Keys:
    """What an indexer takes for its cache: gives the keys of a document, in place of its own.

    Args:
        document: (b, keys, w). None: the indexer gets the first of its own keys.

    Attributes:
        own: (b, s, w), the indexer's own keys of the rows that it was called with.
        device, num_keys: of those that it gets.
    """

    def __init__(self, device: torch.device, document: Tensor | None = None) -> None:
        self.own, self.device = torch.empty(0), device
        self._document = document
        self.num_keys = 1 if document is None else document.shape[1]

    @property
    def keys(self) -> Tensor:
        """(b, num_keys, w), those that the indexer gets."""
        return self.own[:, :1] if self._document is None else self._document

    def get_seq_length(self) -> int:
        return self.num_keys

    @property
    def layers(self) -> Keys:
        """As a cache's: this, for every layer."""
        return self

    def __getitem__(self, _: int) -> Keys:
        return self

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """As a cache's for DeepSeek's indexer; keys (b, s, w)."""
        self.own = keys
        return self.keys

    def update_index(self, keys: Tensor) -> Tensor:
        """As a cache's layer's for MiniMax M3's indexer; keys (b, 1, s, w)."""
        return self.update_indexer(keys.squeeze(1), 0).unsqueeze(1)


class Recorded:
    """A module of an indexer, which is called once; then its output is given, row by row.

    Attributes:
        rows: (n,) of the next calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._out, self.rows = module, torch.empty(0), torch.empty(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._out.numel():
            return self._out[:, self.rows]
        self._out = self._module(*args, **kwargs)
        return self._out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


Choice = Callable[[Any, Kwargs, Keys, Tensor], Tensor]
"""(indexer, arguments of its forward for n rows, keys of their document, their positions (n,) in
it) -> (b, n, g, t), the positions of the keys that they see; -1 = none."""


def _best_keys(indexer: Any, call: Kwargs, keys: Keys, positions: Tensor) -> Tensor:
    """DeepSeek's indexer scores keys, and all heads see the same ones."""
    columns = torch.arange(keys.num_keys, device=keys.device)
    seen = (columns <= positions[:, None]).expand(len(call["hidden_states"]), -1, -1)
    best = _call(indexer, call | {"attention_mask": seen, "cache": keys})
    return best.masked_fill(~seen.gather(-1, best.long()), -1).unsqueeze(2)


def _best_pools(indexer: Any, call: Kwargs, keys: Keys, positions: Tensor) -> Tensor:
    """GLM-5-Next's indexer chooses pools of keys by weighted means, and adds those of a row's own
    pool up to the row. Of itself it takes the rows for the last tokens."""
    columns = torch.arange(keys.num_keys, device=keys.device)
    seen = (columns <= positions[:, None]).expand(len(call["hidden_states"]), -1, -1)
    indexer.get_visible_tokens = lambda **_: seen
    valid = torch.ones_like(seen[..., 0])
    return _call(indexer, call | {"attention_mask": valid, "cache": keys}).unsqueeze(2)


def _best_blocks(indexer: Any, call: Kwargs, keys: Keys, positions: Tensor) -> Tensor:
    """MiniMax M3's indexer has scores of each key head, and chooses blocks of keys."""
    rows = {"position_ids": positions.expand(len(call["hidden_states"]), -1), "cache": keys}
    blocks = _call(indexer, call | rows).transpose(1, 2).unsqueeze(-1)  # b n g, blocks, 1
    best = blocks * indexer.block_size + torch.arange(indexer.block_size, device=keys.device)
    seen = (blocks >= 0) & (best <= positions[:, None, None, None])
    return best.masked_fill(~seen, -1).flatten(3)


def _call(indexer: Any, call: Kwargs) -> Tensor:
    return type(indexer).forward(indexer, **call)


CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        **dict.fromkeys(
            "DeepseekV32Attention GlmMoeDsaAttention AXK2Attention HYV4Attention HYV4VLAttention "
            "Dots3NoteTextAttention MistralLarge4TextAttention".split(),
            _best_keys,
        ),
        "Glm5NextTextAttention": _best_pools,
        "MiniMaxM3VLAttention": _best_blocks,
    }
)
"""Attention that gives the registry the indexer's choice, by the name of a class of transformers;
its `indexer` is None in layers that see all keys."""


def choose_over_ranks(model: nn.Module, handle: Handle) -> None:
    """Make the indexers of a model choose from the keys of all ranks, until `handle.remove()`.

    Raises:
        NotImplementedError: for indexers of transformers before 5.24.
    """
    for layer in model.modules():
        choice, indexer = row_of(CHOICES, layer), getattr(layer, "indexer", None)
        if choice is not None and indexer is not None:
            if "cache" not in signature(type(indexer).forward).parameters:
                raise NotImplementedError(
                    f"{type(indexer).__name__} takes no `cache`, which gives it the keys of all "
                    f"ranks: needs transformers 5.24 or newer, got {transformers.__version__}"
                )
            handle.set(indexer, "forward", partial(_choose, handle.attention, choice, indexer))
        # A layer without an indexer may see what an earlier one has chosen.
        chooses = indexer is not None or getattr(layer, "skip_topk", False)
        if choice is not None and chooses and hasattr(layer, "expand_kv"):
            handle.before(layer, partial(_change_arguments, handle.attention))
            handle.set(layer, "expand_kv", partial(_keep_latents, layer))
            if hasattr(layer, MAKES_MASK):
                handle.set(layer, MAKES_MASK, _keep_choice)


def _change_arguments(
    attention: Attention, layer: Any, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[Any, Kwargs]:
    """Give multi-head latent attention its projection for `sp.attention`, and a mask of one
    element, which the layer reads."""
    hidden = args[0] if args else kwargs["hidden_states"]
    with attention.refusing_on_all_ranks():
        attention.check_mask(kwargs.get("attention_mask"), causal=True, window=None)
    kv_up = weight_of(layer.kv_b_proj, hidden.new_empty(0, layer.kv_lora_rank))
    mask = hidden.new_ones(1, 1, 1, 1, dtype=torch.bool)
    kv_up = kv_up.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))
    options = {"attention_mask": mask, "kv_up": kv_up}
    return args, {**kwargs, **options, MASK_IS_CHOICE: KEYS if hasattr(layer, MAKES_MASK) else None}


def _keep_latents(layer: Any, latents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: key and value as `sp.attention` takes latents."""
    return shared, read_by_all_heads(layer.kv_b_proj, latents)


def _keep_choice(topk_indices: Tensor, **_: Any) -> Tensor:
    """In place of what makes a mask of the chosen keys."""
    return topk_indices


@eager
@torch.no_grad()
def _choose(
    attention: Attention, choice: Choice, indexer: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """In place of an indexer's forward, with its arguments: (b, s, g, t) int32, the positions of
    the keys that this rank's rows see; -1 = none."""
    forward = MethodType(type(indexer).forward, indexer)
    call = dict(signature(forward).bind(*args, **kwargs).arguments)
    call.pop("attention_mask", None)
    recorded = {name: Recorded(module) for name, module in indexer.named_children()}
    indexer = copy(indexer)
    vars(indexer)["_modules"] = recorded
    batch, length, _ = call["hidden_states"].shape
    own = Keys(call["hidden_states"].device)
    choice(indexer, call, own, torch.zeros(length, dtype=torch.long, device=own.device))
    borders = attention.documents.borders(type(indexer).__name__)
    keys = attention.sp.unshard(own.own, cu_seqlens=borders)
    positions = attention.sp.positions(keys.shape[1], keys.device, borders)
    heads = getattr(indexer, "n_heads", None) or indexer.num_heads
    pool = getattr(indexer, "index_kpool", 1)
    found = [(positions[:0], 0, positions.new_empty(batch, 0, 1, 0))]
    for start, stop in pairwise(borders or (0, keys.shape[1])):
        rows = ((positions >= start) & (positions < stop)).nonzero().flatten()
        size = max(1, SCORES_OF_BLOCK * pool // (batch * heads * (stop - start)))
        for block in rows.split(size) if len(rows) else ():
            for module in recorded.values():
                module.rows = block
            of_block = {name: _rows(value, block) for name, value in call.items()}
            document = Keys(keys.device, keys[:, start:stop])
            best = choice(indexer, of_block, document, positions[block] - start)
            found.append((block, start, best))
    shape = max(best.shape[2] for _, _, best in found), max(best.shape[3] for _, _, best in found)
    chosen = positions.new_full((batch, length, *shape), -1, dtype=torch.int32)
    for block, start, best in found:
        chosen[:, block, :, : best.shape[3]] = torch.where(best < 0, -1, best + start).int()
    return chosen


def _rows(value: Any, rows: Tensor) -> Any:
    """The rows of a tensor (b, s, ...), of positions (..., b, s), or of each of a tuple of tensors;
    other values as is."""
    if isinstance(value, tuple):
        return tuple(_rows(x, rows) for x in value)
    if isinstance(value, Tensor):
        return value[:, rows] if value.is_floating_point() else value[..., rows]
    return value
