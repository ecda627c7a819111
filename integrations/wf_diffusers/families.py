"""The transformers of diffusers that are spread: where their tokens are cut, and what attends.

Text that is attended to by cross attention stays whole on every rank, and so does its attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments of a module that are cut before it runs."""

    module: str
    """A path in the model; "*" stands for every number, "" for the model."""
    streams: tuple[tuple[str, ...], ...]
    """Arguments of the module, by the stream whose rows they have, in the order in which attention
    joins the streams; "name.1" is the second of a tuple. What is None is left alone."""
    dim: int = -2
    """Where the rows are."""
    follows: bool = False
    """Whether the only stream here is the last one of the cut before, and is cut as it was."""


@dataclass(frozen=True, slots=True)
class Family:
    """One class of models."""

    attention: tuple[str, ...]
    """The self attention of all tokens."""
    cuts: tuple[Cut, ...]
    last: str
    """Gives the rows of the last stream, (b, s, width), from which the model makes its sample."""
    refused: tuple[tuple[str, str], ...] = ()
    """Arguments of the model that cannot be cut, and what they are."""
    takes_none: bool = False
    """Whether its blocks take a stream without tokens, as a rank may have of short text."""


CONTROL = "residuals of a ControlNet, which would have to be cut"
KWARGS = "arguments of attention, such as an IP-Adapter's"
JOINT = Cut("transformer_blocks.0", (("encoder_hidden_states",), ("hidden_states",)))
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "CogVideoXTransformer3DModel": Family(
            attention=("transformer_blocks.*.attn1",),
            cuts=(JOINT, Cut("transformer_blocks.*", (("image_rotary_emb",),), follows=True)),
            last="proj_out",
            refused=(("attention_kwargs", KWARGS),),
        ),
        "DiTTransformer2DModel": Family(
            attention=("transformer_blocks.*.attn1",),
            cuts=(Cut("transformer_blocks.0", (("hidden_states",),)),),
            last="proj_out_2",
        ),
        "FluxTransformer2DModel": Family(
            attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            cuts=(Cut("", (("encoder_hidden_states", "txt_ids"), ("hidden_states", "img_ids"))),),
            last="proj_out",
            refused=(
                ("controlnet_block_samples", CONTROL),
                ("controlnet_single_block_samples", CONTROL),
                ("joint_attention_kwargs", KWARGS),
            ),
            takes_none=True,
        ),
        "Flux2Transformer2DModel": Family(
            attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            cuts=(Cut("", (("encoder_hidden_states", "txt_ids"), ("hidden_states", "img_ids"))),),
            last="proj_out",
            refused=(
                ("joint_attention_kwargs", KWARGS),
                ("kv_cache_mode", "keys of reference images, which are kept whole"),
            ),
            takes_none=True,
        ),
        "LTXVideoTransformer3DModel": Family(
            attention=("transformer_blocks.*.attn1",),
            cuts=(
                Cut("transformer_blocks.0", (("hidden_states",),)),
                Cut("transformer_blocks.*", (("image_rotary_emb",),)),
            ),
            last="proj_out",
        ),
        "PixArtTransformer2DModel": Family(
            attention=("transformer_blocks.*.attn1",),
            cuts=(Cut("transformer_blocks.0", (("hidden_states",),)),),
            last="proj_out",
        ),
        "QwenImageTransformer2DModel": Family(
            attention=("transformer_blocks.*.attn",),
            cuts=(
                JOINT,
                Cut("transformer_blocks.*", (("image_rotary_emb.1",), ("image_rotary_emb.0",))),
                Cut("transformer_blocks.*", (("modulate_index",),), dim=1, follows=True),
            ),
            last="proj_out",
            refused=(("controlnet_block_samples", CONTROL), ("attention_kwargs", KWARGS)),
        ),
        "WanTransformer3DModel": Family(
            attention=("blocks.*.attn1",),
            cuts=(
                Cut("blocks.0", (("hidden_states",),)),
                Cut("blocks.*", (("rotary_emb",),), dim=1),
            ),
            last="proj_out",
        ),
    }
)


def family_of(model: nn.Module) -> Family:
    """The row of a model; a subclass counts as the class that it comes from.

    Raises:
        NotImplementedError: if there is none.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in FAMILIES and kind.__module__.startswith("diffusers."):
            return FAMILIES[kind.__name__]
    raise NotImplementedError(
        f"{type(model).__name__} is none of the models of diffusers that are spread: "
        f"{', '.join(sorted(FAMILIES))}"
    )


def find(model: nn.Module, path: str) -> list[Any]:
    """The modules at `path`; "*" stands for every number, "" for the model itself."""
    wanted = path.split(".")

    def fits(name: str) -> bool:
        parts = name.split(".")
        same = zip(wanted, parts, strict=False)
        return len(parts) == len(wanted) and all(w in (p, "*") for w, p in same)

    return [module for name, module in model.named_modules() if fits(name)]
