"""Generation over ranks: `generate` with a cache whose keys and values lie on all ranks.

The prompt is cut over the ranks and runs as in training. From then on every rank computes all new
tokens, and their attention covers the keys of all ranks (`wf_backends.decode`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from wf_backends import SequenceParallel
from wf_backends.decode import KeyValueCache
from wf_backends.runtime import gather_shards
from wf_backends.schedule import intersect, make_layout, size
from wf_transformers.batch import forward_kwargs, is_causal
from wf_transformers.calls import (
    CACHES,
    LOGITS_TO_KEEP,
    MEDIA,
    by_name,
    parameter_names,
    refuse_partial_states,
    tokens_of,
)
from wf_transformers.families.mixing import mixers_in
from wf_transformers.families.stacks import stacks_of
from wf_transformers.handle import Handle
from wf_transformers.models import outermost
from wf_transformers.whole_batches.arguments import has_row_per_token

RECOMPUTED = ("attention_mask", "position_ids", "cache_position", "use_cache")
"""Arguments of the model that follow from the length of the cache here."""
SEED_ALIKE = "the ranks of a sequence draw the same tokens only if they are seeded alike"
CALLED_TWICE = "is called twice or not at all in a forward, and cannot generate over ranks"
OF_PROMPTS = ("causal", "dropout_p", "seqlen")  # options of attention that new tokens do not need
NOT_CACHED = ("kv_up", "position_bias")  # options of attention


class ShardedCache(DynamicCache):
    """transformers' cache of a model over the ranks of `sp`: each layer's `KeyValueCache`.

    Attributes:
        length: tokens of all ranks, before the running forward.
        new: tokens of the running forward.
        starts: for each sample the tokens of padding on its left.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        super().__init__()
        self.sp, self.length, self.new = sp, 0, 0
        self.starts: list[int] = []
        self.by_module: dict[nn.Module, KeyValueCache] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(layer.nbytes for layer in self.by_module.values())

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the new keys and values alone: `attention` adds them."""
        return key_states, value_states

    def keep(self, module: nn.Module, k: Tensor, v: Tensor, **options: Any) -> None:
        """Keep this rank's rows of a prompt, for a layer whose call has these options.

        Args:
            k, v: (b, s, g, d).

        Raises:
            NotImplementedError: for layers that are not causal, and options that are not cached.
        """
        name, lacking = type(module).__name__, [name for name in NOT_CACHED if name in options]
        if lacking or not options.get("causal"):
            what = ", ".join(lacking) or "a mask other than a causal one"
            raise NotImplementedError(f"{name} asks for {what}, which generation over ranks lacks")
        if module in self.by_module:
            raise NotImplementedError(f"{name} {CALLED_TWICE}")
        layer = self.by_module[module] = KeyValueCache(self.sp)
        layer.keep(k, v, self.new)

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Exact attention of a layer's new tokens over all tokens so far.

        Args:
            q: (b, n, h, d), k, v: (b, n, g, d).
            options: those of `SequenceParallel.attention` in a forward of the model.
        """
        own = {name: x for name, x in options.items() if name not in OF_PROMPTS}
        return self.by_module[module].attention(q, k, v, **own, starts=self.starts)

    def end_forward(self) -> None:
        """Count the new tokens.

        Raises:
            NotImplementedError: if not every layer has them once.
        """
        expected = self.length + self.new
        lengths = {layer.length for layer in self.by_module.values()}
        if lengths != {expected}:
            raise NotImplementedError(
                f"after {expected} tokens layers have {sorted(lengths)}: a layer {CALLED_TWICE}"
            )
        self.length = expected

    @property
    def is_linear(self) -> list[bool]:
        """transformers 5 asks whether layers are linear attention, by layer: none is."""
        return [False]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.starts = [self.starts[i] for i in beam_idx.tolist()]
        for layer in self.by_module.values():
            layer.take_samples(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.starts = [start for start in self.starts for _ in range(repeats)]
        for layer in self.by_module.values():
            layer.repeat_samples(repeats)

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens; if it is not positive, drop so many at the end."""
        self.length = min(self.length, max_length + (self.length if max_length <= 0 else 0))
        for layer in self.by_module.values():
            layer.crop(self.length)


def generate(
    model: Any,
    handle: Handle,
    inputs: Tensor,
    cache: ShardedCache | None = None,
    **options: Any,
) -> Any:
    """`model.generate(inputs, **options)` with keys and values on all ranks of a sequence.

    Args:
        model: attached by `handle`, in evaluation mode.
        inputs: ids (b, S), the same on every rank of a sequence. Padding on the left is hidden by
            attention_mask= (b, S), as for transformers.
        cache: that of an earlier call, whose tokens `inputs` begin with; None = a new one.
        options: as those of transformers' `generate`. To sample, seed the ranks alike.

    Returns:
        What transformers' `generate` returns, the same on every rank.

    Raises:
        ValueError: for a model in training mode or that takes whole batches, for inputs or drawn
            tokens that differ between ranks, and for options that cannot be right on several ranks.
        NotImplementedError: for padding on the right, and models other than decoders of attention
            alone.
    """
    _refuse_model(model, handle)
    _refuse_options(options)
    cache = ShardedCache(handle.sp) if cache is None else cache
    (pretrained,) = outermost(model)
    key = next(name for name in reversed(CACHES) if name in parameter_names(pretrained))
    caching = {key: cache, "cache_implementation": None, "use_cache": True}
    with _Forwards(pretrained, handle, cache, key).hooked():
        output = model.generate(inputs, **options | caching)
        _check_same(handle, output if isinstance(output, Tensor) else output.sequences)
    return output


def _refuse_model(model: Any, handle: Handle) -> None:
    name = type(model).__name__
    if handle.whole_batches:
        raise ValueError(
            f"{name} takes whole batches for training: generate with a model that "
            "wf_transformers.attach alone has attached"
        )
    if model.training:
        raise ValueError(f"{name} is in training mode, with dropout: call model.eval() first")
    models = outermost(model)
    mixes = len(models) != 1 or stacks_of(models[0]) or mixers_in(models[0])
    if mixes or not is_causal(model):
        raise NotImplementedError(
            f"{name} cannot generate over ranks: only decoders whose tokens meet in causal "
            "attention alone can; generate on one process, with a model that is not attached"
        )


def _refuse_options(options: Mapping[str, Any]) -> None:
    config = options.get("generation_config")
    given = {**(config.to_dict() if config is not None else {}), **options}
    reasons = {
        "max_time": "ranks would stop at different tokens; give max_new_tokens",
        "cache_implementation": "the cache is the one over ranks; leave it out",
        **dict.fromkeys(CACHES, "give it as cache=, and a ShardedCache"),
        **dict.fromkeys(MEDIA, "generation over ranks takes tokens only"),
    }
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise ValueError(f"{name}={given[name]!r}: {reason}")
    if given.get("use_cache") is False:
        raise ValueError("use_cache=False: generation over ranks needs its cache; leave it out")


def _check_same(handle: Handle, tokens: Tensor) -> None:
    """Raise a ValueError on every rank if the ranks of a sequence have other tokens."""
    try:
        handle.sp.check_same({"tokens": tokens})
    except ValueError as error:
        error.add_note(SEED_ALIKE)
        raise


def _starts(mask: Any, num_samples: int) -> list[int]:
    """For each sample the tokens of padding on the left, by an attention_mask (b, S) or None.

    Raises:
        NotImplementedError: for a mask that hides anything else.
    """
    if mask is None:
        return [0] * num_samples
    is_padding = isinstance(mask, Tensor) and mask.dim() == 2
    if not is_padding or not bool(((mask[:, 1:] != 0) >= (mask[:, :-1] != 0)).all()):
        raise NotImplementedError(
            f"attention_mask {tuple(mask.shape)} hides more than padding on the left, which "
            "generation over ranks lacks"
        )
    return (mask == 0).sum(dim=1).tolist()


class _Forwards:
    """Hooks around the forwards of one generation.

    Args:
        model: a Hugging Face model that `handle` has attached.
        key: the parameter of the model that takes the cache.
    """

    def __init__(self, model: Any, handle: Handle, cache: ShardedCache, key: str) -> None:
        self.model, self.handle, self.cache, self.key = model, handle, cache, key
        self.names = parameter_names(model)
        self.kept_logits = 0  # of the running forward over a prompt

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = (
            self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        )
        attention = self.handle.attention
        attention.cache = self.cache
        try:
            yield
        finally:
            attention.cache = None
            for hook in hooks:
                hook.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        arguments, cache = by_name(self.names, args, kwargs), self.cache
        refuse_partial_states(model, arguments)
        tokens = tokens_of(arguments)
        assert tokens is not None, "generate calls the model with tokens"
        cache.new = tokens.shape[1]
        stop = cache.length + cache.new
        if cache.length == 0:
            cache.starts = _starts(arguments.get("attention_mask"), len(tokens))
        _check_same(self.handle, tokens)
        first = torch.tensor(cache.starts, device=tokens.device)[:, None]
        positions = torch.arange(cache.length, stop, device=tokens.device) - first
        arguments = {name: x for name, x in arguments.items() if name not in RECOMPUTED}
        rows: dict[str, Any] = {
            k: x for k, x in arguments.items() if has_row_per_token(k, x, cache.new)
        }
        rows["position_ids"] = positions.clamp(min=0)
        if cache.length == 0:
            rows = {name: self.handle.sp.shard(x) for name, x in rows.items()}
            arguments |= self._logits_to_keep(arguments)
            if any(cache.starts):  # padding is a document of its own
                rows["cu_seqlens"] = tuple((0, x, stop) if x else (0, stop) for x in cache.starts)
        ours = forward_kwargs(model, rows) | {"use_cache": True, self.key: cache}
        return (), arguments | ours

    def _logits_to_keep(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The argument for this rank's rows among the last tokens whose logits are wanted."""
        name = next((name for name in LOGITS_TO_KEEP if name in self.names), None)
        wanted = arguments.get(name) or 0 if name else 0
        if not isinstance(wanted, int):
            raise NotImplementedError(f"{name} must be a number of tokens over ranks")
        self.kept_logits = min(wanted, self.cache.new) or self.cache.new
        return {name: max(1, size(self._last_tokens()[self.handle.sp.rank]))} if name else {}

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
