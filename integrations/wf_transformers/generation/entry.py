"""What a user calls: `generate` for a model that is attached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wf_transformers.batch import is_causal
from wf_transformers.calls import CACHES, parameter_names
from wf_transformers.families.compressors import COMPRESSED
from wf_transformers.families.indexers import CHOICES
from wf_transformers.families.media_counts import merging_model
from wf_transformers.families.mixing import mixers_in
from wf_transformers.families.stacks import stacks_of
from wf_transformers.generation.cache import ShardedCache
from wf_transformers.generation.forwards import Forwards, check_same
from wf_transformers.generation.media import take_media
from wf_transformers.generation.states import has_state
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, row_of

REPLACED = {"cache_implementation": None, "use_cache": True}
"""Options that do not matter where a checkpoint's generation config has them."""


def generate(
    model: Any, handle: Handle, inputs: Tensor, cache: ShardedCache | None = None, **options: Any
) -> Any:
    """`model.generate(inputs, **options)` with keys and values on all ranks of a sequence.

    Args:
        model: attached by `handle`, in evaluation mode.
        inputs: ids (b, S), the same on every rank of a sequence. Padding on the left is hidden by
            attention_mask= (b, S), as for transformers.
        cache: that of an earlier call, whose tokens `inputs` begin with; None = a new one.
        options: as those of transformers' `generate`, and what the model's processor gives with
            images or videos. To sample, seed the ranks alike.

    Returns:
        What transformers' `generate` returns, the same on every rank.

    Raises:
        ValueError: for a model in training mode or that takes whole batches, for inputs or drawn
            tokens that differ between ranks, for inputs that do not go on from the cache, and for
            options that cannot be right on several ranks.
        NotImplementedError: for padding on the right, models other than decoders, media of models
            that `shard_media` does not know, and media after the prompt.
    """
    _refuse_model(model, handle)
    _refuse_options(model, options)
    if not isinstance(inputs, Tensor) or inputs.dim() != 2:
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise ValueError(f"inputs must be ids (b, S), got {got}")
    (pretrained,) = outermost(model)
    media = take_media(pretrained, options)
    cache = ShardedCache(handle.sp) if cache is None else cache
    if cache.length and cache.length >= inputs.shape[1]:
        raise ValueError(
            f"inputs have {inputs.shape[1]} tokens, and the cache {cache.length}: they begin with "
            f"its tokens and go on; drop the others first, cache.crop({inputs.shape[1] - 1})"
        )
    if cache.length and media:
        raise NotImplementedError(
            f"{', '.join(media)} for a cache of {cache.length} tokens: images and videos belong to "
            "the prompt of a new cache; leave them out if the cache has all of their tokens"
        )
    key = next(name for name in reversed(CACHES) if name in parameter_names(pretrained))
    caching = REPLACED | {key: cache}
    with Forwards(pretrained, handle, cache, key, len(inputs), media).hooked():
        output = model.generate(inputs, **options | caching)
        check_same(handle, output if isinstance(output, Tensor) else output.sequences)
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
    if any(row_of({**CHOICES, **COMPRESSED}, layer) for layer in model.modules()):
        raise NotImplementedError(
            f"{name} chooses its keys by an indexer, beside generation: generate on one process, "
            "with a model that is not attached"
        )
    models = outermost(model)
    is_decoder = len(models) == 1 and not stacks_of(models[0])
    if is_decoder:
        is_decoder = is_causal(getattr(merging_model(models[0]), "language_model", model))
    has_states = all(has_state(x) and not row.has_own_cache for _, x, row in mixers_in(model))
    if not (is_decoder and has_states):
        raise NotImplementedError(
            f"{name} cannot generate over ranks: only decoders can, of causal attention and of "
            "recurrences whose states transformers' cache keeps (since 5.24); generate on one "
            "process, with a model that is not attached"
        )


def _refuse_options(model: Any, options: Mapping[str, Any]) -> None:
    configs = (getattr(model, "generation_config", None), options.get("generation_config"))
    of_model, own = ({} if x is None else x.to_dict() for x in configs)
    of_model = {name: x for name, x in of_model.items() if name not in REPLACED}
    given = {**of_model, **{name: x for name, x in own.items() if x is not None}, **options}
    reasons = {
        "max_time": "ranks would stop at different tokens; give max_new_tokens",
        "cache_implementation": "the cache is the one over ranks; leave it out",
        **dict.fromkeys(CACHES, "give it as cache=, and a ShardedCache"),
        "assistant_early_exit": "its drafts leave out layers, whose cache then lacks tokens",
        "guidance_scale": "it runs a second prompt, whose cache would be on every rank",
        "penalty_alpha": "contrastive search needs the hidden states of all tokens",
        "dola_layers": "it needs the hidden states of all tokens",
        "prefill_chunk_size": "a prompt is cut over the ranks, not over time",
        "mm_encoder_outputs": "each rank encodes the images of its tokens; give pixels",
        "position_ids": "they follow from attention_mask and images; leave them out",
    }
    if given.get("guidance_scale") == 1:  # no guidance
        del given["guidance_scale"]
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise ValueError(f"{name}={given[name]!r}: {reason}")
    if given.get("use_cache") is False:
        raise ValueError("use_cache=False: generation over ranks needs its cache; leave it out")
