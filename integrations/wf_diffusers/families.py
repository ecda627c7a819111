"""The supported transformers of diffusers: where their tokens are cut, and which modules attend.

Cross attention is left alone: its text stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments of a module of which a rank keeps only its rows, before the module runs."""

    module: str
    """Path of the module in the model; "*" stands for any index, "" for the model itself."""
    streams: tuple[tuple[str, ...], ...]
    """For each stream (text, image): the arguments that hold its rows. Streams are in the order in
    which attention concatenates them. "name.1" is the second item of a tuple. None is skipped."""
    dim: int = -2
    """The dimension of the rows."""
    reuses_layout: bool = False
    """Whether its only stream is the last stream of the previous cut, and gets the same layout."""
    kept: str = ""
    """An argument that only tells how long its stream is: it stays whole."""
    joint_mask: str = ""
    """A mask of text and image in one, (..., tokens of both): it tells how long a stream of text
    before `streams` is. It is true everywhere (`Family.text_masks`), and taken out."""
    may_be_absent: bool = False
    """Whether the argument may be the same for all tokens: of one row, or without `dim`."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one class of models is split over ranks."""

    attention: tuple[str, ...]
    """Paths of the self-attention modules, in which every token attends to every token."""
    cuts: tuple[Cut, ...]
    gathered: str
    """Path of the module whose output is gathered: the rows of the last stream, (b, s, width), from
    which the model makes its sample."""
    refused: tuple[tuple[str, str], ...] = ()
    """(name, description) of arguments of the model that cannot be cut."""
    text_masks: tuple[tuple[str, str], ...] = ()
    """(mask, text) arguments of the model: padding at the end of a text is taken off."""
    refused_config: tuple[str, Any] = ("", None)
    """(name, value) of a setting of the model that is not supported."""
    last_stream_attends_alone: bool = False
    """Whether some modules attend over the last stream alone: it has a layout of its own length."""
    allows_empty_stream: bool = False
    """Whether its blocks run without tokens of a stream: a rank may get none of a short text."""


CONTROL = "residuals of a ControlNet, which would have to be cut"
KWARGS = "arguments of attention, such as an IP-Adapter's"
TEXT = "encoder_hidden_states"
JOINT = Cut("transformer_blocks.0", ((TEXT,), ("hidden_states",)))
IMAGE = Cut("transformer_blocks.0", (("hidden_states",),))
PIXART = Family(attention=("transformer_blocks.*.attn1",), cuts=(IMAGE,), gathered="proj_out")
FLUX = Family(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    cuts=(Cut("", ((TEXT, "txt_ids"), ("hidden_states", "img_ids"))),),
    gathered="proj_out",
    refused=(
        ("controlnet_block_samples", CONTROL),
        ("controlnet_single_block_samples", CONTROL),
        ("joint_attention_kwargs", KWARGS),
    ),
    allows_empty_stream=True,
)
WAN = Family(
    attention=("blocks.*.attn1",),
    cuts=(
        Cut("", (("timestep",),), dim=1, may_be_absent=True),
        Cut("blocks.0", (("hidden_states",),)),
        Cut("blocks.*", (("rotary_emb",),), dim=1),
    ),
    gathered="proj_out",
)
SD3 = Family(
    attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    cuts=(JOINT,),
    gathered="proj_out",
    refused=(("block_controlnet_hidden_states", CONTROL), ("joint_attention_kwargs", KWARGS)),
    last_stream_attends_alone=True,
)
HUNYUAN = Family(
    attention=FLUX.attention,
    cuts=(
        JOINT,
        *(
            Cut(f"{blocks}.*", ((rotary,),), joint_mask="attention_mask")
            for blocks in ("transformer_blocks", "single_transformer_blocks")
            for rotary in ("image_rotary_emb", "freqs_cis")
        ),
    ),
    gathered="proj_out",
    text_masks=(("encoder_attention_mask", TEXT),),
    refused_config=("image_condition_type", "token_replace"),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "AuraFlowTransformer2DModel": replace(
            SD3,
            attention=("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            cuts=(replace(JOINT, module="joint_transformer_blocks.0"),),
            refused=(("attention_kwargs", KWARGS),),
            last_stream_attends_alone=False,
        ),
        "ChromaTransformer2DModel": replace(
            FLUX, refused=(*FLUX.refused, ("attention_mask", "a mask of text and image in one"))
        ),
        "CogVideoXTransformer3DModel": replace(
            PIXART,
            cuts=(Cut("", ((TEXT,), ("image_rotary_emb",)), kept=TEXT), JOINT),
            refused=(("attention_kwargs", KWARGS),),
        ),
        "DiTTransformer2DModel": replace(PIXART, gathered="proj_out_2"),
        "FluxTransformer2DModel": FLUX,
        "Flux2Transformer2DModel": replace(
            FLUX,
            refused=(
                ("joint_attention_kwargs", KWARGS),
                ("kv_cache_mode", "keys of reference images, which are kept whole"),
            ),
        ),
        "HunyuanImageTransformer2DModel": replace(
            HUNYUAN,
            text_masks=(
                ("encoder_attention_mask", TEXT),
                ("encoder_attention_mask_2", f"{TEXT}_2"),
            ),
        ),
        "HunyuanVideoTransformer3DModel": HUNYUAN,
        "LTXVideoTransformer3DModel": replace(
            PIXART,
            cuts=(
                Cut("", (("timestep",),), dim=1, may_be_absent=True),
                IMAGE,
                Cut("transformer_blocks.*", (("image_rotary_emb",),)),
            ),
        ),
        "PixArtTransformer2DModel": PIXART,
        "QwenImageTransformer2DModel": Family(
            attention=("transformer_blocks.*.attn",),
            cuts=(
                JOINT,
                Cut("transformer_blocks.*", (("image_rotary_emb.1",), ("image_rotary_emb.0",))),
                Cut("transformer_blocks.*", (("modulate_index",),), dim=1, reuses_layout=True),
            ),
            gathered="proj_out",
            refused=(("controlnet_block_samples", CONTROL), ("attention_kwargs", KWARGS)),
        ),
        "SD3Transformer2DModel": SD3,
        "WanTransformer3DModel": WAN,
        "WanVACETransformer3DModel": replace(
            WAN,
            attention=("blocks.*.attn1", "vace_blocks.*.attn1"),
            cuts=(
                *WAN.cuts[1:],
                Cut("vace_blocks.*", (("hidden_states",),)),
                Cut("vace_blocks.0", (("control_hidden_states",),)),
                Cut("vace_blocks.*", (("rotary_emb",),), dim=1),
            ),
        ),
        "ZImageTransformer2DModel": Family(
            attention=("layers.*.attention",),
            cuts=(Cut("layers.0", (("x",),)), Cut("layers.*", (("freqs_cis",),))),
            gathered="all_final_layer.*",
            refused=(
                ("controlnet_block_samples", CONTROL),
                ("siglip_feats", "features of images beside the text"),
                ("image_noise_mask", "a noise level for each token"),
            ),
        ),
    }
)


def family_of(model: nn.Module) -> Family:
    """Return the family of a model: that of its class, or of the first base class with one.

    Raises:
        NotImplementedError: if there is none.
    """
    for base in type(model).__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
            return FAMILIES[base.__name__]
    raise NotImplementedError(
        f"{type(model).__name__} is none of the models of diffusers that WallFacer supports: "
        f"{', '.join(sorted(FAMILIES))}"
    )


def find_modules(model: nn.Module, path: str) -> list[Any]:
    """Return the modules at `path`; "*" stands for any index, "" for the model itself."""
    pattern = path.split(".")

    def matches(name: str) -> bool:
        parts = name.split(".")
        if len(parts) != len(pattern):
            return False
        return all(p in (part, "*") for p, part in zip(pattern, parts, strict=True))

    return [module for name, module in model.named_modules() if matches(name)]
