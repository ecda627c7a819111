"""The supported transformers of diffusers.

Cross attention is left alone: its text stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diffusers.models.transformers import transformer_qwenimage, transformer_skyreels_v2
from torch import nn

from wf_diffusers.cuts import Family, cut
from wf_diffusers.refused import why_not

CONTROL = "controlnet_block_samples"
TEXT = "encoder_hidden_states"
JOINT = cut("transformer_blocks.0", TEXT, "hidden_states")
IMAGE = cut("transformer_blocks.0", "hidden_states")
PIXART = Family(attention=("transformer_blocks.*.attn1",), cuts=(IMAGE,))
LTX = replace(
    PIXART,
    cuts=(
        cut("", "timestep", dims=(1,), ndim=2),
        IMAGE,
        cut("transformer_blocks.*", "image_rotary_emb"),
    ),
)
FLUX_IMAGE = f"hidden_states img_ids {CONTROL} controlnet_single_block_samples"
FLUX = Family(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    cuts=(cut("", f"{TEXT} txt_ids", FLUX_IMAGE),),
    allows_empty_stream=True,
)
WAN = Family(
    attention=("blocks.*.attn1",),
    cuts=(
        cut("", "timestep", dims=(1,), ndim=2),
        cut("blocks.0", "hidden_states"),
        cut("blocks.*", "rotary_emb", dims=(1,)),
    ),
)
SD3 = Family(
    attention=("transformer_blocks.*.attn", "transformer_blocks.*.attn2"),
    cuts=(cut("", TEXT, "block_controlnet_hidden_states", kept=TEXT), JOINT),
    last_stream_attends_alone=True,
)
HUNYUAN = Family(
    attention=FLUX.attention,
    cuts=(
        JOINT,
        *(
            cut(f"{blocks}.*", rotary, joint_mask="attention_mask")
            for blocks in ("transformer_blocks", "single_transformer_blocks")
            for rotary in ("image_rotary_emb", "freqs_cis")
        ),
    ),
    text_masks=(("encoder_attention_mask", TEXT),),
    refused_config=("image_condition_type", "token_replace"),
)
SECOND_TEXT = ("encoder_attention_mask_2", f"{TEXT}_2")
COGVIEW = Family(
    attention=PIXART.attention,
    cuts=(JOINT, cut("transformer_blocks.*", "image_rotary_emb")),
    refused=(("attention_mask", "a mask of the text"),),
    last_stream_attends_alone=True,
)
SKYREELS_ROTARY = 1 if hasattr(transformer_skyreels_v2, "SkyReelsV2AttnProcessor") else 2
"""The dimension of positions: after the heads before diffusers 0.36."""
QWEN_MASKS = (("encoder_hidden_states_mask", TEXT),)
if not hasattr(transformer_qwenimage, "compute_text_seq_len_from_mask"):
    QWEN_MASKS = ()  # diffusers 0.35 attends to the padding
FAMILIES: Mapping[str, Family] = {
    "AllegroTransformer3DModel": replace(
        PIXART,
        cuts=(IMAGE, cut("transformer_blocks.*", "image_rotary_emb.1", dims=(-1,))),
        refused=(("attention_mask", "a mask of the video"),),
    ),
    "AuraFlowTransformer2DModel": Family(
        attention=("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        cuts=(replace(JOINT, module="joint_transformer_blocks.0"),),
    ),
    "BriaTransformer2DModel": FLUX,
    "ChromaTransformer2DModel": replace(
        FLUX, refused=(("attention_mask", "a mask of text and image in one"),)
    ),
    "ChronoEditTransformer3DModel": WAN,
    "CogVideoXTransformer3DModel": replace(
        PIXART, cuts=(cut("", TEXT, "image_rotary_emb", kept=TEXT), JOINT)
    ),
    "CogView3PlusTransformer2DModel": replace(PIXART, cuts=(JOINT,)),
    "CogView4Transformer2DModel": COGVIEW,
    "CosmosTransformer3DModel": replace(
        PIXART,
        cuts=(
            IMAGE,
            cut("transformer_blocks.*", "image_rotary_emb"),
            cut("transformer_blocks.*", "extra_pos_emb"),
            cut("transformer_blocks.*", "controlnet_residual"),
            cut("transformer_blocks.*", "temb embedded_timestep", ndim=3),
            cut("norm_out", "temb embedded_timestep", ndim=3),
        ),
    ),
    "DiTTransformer2DModel": replace(PIXART, gathered="proj_out_2"),
    "EasyAnimateTransformer3DModel": COGVIEW,
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": replace(
        FLUX, refused=(("kv_cache_mode", "keys of reference images, which are kept whole"),)
    ),
    "GlmImageTransformer2DModel": replace(
        COGVIEW,
        refused=(*COGVIEW.refused, ("kv_caches", "keys of other images, which are kept whole")),
    ),
    "HunyuanDiT2DModel": replace(
        PIXART,
        attention=WAN.attention,
        cuts=(cut("", f"image_rotary_emb {CONTROL}"), replace(IMAGE, module="blocks.0")),
    ),
    "HunyuanImageTransformer2DModel": replace(
        HUNYUAN, text_masks=(*HUNYUAN.text_masks, SECOND_TEXT)
    ),
    "HunyuanVideoTransformer3DModel": HUNYUAN,
    "HunyuanVideoFramepackTransformer3DModel": replace(
        HUNYUAN,
        cuts=(JOINT, *(replace(x, joint_mask="") for x in HUNYUAN.cuts[1:])),
        gathered="single_transformer_blocks.-1",  # then the history is taken off
        shared=("indices_latents",),
        masks_are_true=True,
        last_stream_attends_alone=True,
    ),
    "HunyuanVideo15Transformer3DModel": Family(
        attention=("transformer_blocks.*.attn",),
        cuts=(JOINT, cut("transformer_blocks.*", "attention_mask", "freqs_cis", dims=(1, -2))),
        text_masks=(*HUNYUAN.text_masks, SECOND_TEXT, ("image_embeds", "image_embeds")),
        masks_are_true=True,
    ),
    "Kandinsky5Transformer3DModel": Family(
        attention=("visual_transformer_blocks.*.self_attention",),
        cuts=(
            cut("visual_transformer_blocks.0", "visual_embed"),
            cut("visual_transformer_blocks.*", "rope", dims=(1,)),
        ),
        gathered="visual_transformer_blocks.-1",
        refused=(("sparse_params", "a mask that follows from the values of tokens"),),
    ),
    "LongCatImageTransformer2DModel": FLUX,
    "LTXVideoTransformer3DModel": LTX,
    "LTX2VideoTransformer3DModel": replace(
        LTX,
        cuts=(
            *LTX.cuts[:2],
            cut("transformer_blocks.*", "video_rotary_emb"),
            cut("transformer_blocks.*.audio_to_video_attn", "query_rotary_emb"),
        ),
        gathered_inside=(  # the audio is whole on every rank
            "transformer_blocks.*.video_to_audio_attn.to_k",
            "transformer_blocks.*.video_to_audio_attn.to_v",
        ),
        refused=(("video_self_attention_mask", "a mask of the video"),),
    ),
    "Lumina2Transformer2DModel": Family(
        attention=("layers.*.attn",),
        cuts=(cut("layers.0", "hidden_states"), cut("layers.*", "image_rotary_emb")),
        gathered="norm_out",
        text_masks=(("encoder_attention_mask", TEXT),),
    ),
    "MochiTransformer3DModel": replace(
        PIXART,
        cuts=(
            JOINT,
            cut("transformer_blocks.*", "encoder_attention_mask", "image_rotary_emb", dims=(1, -3)),
        ),
        text_masks=(("encoder_attention_mask", TEXT),),
    ),
    "OvisImageTransformer2DModel": FLUX,
    "PixArtTransformer2DModel": PIXART,
    "PRXTransformer2DModel": Family(
        attention=("blocks.*.attention",),
        cuts=(
            cut("blocks.0", "hidden_states"),
            cut("blocks.*", f"{TEXT} attention_mask", "image_rotary_emb", dims=(1, 2)),
        ),
        gathered="final_layer",
        text_masks=(("attention_mask", TEXT),),
        masks_are_true=True,
        last_stream_attends_alone=True,
    ),
    "QwenImageTransformer2DModel": Family(
        attention=("transformer_blocks.*.attn",),
        cuts=(
            cut("", TEXT, CONTROL, kept=TEXT),
            JOINT,
            cut("transformer_blocks.*", "image_rotary_emb.1", "image_rotary_emb.0"),
            cut("transformer_blocks.*", "modulate_index", dims=(1,), reuses_layout=True),
        ),
        text_masks=QWEN_MASKS,
        lists=("img_shapes", "txt_seq_lens"),
        masks_are_true=True,
    ),
    "SD3Transformer2DModel": SD3,
    "SkyReelsV2Transformer3DModel": replace(
        WAN,
        cuts=(
            WAN.cuts[1],
            replace(WAN.cuts[2], dims=(SKYREELS_ROTARY,)),
            cut("blocks.*", "temb", ndim=4),
        ),
        gathered="norm_out",  # modulated afterwards, by the timesteps of all tokens
    ),
    "WanTransformer3DModel": WAN,
    "WanAnimateTransformer3DModel": replace(
        WAN,
        cuts=WAN.cuts[1:],
        whole=("face_adapter.*",),  # every frame attends to its own face
    ),
    "WanVACETransformer3DModel": replace(
        WAN,
        attention=("blocks.*.attn1", "vace_blocks.*.attn1"),
        cuts=(
            *WAN.cuts[1:],
            cut("vace_blocks.*", "hidden_states"),
            cut("vace_blocks.0", "control_hidden_states"),
            cut("vace_blocks.*", "rotary_emb", dims=(1,)),
        ),
    ),
    "ZImageTransformer2DModel": Family(
        attention=("layers.*.attention",),
        cuts=(cut("", CONTROL), cut("layers.0", "x"), cut("layers.*", "freqs_cis")),
        gathered="all_final_layer.*",
        lists=("x", "cap_feats"),
        refused=(
            ("siglip_feats", "features of images beside the text"),
            ("image_noise_mask", "a noise level for each token"),
        ),
    ),
}


def family_of(model: nn.Module) -> Family:
    """Return the family of a model: that of its class, or of the first base class with one."""
    for base in type(model).__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
            return FAMILIES[base.__name__]
    raise NotImplementedError(why_not(model, sorted(FAMILIES)))
