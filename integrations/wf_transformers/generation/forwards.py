"""The hooks around the forwards of one generation: the prompt is cut, new tokens are whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends.runtime import gather_shards
from wf_backends.schedule import intersect, make_layout, size
from wf_transformers.attention.masks import refuse_empty
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import (
    LOGITS_TO_KEEP,
    by_name,
    parameter_names,
    refuse_partial_states,
    required_tokens,
)
from wf_transformers.generation.cache import ShardedCache
from wf_transformers.generation.media import cut_with_media
from wf_transformers.handle import Handle
from wf_transformers.replace import set_until
from wf_transformers.whole_batches.arguments import has_row_per_token

RECOMPUTED = ("attention_mask", "position_ids", "cache_position", "use_cache", "mm_encoder_outputs")
"""Arguments of the model that follow from the length of the cache or the media here."""
SEED_ALIKE = "the ranks of a sequence draw the same tokens only if they are seeded alike"


class Forwards:
    """Hooks around the forwards of one generation.

    Args:
        model: a Hugging Face model that `handle` has attached.
        key: the parameter of the model that takes the cache.
        media: images and videos of the prompt, from `take_media`.
    """

    def __init__(
        self,
        model: Any,
        handle: Handle,
        cache: ShardedCache,
        key: str,
        num_samples: int,
        media: Mapping[str, Any],
    ) -> None:
        self.model, self.handle, self.cache, self.key = model, handle, cache, key
        self.num_samples, self.media = num_samples, media
        self.names = parameter_names(model)
        self.kept_logits = 0  # of the running forward over a prompt

    @contextmanager
    def hooked(self) -> Iterator[None]:
        model, options = self.model, {"prepend": True, "with_kwargs": True}
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._before, **options).remove)
            stack.callback(model.register_forward_hook(self._after).remove)
            set_until(stack, self.handle.attention, "cache", self.cache)
            yield

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        arguments, cache = by_name(self.names, args, kwargs), self.cache
        refuse_partial_states(model, arguments)
        tokens = required_tokens(arguments)
        if arguments.get(self.key) is None and self._begins_again(tokens.shape[1]):
            cache.crop(-cache.length)
        elif arguments.get(self.key) is not cache:
            raise NotImplementedError(
                f"{type(model).__name__} was called with another cache while it generates over "
                "ranks, as by guidance_scale, or by a logits processor or an assistant of the "
                "same model"
            )
        cache.new = tokens.shape[1]
        mask = arguments.get("attention_mask")
        starts = _starts(mask, len(tokens), cache.length + cache.new)
        if cache.length == 0:
            cache.starts, cache.behind, cache.first_text = starts, starts, 0
        _refuse_other_samples(cache.starts, starts)
        check_same(self.handle, tokens)
        behind = torch.tensor(cache.behind, device=tokens.device)[:, None]
        numbers = torch.arange(cache.length, cache.length + cache.new, device=tokens.device)
        arguments = {name: x for name, x in arguments.items() if name not in RECOMPUTED}
        rows: dict[str, Any] = {
            k: x for k, x in arguments.items() if has_row_per_token(k, x, cache.new)
        }
        rows["position_ids"] = (numbers - behind).clamp(min=0)
        if cache.length == 0:
            rows = self._cut_prompt(rows, mask)
            arguments |= self._logits_to_keep(arguments)
        ours = forward_kwargs(model, rows) | {"use_cache": True, self.key: cache}
        return (), arguments | ours

    def _begins_again(self, seqlen: int) -> bool:
        """Whether a model that drops its cache of all tokens so far may do so here: Phi-3 does,
        once, where its rotary frequencies change."""
        last = getattr(self.model.config, "original_max_position_embeddings", None)
        return last is not None and 0 < self.cache.length <= last < seqlen

    def _cut_prompt(self, rows: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        """This rank's part of a prompt, of which `rows` have a row for each token (b, S, ...)."""
        cache, sp = self.cache, self.handle.sp
        if self.media:
            repeats = len(cache.starts) // self.num_samples
            prompt = self.model, sp, rows, self.media, mask, repeats
            local, cache.behind, cache.first_text = cut_with_media(*prompt)
        else:
            local: dict[str, Any] = {name: sp.shard(x) for name, x in rows.items()}
        if any(cache.starts):  # padding is a document of its own
            stop = cache.new
            local["cu_seqlens"] = tuple((0, x, stop) if x else (0, stop) for x in cache.starts)
        return local

    def _logits_to_keep(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The argument for this rank's rows among the last tokens whose logits are wanted."""
        name = next((name for name in LOGITS_TO_KEEP if name in self.names), None)
        wanted = arguments.get(name) or 0 if name else 0
        if not isinstance(wanted, int):
            raise NotImplementedError(f"{name} must be a number of tokens over ranks")
        self.kept_logits = min(wanted, self.cache.new) or self.cache.new
        keep: Any = max(1, size(self._last_tokens()[self.handle.sp.rank]))
        if getattr(self.model.config.get_text_config(), "num_kv_shared_layers", 0):
            keep = torch.arange(-keep, 0)  # a number would leave out rows within Gemma 4's layers
        return {name: keep} if name else {}

    def _last_tokens(self) -> list[Any]:
        """The layout of the last tokens of the prompt, whose logits are wanted."""
        sp, seqlen = self.handle.sp, self.cache.new
        layout, first = make_layout(sp.config.layout, sp.size, seqlen), seqlen - self.kept_logits
        last = [intersect(ranges, ((first, seqlen),)) for ranges in layout]
        return [tuple((a - first, b - first) for a, b in ranges) for ranges in last]

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        is_prompt = self.cache.length == 0
        self.cache.end_forward()
        if not is_prompt:
            return None
        layout, comm = tuple(self._last_tokens()), self.handle.sp.comm
        rows = output["logits"].shape[1]
        local = output["logits"][:, rows - size(layout[comm.rank]) :]
        return type(output)(**{**output, "logits": gather_shards(comm, layout, 1, local, "logits")})


def _starts(mask: Any, num_samples: int, num_tokens: int) -> list[int]:
    """For each sample the tokens of padding on the left, by an attention_mask (b, S) or None."""
    if mask is None:
        return [0] * num_samples
    is_padding = isinstance(mask, Tensor) and mask.dim() == 2
    if is_padding and mask.shape != (num_samples, num_tokens):
        raise ValueError(
            f"attention_mask must be {(num_samples, num_tokens)}, for all tokens so far, got "
            f"{tuple(mask.shape)}"
        )
    if not is_padding or not bool(((mask[:, 1:] != 0) >= (mask[:, :-1] != 0)).all()):
        raise NotImplementedError(
            f"attention_mask {tuple(mask.shape)} hides more than padding on the left, which "
            "generation over ranks lacks; where none is given, transformers hides pad tokens"
        )
    starts = (mask == 0).sum(dim=1).tolist()
    refuse_empty([num_tokens - start for start in starts])
    return starts


def _refuse_other_samples(cached: list[int], starts: list[int]) -> None:
    """Raise a ValueError if a cache goes on with other samples, or with other padding."""
    if len(cached) != len(starts):
        raise ValueError(
            f"{len(starts)} samples for a cache of {len(cached)} (beams count): a conversation "
            "goes on with the samples that it has; take a new cache"
        )
    if any(starts) and cached != starts:
        raise ValueError(
            f"attention_mask hides {starts} tokens on the left of the samples, and the cache was "
            f"made with {cached} hidden: give the same, or take a new cache"
        )


def check_same(handle: Handle, tokens: Tensor) -> None:
    """Raise a ValueError on every rank if the ranks of a sequence have other tokens."""
    with handle.advising(SEED_ALIKE):
        handle.sp.check_same({"tokens": tokens})
