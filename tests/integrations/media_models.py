"""Tiny random models that take images, videos and sounds among tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as tf

from tests.integrations.families import (
    DOTS3,
    GEMMA4,
    GLM5_NEXT,
    INDEXED,
    MINIMAX_M3,
    MISTRAL_LARGE4,
    SHARED_CHOICE,
)
from tests.integrations.media_batches import (
    AUDIO,
    IMAGE,
    VIDEO,
    dots3_batch,
    gemma3_batch,
    gemma4_batch,
    got_ocr2_batch,
    hy_v4_vl_batch,
    idefics2_batch,
    idefics3_batch,
    lfm2_vl_batch,
    llama4_batch,
    llava_batch,
    llava_next_batch,
    mistral3_batch,
    next_video_batch,
    omni_batch,
    onevision_batch,
    paddleocr_vl_batch,
    paligemma_batch,
    pixtral_batch,
    qwen2_audio_batch,
    qwen_batch,
    voxtral_batch,
)
from tests.integrations.media_models_newest import NEWEST
from tests.integrations.media_parts import (
    EXPERTS,
    IMAGES_AND_VIDEOS,
    OF_4,
    OF_16,
    OMNI_AUDIO,
    OMNI_TOKENS,
    PATCHES,
    QWEN2_AUDIO,
    TEXT,
    TOKENS,
    WINDOWS,
    MediaModel,
    Part,
    rope,
    text,
)
from tests.integrations.mixer_models import DELTA
from tests.integrations.transformers_models import BUILD_LOCK, OF_5
from wf_transformers.families.media_table import BLOCKS_IN_WINDOWS

ROPE = "rope_parameters" if OF_5 else "rope_scaling"
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}

# encoders
QWEN2 = {k: x for k, x in PATCHES.items() if k != "hidden_size"}
QWEN2 |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
QWEN3 = {**PATCHES, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16}
DEEPSTACK = QWEN3 | {"deepstack_visual_indexes": [0]}
"""Its encoder gives features to several layers of the language model."""
GLM = {**PATCHES, "intermediate_size": 24, "image_size": 8, "out_hidden_size": 32}
SAM = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "mlp_dim": 24}
SAM |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 4, "window_size": 2}
SAM |= {"global_attn_indexes": [1]}
GEMMA4_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
GEMMA4_VISION |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pooling_kernel_size": 2}
GEMMA4_VISION |= {"patch_size": 2, "position_embedding_size": 16}
PERCEIVER = {"resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 2}
PERCEIVER |= {"resampler_head_dim": 8, "num_key_value_heads": 1, "hidden_size": 32}
VOXTRAL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
VOXTRAL |= {"num_hidden_layers": 2, "num_mel_bins": 3, "max_source_positions": 8}
GEMMA4_AUDIO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA4_AUDIO |= {"subsampling_conv_channels": [8, 4], "output_proj_dims": 16}
GEMMA4_AUDIO |= {"attention_chunk_size": 4, "attention_context_left": 3}
DOTS3_VISION = {**OF_16, "adapter_in_dim": 16, "adapter_out_dim": 32}
DOTS3_VISION |= {"pyramid_num_routed": [-1, 4], "moe_intermediate_size": 16}
DOTS3_AUDIO = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
DOTS3_AUDIO |= {"num_attention_heads": 2, "feature_size": 3, "hop_length": 2}
DOTS3_AUDIO |= {"downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 32}
PHI4_AUDIO = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "input_size": 16}
PHI4_AUDIO |= {"num_attention_heads": 2, "nemo_conv_channels": 8, "ext_pw_out_channel": 16}
PHI4_AUDIO |= {"depthwise_separable_out_channel": 16, "audio_token_id": AUDIO}
LLAMA, MISTRAL = Part("LlamaConfig", TEXT), Part("MistralConfig", TEXT)
COHERE2 = Part("Cohere2Config", {**TEXT, "sliding_window": 5})
CLIP_VISION = Part("CLIPVisionConfig", OF_4)
SIGLIP = Part("SiglipVisionConfig", {**OF_16, "vision_use_head": False})
LLAVA = {"text_config": LLAMA, "image_token_index": IMAGE, "vision_feature_layer": -1}
ANYRES = {**LLAVA, "vision_config": CLIP_VISION}
ANYRES |= {"image_grid_pinpoints": [[16, 16], [16, 8], [8, 8]]}
SHUFFLED = {"text_config": Part("LlamaConfig", {**TEXT, "pad_token_id": 0}), "scale_factor": 2}
SHUFFLED |= {"vision_config": OF_16, "image_token_id": IMAGE}
WINDOW = 3 if BLOCKS_IN_WINDOWS else 4  # an image has 4 tokens
GEMMA3 = {**TEXT, "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2}
GLM4V = {"pad_token_id": 0, ROPE: rope(1, 1, 2, partial_rotary_factor=1.0)}
GLM4V_EXPERTS = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
GLM4V_EXPERTS |= {"topk_group": 1, "head_dim": 8}


def glm(name: str, **more: Any) -> MediaModel:
    """Its videos have the tokens of images, and are refused."""
    sizes = {"text_config": {**TEXT, **GLM4V, **more}, "vision_config": GLM, **IMAGES_AND_VIDEOS}
    return MediaModel(name, sizes, has_experts=True)


def gemma4(bidirectional: str | None) -> MediaModel:
    """One token for 2 x 2 patches. Tokens of an image see each other in windows, if wanted."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {
        "text_config": {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": layers,
            "sliding_window": 3,
            "use_bidirectional_attention": bidirectional,
        },
        "vision_config": GEMMA4_VISION,
        "audio_config": GEMMA4_AUDIO,
        **IMAGES_AND_VIDEOS,
        "audio_token_id": AUDIO,
    }
    return MediaModel("Gemma4", sizes, gemma4_batch)


ALL_MODELS = NEWEST | {
    "qwen2_vl": MediaModel("Qwen2VL", {**TEXT, **MROPE, **TOKENS, "vision_config": QWEN2}),
    "qwen2_5_vl": MediaModel("Qwen2_5_VL", {**TEXT, **MROPE, **TOKENS, "vision_config": WINDOWS}),
    "llava": MediaModel("Llava", {**LLAVA, "vision_config": CLIP_VISION}, llava_batch),
    # an encoder of images of different sizes
    "pixtral": MediaModel(
        "Llava",
        {**LLAVA, "text_config": MISTRAL, "vision_config": Part("PixtralVisionConfig", OF_4)}
        | {"vision_feature_select_strategy": "full"},
        pixtral_batch,
    ),
    # the same, and one token for 2 x 2 patches
    "mistral3": MediaModel(
        "Mistral3",
        {**LLAVA, "text_config": MISTRAL, "vision_config": Part("PixtralVisionConfig", OF_16)}
        | {"spatial_merge_size": 2},
        mistral3_batch,
    ),
    "mistral_large4": MediaModel(
        "MistralLarge4",
        {**MISTRAL_LARGE4, "image_token_index": IMAGE}
        | {"vision_config": {"model_type": "pixtral", **OF_16}},
        mistral3_batch,
        has_experts=True,
    ),
    # tiles of an image of any size, and a token at the end of each row of patches
    "llava_next": MediaModel(
        "LlavaNext", {**ANYRES, "vision_feature_select_strategy": "default"}, llava_next_batch
    ),
    "llava_onevision": MediaModel(
        "LlavaOnevision",
        {**ANYRES, "video_token_index": VIDEO, "vision_feature_select_strategy": "full"},
        onevision_batch,
        changes={"vision_config": Part("SiglipVisionConfig", {**OF_4, "vision_use_head": False})},
    ),
    # one token for 2 x 2 patches; tokens of an image see each other, within windows
    "gemma3": MediaModel(
        "Gemma3",
        {
            "text_config": Part(
                "Gemma3TextConfig", {**GEMMA3, "_attn_implementation_internal": "eager"}
            ),
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
        gemma3_batch,
    ),
    # a token for 4 frames of a sound
    "qwen2_audio": MediaModel(
        "Qwen2Audio",
        {"text_config": text("qwen2"), "audio_config": QWEN2_AUDIO, "audio_token_index": IMAGE},
        qwen2_audio_batch,
    ),
    # one token for 2 x 2 patches of a tile
    "aya_vision": MediaModel(
        "AyaVision",
        {**LLAVA, "text_config": COHERE2, "vision_config": SIGLIP}
        | {"vision_feature_select_strategy": "full", "adapter_intermediate_size": 48},
        llava_batch,
    ),
    # one token for 2 x 2 patches, of images padded by sample
    "idefics3": MediaModel("Idefics3", SHUFFLED, idefics3_batch),
    "smolvlm": MediaModel("SmolVLM", SHUFFLED, idefics3_batch),
    # features of several layers of the encoder
    "vipllava": MediaModel(
        "VipLlava",
        {"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_index": IMAGE}
        | {"vision_feature_layers": [-1, 1]},
        llava_batch,
    ),
    "llava_next_video": MediaModel(
        "LlavaNextVideo",
        {**ANYRES, "image_seq_length": 4, "video_token_index": VIDEO, "spatial_pool_stride": 2}
        | {"vision_feature_select_strategy": "default"},
        next_video_batch,
    ),
    # one token for 4 x 4 patches of an image
    "got_ocr2": MediaModel(
        "GotOcr2",
        {"text_config": text("qwen2"), "vision_config": SAM, "image_token_index": IMAGE},
        got_ocr2_batch,
    ),
    # three tokens for an image of any size
    "idefics2": MediaModel(
        "Idefics2",
        {"text_config": text("mistral", sliding_window=None), "vision_config": OF_16}
        | {"perceiver_config": PERCEIVER, "image_token_id": IMAGE},
        idefics2_batch,
    ),
    "deepseek_vl": MediaModel(
        "DeepseekVL",
        {
            "text_config": text("llama"),
            "vision_config": {
                **OF_4,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_id": IMAGE,
        },
        llava_batch,
    ),
    "lighton_ocr": MediaModel(
        "LightOnOcr",
        {"text_config": text("qwen3", head_dim=8), "image_token_id": IMAGE}
        | {"vision_config": {"model_type": "pixtral", **OF_16}, "spatial_merge_size": 2},
        mistral3_batch,
    ),
    # its language model has convolutions, too
    "lfm2_vl": MediaModel(
        "Lfm2Vl",
        {
            "text_config": text(
                "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
            ),
            "vision_config": {
                **OF_16,
                "model_type": "siglip2_vision_model",
                "vision_use_head": False,
                "num_patches": 16,
            },
            "image_token_id": IMAGE,
            "projector_hidden_size": 16,
        },
        lfm2_vl_batch,
    ),
    "paddleocr_vl": MediaModel(
        "PaddleOCRVL",
        {
            "text_config": {**TEXT, "head_dim": 8, ROPE: rope(1, 1, 2)},
            "vision_config": {**OF_16, "spatial_merge_size": 2},
            **TOKENS,
        },
        paddleocr_vl_batch,
    ),
    "gemma4": gemma4(None),
    "gemma4_blocks": gemma4("vision"),
    # one token for 2 x 2 patches; features are those of a table, by probability
    "ovis2": MediaModel(
        "Ovis2",
        {
            "vision_config": {
                **OF_16,
                "vocab_size": 13,
                "hidden_stride": 2,
                "num_visual_indicator_tokens": 2,
            },
            "text_config": text("qwen2"),
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [7, 11],
            "hidden_size": 32,
            "vocab_size": 61,
        },
        llava_batch,
    ),
    "qwen2_5_omni": MediaModel(
        "Qwen2_5OmniThinker",
        {
            "text_config": {**TEXT, ROPE: rope(1, 1, 2)},
            "vision_config": WINDOWS,
            "audio_config": OMNI_AUDIO | {"n_window": 4},
            **OMNI_TOKENS,
        },
        partial(omni_batch, (16, 12, 8), (4, 3, 2)),
    ),
    "qwen3_omni": MediaModel(
        "Qwen3OmniMoeThinker",
        {
            "text_config": {**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 8}
            | {ROPE: rope(2, 1, 1)},
            "vision_config": DEEPSTACK,
            "audio_config": OMNI_AUDIO
            | {"downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 100},
            **OMNI_TOKENS,
        },
        partial(omni_batch, (112, 104, 100), (15, 14, 13)),
        has_experts=True,
    ),
    "glm46v": glm("Glm46V"),
    "qwen3_vl": MediaModel(
        "Qwen3VL",
        {
            "text_config": {**TEXT, "head_dim": 8, ROPE: rope(2, 1, 1)},
            "vision_config": DEEPSTACK,
            **TOKENS,
        },
    ),
    # one token for 2 x 2 patches of a tile
    "internvl": MediaModel(
        "InternVL",
        {
            "text_config": LLAMA,
            "vision_config": {**OF_4, "image_size": [8, 8], "patch_size": [2, 2]},
            "image_token_id": IMAGE,
        },
        llava_batch,
    ),
    # 4 tokens for a sound of 16 frames, of 2 features each
    "voxtral": MediaModel(
        "Voxtral",
        {
            "text_config": text("llama"),
            "audio_config": {"model_type": "voxtral_encoder", **VOXTRAL},
            "audio_token_id": IMAGE,
        },
        voxtral_batch,
    ),
    "cohere2_vision": MediaModel(
        "Cohere2Vision",
        {"text_config": COHERE2, "vision_config": SIGLIP, "image_token_id": IMAGE}
        | {"alignment_intermediate_size": 48},
        llava_batch,
    ),
    "glm4v": glm("Glm4v"),
    "glm4v_moe": glm("Glm4vMoe", **GLM4V_EXPERTS),
    "glm_ocr": glm("GlmOcr", head_dim=8),
    "glm5_next": MediaModel(
        "Glm5Next",
        {
            "text_config": GLM5_NEXT["text_config"],
            "vision_config": GLM | {"projection_intermediate_size": 24},
            **IMAGES_AND_VIDEOS,
        },
        has_experts=True,
    ),
    "minimax_m3": MediaModel(
        "MiniMaxM3Sparse",
        {
            "text_config": MINIMAX_M3,
            "vision_config": {**OF_16, "spatial_merge_size": 2},
            "projector_hidden_size": 24,
            **IMAGES_AND_VIDEOS,
        },
        has_experts=True,
        config="MiniMaxM3VLConfig",
    ),
    # images, videos, and sounds of chunks
    "dots3": MediaModel(
        "Dots3Note",
        {
            "text_config": {**INDEXED, **DOTS3},
            "vision_config": DOTS3_VISION,
            "audio_config": DOTS3_AUDIO,
            **IMAGES_AND_VIDEOS,
            "audio_token_id": AUDIO,
        },
        dots3_batch,
        has_experts=True,
    ),
    "hy_v4_vl": MediaModel(
        "HYV4VL",
        {
            "text_config": {**INDEXED, **SHARED_CHOICE, ROPE: rope(2, 1, 1)},
            "vision_config": {**OF_16, "spatial_merge_size": 2, "out_hidden_size": 32}
            | {"max_image_size": 8},
            **IMAGES_AND_VIDEOS,
        },
        hy_v4_vl_batch,
        has_experts=True,
    ),
    # its language model has recurrences, too
    "qwen3_5": MediaModel(
        "Qwen3_5",
        {
            "text_config": {**TEXT, **DELTA} | {ROPE: rope(2, 1, 1, partial_rotary_factor=1.0)},
            "vision_config": QWEN3,
            **TOKENS,
        },
    ),
}
if OF_5:  # PaliGemma of transformers 4 is refused
    ALL_MODELS["paligemma"] = MediaModel(  # tokens of an image and of a prompt see each other
        "PaliGemma",
        {
            "text_config": text("gemma", head_dim=8),
            "vision_config": {
                **OF_4,
                "model_type": "siglip_vision_model",
                "projection_dim": 32,
                "vision_use_head": False,
            },
            "image_token_index": IMAGE,
            "projection_dim": 32,
        },
        paligemma_batch,
    )
if not OF_5:  # transformers 5.24 reads an output of Llama 4 that is not there
    ALL_MODELS["llama4"] = MediaModel(
        "Llama4",
        {
            "text_config": {**TEXT, "intermediate_size_mlp": 64, "moe_layers": [], "head_dim": 8}
            | {"attention_chunk_size": 7},
            "vision_config": {**OF_16, "intermediate_size": 64, "vision_output_dim": 16}
            | {"projector_input_dim": 16, "projector_output_dim": 16},
            "image_token_index": IMAGE,
        },
        llama4_batch,
    )
ALL_OF_TEXT_ALONE = {
    # its encoder of sounds has convolutions
    "phi4_multimodal": MediaModel(
        "Phi4Multimodal",
        {
            **TEXT,
            "vision_config": {**OF_16, "image_token_id": IMAGE, "crop_size": 8},
            "audio_config": PHI4_AUDIO,
            "pad_token_id": 0,
        },
        head="ForCausalLM",
    ),
    # its projector has torch's own attention
    "aria": MediaModel(
        "Aria",
        {
            "vision_config": {"model_type": "idefics3_vision", **OF_16},
            "text_config": text("aria_text", moe_num_experts=4),
            "image_token_index": IMAGE,
            "projector_patch_to_query_dict": {16: 4},
        },
        has_experts=True,
    ),
    # its language model has recurrences, and makes a cache unless it is told not to
    "minicpm_v": MediaModel(
        "MiniCPMV4_6",
        {
            "text_config": text("qwen3_5_text", **DELTA)
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                }
            },
            "vision_config": {**OF_16, "image_size": 16},
            **IMAGES_AND_VIDEOS,
        },
    ),
}
MODELS, TEXT_ALONE = (
    {family: x for family, x in models.items() if hasattr(tf, x.config or f"{x.name}Config")}
    for models in (ALL_MODELS, ALL_OF_TEXT_ALONE)
)
"""Those of this version of transformers."""


def build(family: str) -> Any:
    """A float64 model in training mode, every parameter of it random."""
    with BUILD_LOCK:
        torch.manual_seed(1)
        model = (MODELS | TEXT_ALONE)[family].build()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.double().train()


def media_batch(family: str, video: bool = False) -> dict[str, Any]:
    """Two samples, of 3 and 1 images; with a video, too, if the family takes any."""
    takes_videos = family in ("qwen2_vl", "qwen2_5_vl", "minimax_m3")
    return qwen_batch(video=video) if takes_videos else MODELS[family].batch()
