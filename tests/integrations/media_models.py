"""Tiny random models that take images and videos among tokens, and batches for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.integrations.families import GEMMA4, NoFloat32
from tests.integrations.mixer_models import DELTA
from tests.integrations.transformers_models import BUILD_LOCK, HEADS, SMALL

IMAGE, VIDEO, START = 58, 59, 57  # tokens
ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
AUDIO, AUDIO_START = 56, 55
OMNI_AUDIO = {"d_model": 16, "encoder_ffn_dim": 32, "encoder_attention_heads": 2, "output_dim": 32}
OMNI_AUDIO |= {"encoder_layers": 2, "num_mel_bins": 3, "max_source_positions": 16}
OMNI_TOKENS = TOKENS | {"audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START}
PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2}
WINDOWS = {"window_size": 8, "fullatt_block_indexes": [1], "intermediate_size": 24}
QWEN = {**SMALL, **HEADS, **ROPE, **TOKENS}
CLIP = {"num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
LLAVA_TOKENS = 4  # of an image: (8 / 4)**2 patches

# (frames, height, width) in patches, 4 of which are one token: 4, 2, 2 and 6 tokens
GRIDS = [(1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 6, 4)]
VIDEO_GRID = (2, 4, 2)  # 4 tokens
PATCH_WIDTH = 3 * 2 * 2 * 2  # colours, frames, height, width


def qwen2_vl() -> Any:
    vision = {**PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    config = tf.Qwen2VLConfig(**QWEN, vision_config=vision)
    return tf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    vision = {**PATCHES, **WINDOWS, "depth": 2, "hidden_size": 16, "out_hidden_size": 32}
    config = tf.Qwen2_5_VLConfig(**QWEN, vision_config=vision)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def llava() -> Any:
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**SMALL, **HEADS),
        vision_config=tf.CLIPVisionConfig(**CLIP, hidden_size=16, intermediate_size=24),
        vision_feature_layer=-1,
        image_token_index=IMAGE,
    )
    return tf.LlavaForConditionalGeneration(config)


def pixtral() -> Any:
    """LLaVA with an encoder of images of different sizes."""
    config = tf.LlavaConfig(
        text_config=tf.MistralConfig(**SMALL, **HEADS),
        vision_config=tf.PixtralVisionConfig(**CLIP, hidden_size=16, intermediate_size=24),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=IMAGE,
    )
    return tf.LlavaForConditionalGeneration(config)


def mistral3() -> Any:
    """Pixtral's encoder, and one token for 2 x 2 patches."""
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**SMALL, **HEADS),
        vision_config=tf.PixtralVisionConfig(
            **CLIP | {"patch_size": 2}, hidden_size=16, intermediate_size=24
        ),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        spatial_merge_size=2,
    )
    return tf.Mistral3ForConditionalGeneration(config)


def internvl() -> Any:
    """One token for 2 x 2 patches of a tile."""
    vision = {**CLIP, "image_size": [8, 8], "patch_size": [2, 2], "hidden_size": 16}
    config = tf.InternVLConfig(
        text_config=tf.LlamaConfig(**SMALL, **HEADS),
        vision_config=vision | {"intermediate_size": 24},
        image_token_id=IMAGE,
    )
    return tf.InternVLForConditionalGeneration(config)


def voxtral() -> Any:
    """4 tokens for a sound of 16 frames, of 2 features each."""
    audio = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    audio |= {"num_hidden_layers": 2, "num_mel_bins": 3, "max_source_positions": 8}
    config = tf.VoxtralConfig(
        text_config={"model_type": "llama", **SMALL, **HEADS},
        audio_config={"model_type": "voxtral_encoder", **audio},
        audio_token_id=IMAGE,
    )
    return tf.VoxtralForConditionalGeneration(config)


def llava_next() -> Any:
    """Tiles of an image of any size, and a token at the end of each row of patches."""
    config = tf.LlavaNextConfig(**_anyres(), vision_feature_select_strategy="default")
    return tf.LlavaNextForConditionalGeneration(config)


def llava_onevision() -> Any:
    config = tf.LlavaOnevisionConfig(
        **_anyres(), video_token_index=VIDEO, vision_feature_select_strategy="full"
    )
    config.vision_config = tf.SiglipVisionConfig(
        **CLIP, hidden_size=16, intermediate_size=24, vision_use_head=False
    )
    return tf.LlavaOnevisionForConditionalGeneration(config)


def _anyres() -> dict[str, Any]:
    return {
        "text_config": tf.LlamaConfig(**SMALL, **HEADS),
        "vision_config": tf.CLIPVisionConfig(**CLIP, hidden_size=16, intermediate_size=24),
        "vision_feature_layer": -1,
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[16, 16], [16, 8], [8, 8]],
    }


def aya_vision() -> Any:
    """One token for 2 x 2 patches of a tile."""
    vision = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
    config = tf.AyaVisionConfig(
        text_config=tf.Cohere2Config(**SMALL, **HEADS, sliding_window=5),
        vision_config=tf.SiglipVisionConfig(**vision, vision_use_head=False),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=IMAGE,
        adapter_intermediate_size=48,
    )
    return tf.AyaVisionForConditionalGeneration(config)


def gemma3() -> Any:
    """One token for 2 x 2 patches. Tokens of an image see each other, within windows."""
    vision = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
    text = {**SMALL, **HEADS, "head_dim": 8, "sliding_window": 3, "sliding_window_pattern": 2}
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**text, _attn_implementation_internal="eager"),
        vision_config=tf.SiglipVisionConfig(**vision, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return tf.Gemma3ForConditionalGeneration(config)


def paligemma() -> Any:
    """Tokens of an image and of a prompt see each other."""
    vision = tf.SiglipVisionConfig(**{**CLIP, "hidden_size": 16}, intermediate_size=24)
    config = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **SMALL, **HEADS, "head_dim": 8},
        vision_config=vision.to_dict() | {"projection_dim": 32, "vision_use_head": False},
        image_token_index=IMAGE,
        projection_dim=32,
    )
    return tf.PaliGemmaForConditionalGeneration(config)


def qwen2_audio() -> Any:
    """A token for 4 frames of a sound."""
    audio = {"d_model": 16, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
    audio |= {"encoder_layers": 2, "num_mel_bins": 3, "max_source_positions": 8}
    config = tf.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **SMALL, **HEADS},
        audio_config=audio,
        audio_token_index=IMAGE,
    )
    return tf.Qwen2AudioForConditionalGeneration(config)


def idefics3() -> Any:
    """One token for 2 x 2 patches, of images padded by sample."""
    return tf.Idefics3ForConditionalGeneration(tf.Idefics3Config(**_shuffled()))


def smolvlm() -> Any:
    return tf.SmolVLMForConditionalGeneration(tf.SmolVLMConfig(**_shuffled()))


def _shuffled() -> dict[str, Any]:
    vision = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
    text = tf.LlamaConfig(**SMALL, **HEADS, pad_token_id=0)
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    }


MODELS = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "llava": llava, "pixtral": pixtral}
MODELS |= {"mistral3": mistral3, "llava_next": llava_next, "llava_onevision": llava_onevision}
MODELS |= {"gemma3": gemma3, "qwen2_audio": qwen2_audio}
MODELS |= {"aya_vision": aya_vision, "idefics3": idefics3, "smolvlm": smolvlm}


def qwen3_vl() -> Any:
    """Its encoder gives features to several layers of the language model."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {**PATCHES, "depth": 2, "hidden_size": 16, "intermediate_size": 24}
    config = tf.Qwen3VLConfig(
        text_config={**SMALL, **HEADS, "head_dim": 8, "rope_parameters": rope},
        vision_config={
            **vision,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **TOKENS,
    )
    return tf.Qwen3VLForConditionalGeneration(config)


def cohere2_vision() -> Any:
    """One token for 2 x 2 patches of a tile."""
    vision = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
    config = tf.Cohere2VisionConfig(
        text_config=tf.Cohere2Config(**SMALL, **HEADS, sliding_window=5),
        vision_config=tf.SiglipVisionConfig(**vision, vision_use_head=False),
        image_token_id=IMAGE,
        alignment_intermediate_size=48,
    )
    return tf.Cohere2VisionForConditionalGeneration(config)


def glm4v(config: Any = None, model: Any = None, **text: Any) -> Any:
    """Its videos have the tokens of images, and are refused."""
    config, model = config or tf.Glm4vConfig, model or tf.Glm4vForConditionalGeneration
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    rope["partial_rotary_factor"] = 1.0
    vision = {**PATCHES, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "image_size": 8}
    options = {**SMALL, **HEADS, "pad_token_id": 0, "rope_parameters": rope, **text}
    built = config(
        text_config=options,
        vision_config=vision | {"out_hidden_size": 32},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    built.text_config._experts_implementation = "eager"  # the others have no float64
    return model(built)


def glm4v_moe() -> Any:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8}
    return glm4v(tf.Glm4vMoeConfig, tf.Glm4vMoeForConditionalGeneration, **experts)


def glm_ocr() -> Any:
    return glm4v(tf.GlmOcrConfig, tf.GlmOcrForConditionalGeneration, head_dim=8)


def qwen3_5() -> Any:
    """Its language model has recurrences, too."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    rope["partial_rotary_factor"] = 1.0
    config = tf.Qwen3_5Config(
        text_config={**SMALL, **HEADS, **DELTA, "rope_parameters": rope},
        vision_config={
            **PATCHES,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        **TOKENS,
    )
    return tf.Qwen3_5ForConditionalGeneration(config)


def vipllava() -> Any:
    """Features of several layers of the encoder."""
    config = tf.VipLlavaConfig(
        text_config=tf.LlamaConfig(**SMALL, **HEADS),
        vision_config=tf.CLIPVisionConfig(**CLIP, hidden_size=16, intermediate_size=24),
        image_token_index=IMAGE,
        vision_feature_layers=[-1, 1],
    )
    return tf.VipLlavaForConditionalGeneration(config)


def llava_next_video() -> Any:
    config = tf.LlavaNextVideoConfig(
        **_anyres() | {"image_seq_length": 4},
        video_token_index=VIDEO,
        spatial_pool_stride=2,
        vision_feature_select_strategy="default",
    )
    return tf.LlavaNextVideoForConditionalGeneration(config)


def got_ocr2() -> Any:
    """One token for 4 x 4 patches of an image."""
    vision = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "mlp_dim": 24}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 4, "window_size": 2}
    config = tf.GotOcr2Config(
        vision_config=vision | {"global_attn_indexes": [1]},
        text_config={"model_type": "qwen2", **SMALL, **HEADS},
        image_token_index=IMAGE,
    )
    return tf.GotOcr2ForConditionalGeneration(config)


def ovis2() -> Any:
    """One token for 2 x 2 patches; features are those of a table, by probability."""
    vision = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}
    config = tf.Ovis2Config(
        vision_config=vision
        | {"vocab_size": 13, "hidden_stride": 2, "num_visual_indicator_tokens": 2},
        text_config={"model_type": "qwen2", **SMALL, **HEADS},
        image_token_id=IMAGE,
        visual_indicator_token_ids=[7, 11],
        hidden_size=32,
        vocab_size=61,
    )
    return tf.Ovis2ForConditionalGeneration(config)


def qwen2_5_omni() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {**PATCHES, **WINDOWS, "depth": 2, "hidden_size": 16, "out_hidden_size": 32}
    config = tf.Qwen2_5OmniThinkerConfig(
        text_config={**SMALL, **HEADS, "rope_parameters": rope},
        vision_config=vision,
        audio_config=OMNI_AUDIO | {"n_window": 4},
        **OMNI_TOKENS,
    )
    return tf.Qwen2_5OmniThinkerForConditionalGeneration(config)


def qwen3_omni() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    vision = {**PATCHES, "depth": 2, "hidden_size": 16, "intermediate_size": 24}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    config = tf.Qwen3OmniMoeThinkerConfig(
        text_config={**SMALL, **HEADS, **experts, "head_dim": 8, "rope_parameters": rope},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        audio_config=OMNI_AUDIO | {"downsample_hidden_size": 8, "n_window_infer": 100},
        **OMNI_TOKENS,
    )
    config.text_config._experts_implementation = "eager"
    model = tf.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    for part in (model, model.model):  # it joins positions of the dtypes that `float` gives
        part.get_rope_index = _without_float32(part.get_rope_index)
    return model


def _without_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with NoFloat32():
            return function(*args, **kwargs)

    return wide


MODELS |= {"vipllava": vipllava, "llava_next_video": llava_next_video, "got_ocr2": got_ocr2}


def gemma4(blocks: bool = False) -> Any:
    """One token for 2 x 2 patches. Tokens of an image see each other in windows, if wanted."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**GEMMA4, "num_hidden_layers": 3, "layer_types": layers, "sliding_window": 3}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pooling_kernel_size": 2}
    audio = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    audio |= {"subsampling_conv_channels": [8, 4], "output_proj_dims": 16}
    config = tf.Gemma4Config(
        text_config=text | {"use_bidirectional_attention": "vision" if blocks else None},
        vision_config=vision | {"patch_size": 2, "position_embedding_size": 16},
        audio_config=audio | {"attention_chunk_size": 4, "attention_context_left": 3},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
    )
    return tf.Gemma4ForConditionalGeneration(config)


def idefics2() -> Any:
    """Three tokens for an image of any size."""
    perceiver = {"resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 2}
    perceiver |= {"resampler_head_dim": 8, "num_key_value_heads": 1, "hidden_size": 32}
    config = tf.Idefics2Config(
        text_config={"model_type": "mistral", **SMALL, **HEADS, "sliding_window": None},
        vision_config=OF_4_PATCHES,
        perceiver_config=perceiver,
        image_token_id=IMAGE,
    )
    return tf.Idefics2ForConditionalGeneration(config)


def deepseek_vl() -> Any:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False}
    config = tf.DeepseekVLConfig(
        text_config={"model_type": "llama", **SMALL, **HEADS},
        vision_config=vision | CLIP | {"hidden_size": 16, "intermediate_size": 24},
        image_token_id=IMAGE,
    )
    return tf.DeepseekVLForConditionalGeneration(config)


def lighton_ocr() -> Any:
    config = tf.LightOnOcrConfig(
        text_config={"model_type": "qwen3", **SMALL, **HEADS, "head_dim": 8},
        vision_config={"model_type": "pixtral", **OF_4_PATCHES},
        image_token_id=IMAGE,
        spatial_merge_size=2,
    )
    return tf.LightOnOcrForConditionalGeneration(config)


def paddleocr_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = tf.PaddleOCRVLConfig(
        text_config={**SMALL, **HEADS, "head_dim": 8, "rope_parameters": rope},
        vision_config=OF_4_PATCHES | {"spatial_merge_size": 2},
        **TOKENS,
    )
    return tf.PaddleOCRVLForConditionalGeneration(config)


def lfm2_vl() -> Any:
    """Its language model has convolutions, too."""
    vision = {"model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 16}
    text = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    config = tf.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **SMALL, **HEADS, **text},
        vision_config=OF_4_PATCHES | vision,
        image_token_id=IMAGE,
        projector_hidden_size=16,
    )
    return tf.Lfm2VlForConditionalGeneration(config)


def phi4_multimodal() -> Any:
    """Its encoder of sounds has convolutions."""
    audio = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "input_size": 16}
    audio |= {"num_attention_heads": 2, "nemo_conv_channels": 8, "ext_pw_out_channel": 16}
    vision = {**OF_4_PATCHES, "image_token_id": IMAGE, "crop_size": 8}
    config = tf.Phi4MultimodalConfig(
        **SMALL,
        **HEADS,
        vision_config=vision,
        audio_config=audio | {"depthwise_separable_out_channel": 16, "audio_token_id": AUDIO},
        pad_token_id=0,
    )
    return tf.Phi4MultimodalForCausalLM(config)


def aria() -> Any:
    """Its projector has torch's own attention."""
    config = tf.AriaConfig(
        vision_config={"model_type": "idefics3_vision", **OF_4_PATCHES},
        text_config={"model_type": "aria_text", **SMALL, **HEADS, "moe_num_experts": 4},
        image_token_index=IMAGE,
        projector_patch_to_query_dict={16: 4},
    )
    config.text_config._experts_implementation = "eager"
    return tf.AriaForConditionalGeneration(config)


OF_4_PATCHES = {**CLIP, "patch_size": 2, "hidden_size": 16, "intermediate_size": 24}


def minicpm_v() -> Any:
    """Its language model has recurrences, and makes a cache unless it is told not to."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    text = {**SMALL, **HEADS, **DELTA, "rope_parameters": rope}
    config = tf.MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **text},
        vision_config={**OF_4_PATCHES, "image_size": 16},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return tf.MiniCPMV4_6ForConditionalGeneration(config)


TEXT_ALONE = {"phi4_multimodal": phi4_multimodal, "aria": aria}
if hasattr(tf, "MiniCPMV4_6Config"):
    TEXT_ALONE["minicpm_v"] = minicpm_v
MODELS["idefics2"] = idefics2
if hasattr(tf, "Qwen3VLConfig"):  # transformers 5
    MODELS |= {"deepseek_vl": deepseek_vl, "lighton_ocr": lighton_ocr, "lfm2_vl": lfm2_vl}
    MODELS["paddleocr_vl"] = paddleocr_vl
if hasattr(tf, "Gemma4Config"):
    MODELS |= {"gemma4": gemma4, "gemma4_blocks": partial(gemma4, blocks=True)}
if hasattr(tf, "Qwen3VLConfig"):  # transformers 5
    MODELS |= {"ovis2": ovis2, "qwen2_5_omni": qwen2_5_omni, "qwen3_omni": qwen3_omni}
    MODELS["glm46v"] = lambda: glm4v(tf.Glm46VConfig, tf.Glm46VForConditionalGeneration)
    MODELS |= {"qwen3_vl": qwen3_vl, "internvl": internvl, "voxtral": voxtral}
    MODELS |= {"cohere2_vision": cohere2_vision, "paligemma": paligemma, "glm4v": glm4v}
    MODELS |= {"glm4v_moe": glm4v_moe, "glm_ocr": glm_ocr}
if hasattr(tf, "Qwen3_5Config"):
    MODELS["qwen3_5"] = qwen3_5


def build(family: str) -> Any:
    """A float64 model in training mode, every parameter of it random."""
    with BUILD_LOCK:
        torch.manual_seed(1)
        model = (MODELS | TEXT_ALONE)[family]()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.double().train()


def media_batch(family: str, video: bool = False) -> dict[str, Any]:
    """Two samples, of 3 and 1 images; with a video, too, if the family takes any."""
    if family in ("qwen3_vl", "qwen3_5"):  # frames of its videos have timestamps between them
        return qwen_batch()
    return BATCHES[family]() if family in BATCHES else qwen_batch(video=video)


def qwen_batch(image_counts: tuple[int, ...] = (3, 1), video: bool = False) -> dict[str, Any]:
    """A sample of text and images for each of `image_counts`; a video ends the last one."""
    grids, samples = iter(GRIDS), []
    for number, count in enumerate(image_counts):
        tokens = [3 + number, 4, 5]
        for grid in (next(grids) for _ in range(count)):
            tokens += [START, *[IMAGE] * (num_patches(grid) // 4), 7, 8]
        samples.append(tokens)
    used = GRIDS[: sum(image_counts)]
    media = {
        "pixel_values": random_normal(sum(map(num_patches, used)), PATCH_WIDTH),
        "image_grid_thw": torch.tensor(used),
    }
    if video:
        samples[-1] += [START, *[VIDEO] * (num_patches(VIDEO_GRID) // 4), 9]
        media |= {
            "pixel_values_videos": random_normal(num_patches(VIDEO_GRID), PATCH_WIDTH),
            "video_grid_thw": torch.tensor([VIDEO_GRID]),
        }
    return media | with_token_types(padded(samples))


def num_patches(grid: tuple[int, int, int]) -> int:
    frames, height, width = grid
    return frames * height * width


def with_token_types(batch: dict[str, Any]) -> dict[str, Any]:
    """With the types that processors of transformers 5 give, and its models need."""
    parameters = inspect.signature(tf.Qwen2VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" not in parameters:
        return batch
    ids = batch["input_ids"]
    return batch | {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}


def llava_batch(image_counts: tuple[int, ...] = (3, 1)) -> dict[str, Any]:
    """A sample of text and images for each of `image_counts`."""
    samples = [
        [3 + number, 4, *([*[IMAGE] * LLAVA_TOKENS, 7, 8] * count)]
        for number, count in enumerate(image_counts)
    ]
    return {"pixel_values": random_normal(sum(image_counts), 3, 8, 8)} | padded(samples)


def pixtral_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images, with 2, 1, 4 and 1 tokens: as many as 4 images of 2."""
    sizes = [(4, 8), (4, 4), (8, 8), (4, 4)]
    samples = [[3, *[IMAGE] * 2, 7, IMAGE, 8, *[IMAGE] * 4], [4, IMAGE]]
    media = {"pixel_values": random_normal(4, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
    return media | padded(samples)


def mistral3_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images; transformers 5 fails for a single image of one token."""
    sizes = [(4, 8), (8, 4), (8, 8), (4, 8)]  # 2, 2, 4 and 2 tokens
    samples = [[3, *[IMAGE] * 2, 7, *[IMAGE] * 2, 8, *[IMAGE] * 4], [4, *[IMAGE] * 2]]
    media = {"pixel_values": random_normal(4, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
    return media | padded(samples)


def llava_next_batch() -> dict[str, Any]:
    """Two samples, of 2 and 1 images of 16, 14 and 10 tokens: 4 of the whole image, and those of
    the patches of its tiles that are not padding, with one more at the end of each row."""
    sizes = torch.tensor([(16, 8), (8, 16), (8, 8)])  # in patches 4 x 2, 2 x 4, 2 x 2
    samples = [[3, *[IMAGE] * 16, 7, *[IMAGE] * 14], [4, *[IMAGE] * 10]]
    media = {"pixel_values": random_normal(3, 5, 3, 8, 8), "image_sizes": sizes}
    return media | padded(samples)


def onevision_batch() -> dict[str, Any]:
    """The same, and a video of two frames, of one token each, with one more at its end."""
    batch = llava_next_batch()
    if not hasattr(tf, "LlavaOnevisionModel"):  # transformers 4
        return batch
    ids = torch.cat([batch["input_ids"], torch.tensor([[9, 9, 9, 9], [VIDEO] * 3 + [9]])], 1)
    labels = ids.masked_fill(ids >= START, -100)
    videos = {"pixel_values_videos": random_normal(1, 2, 3, 8, 8)}
    return batch | videos | {"input_ids": ids, "labels": labels}


def images_of_one_tile_batch() -> dict[str, Any]:
    """Three images in a sample, of one tile each, and one of tiles in another."""
    sizes = torch.tensor([(16, 8), (8, 16), (8, 8), (8, 8)])
    samples = [[3, *[IMAGE] * 5, 7, *[IMAGE] * 5, 7, *[IMAGE] * 5], [4, *[IMAGE] * 10]]
    media = {"pixel_values": random_normal(4, 5, 3, 8, 8), "image_sizes": sizes}
    return media | {"batch_num_images": torch.tensor([3, 1])} | padded(samples)


def idefics3_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images; an image has a smaller part that is seen."""
    batch = llava_batch()
    pixels, seen = torch.zeros(2, 3, 3, 8, 8).double(), torch.ones(2, 3, 8, 8, dtype=torch.bool)
    pixels[0], pixels[1, 0] = batch["pixel_values"][:3], batch["pixel_values"][3]
    seen[0, 1, 4:] = False
    return batch | {"pixel_values": pixels, "pixel_attention_mask": seen}


def idefics2_batch() -> dict[str, Any]:
    """As of Idefics 3, with three tokens for each image."""
    samples = [[3, *([*[IMAGE] * 3, 7] * 3)], [4, *[IMAGE] * 3, 7]]
    return idefics3_batch() | padded(samples)


def lfm2_vl_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images, with 4, 2, 2 and 2 tokens."""
    shapes = torch.tensor([(4, 4), (2, 4), (4, 2), (2, 4)])
    seen = (torch.arange(16) < shapes.prod(dim=1)[:, None]).long()
    media = {"pixel_values": random_normal(4, 16, 12), "pixel_attention_mask": seen}
    samples = [[3, *[IMAGE] * 4, 7, *[IMAGE] * 2, 8, *[IMAGE] * 2], [4, *[IMAGE] * 2]]
    return media | {"spatial_shapes": shapes} | padded(samples)


def paddleocr_vl_batch() -> dict[str, Any]:
    pixels = random_normal(sum(map(num_patches, GRIDS)), 3, 2, 2)
    return qwen_batch() | {"pixel_values": pixels}


def gemma3_batch() -> dict[str, Any]:
    """Types say where images are."""
    batch = llava_batch()
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE).long()}


def paligemma_batch() -> dict[str, Any]:
    """Types say that the prefixes are the first 12 and 9 tokens."""
    batch = llava_batch((1, 1))
    numbers = torch.arange(batch["input_ids"].shape[1])
    return batch | {"token_type_ids": (numbers >= torch.tensor([[9], [7]])).long()}


def omni_batch(frames: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Images, a video, and three sounds of `frames` frames with `lengths` tokens."""
    batch = qwen_batch(video=True)
    first, second, third = ([AUDIO_START, *[AUDIO] * length, 9] for length in lengths)
    ids = batch["input_ids"].tolist()
    seen = torch.arange(max(frames)) < torch.tensor(frames)[:, None]
    sounds = {"input_features": random_normal(3, 3, max(frames))}
    sounds["feature_attention_mask"] = seen.long()
    batch |= sounds | padded([[*first, *ids[0], *second], [*ids[1], *third]])
    ones = torch.ones_like(batch["input_ids"])
    seconds = torch.ones(1)
    return without_types(batch) | {"attention_mask": ones, "video_second_per_grid": seconds}


def sound_of_video_batch(frames: int, tokens: int, masked: bool) -> dict[str, Any]:
    """Two samples of a video, with its sound of `tokens` tokens between its frames of 2."""
    pair = [START, AUDIO_START, *[VIDEO] * 2, *[AUDIO] * tokens, *[VIDEO] * 2, 9, 9]
    batch = padded([[3, 4, 5, *pair], [4, 6, *pair]])
    batch |= {"input_features": random_normal(2, 3, frames), "use_audio_in_video": True}
    batch |= {"feature_attention_mask": torch.ones(2, frames).long()}
    batch |= {"pixel_values_videos": random_normal(2 * num_patches(VIDEO_GRID), PATCH_WIDTH)}
    batch |= {"video_grid_thw": torch.tensor([VIDEO_GRID] * 2)}
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])} if masked else {}
    return batch | mask | {"video_second_per_grid": torch.ones(2)}


def gemma4_batch() -> dict[str, Any]:
    """Four images of 1 or 2 tokens, videos of 2 and 1 frames, two sounds of 3 and 2 tokens."""
    sizes = [(2, 2), (2, 4), (4, 2), (2, 2)]
    images = torch.stack([_places(*size) for size in sizes])
    frames = torch.stack([_places(2, 4), _places(2, 4), _places(2, 2)])
    image, seen = [[IMAGE], [IMAGE] * 2], torch.arange(12) < torch.tensor([[12], [7]])
    first = [3, *image[0], 7, *image[1], 8, *image[1], 9, *[VIDEO] * 4, 9, *[AUDIO] * 3]
    batch = padded([first, [4, *image[0], 7, *[VIDEO], 9, *[AUDIO] * 2]])
    ids = batch["input_ids"]
    batch |= {"pixel_values": random_normal(4, 8, 12), "image_position_ids": images}
    batch |= {"pixel_values_videos": random_normal(3, 8, 12), "video_position_ids": frames}
    batch |= {"num_frames_per_video": torch.tensor([2, 1])}
    batch |= {"input_features": random_normal(2, 12, 8), "input_features_mask": seen}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int() + 3 * (ids == AUDIO).int()
    return batch | {"mm_token_type_ids": types}


def _places(height: int, width: int) -> Tensor:
    """(8, 2): x and y of the patches of an image, and -1."""
    places = [(x, y) for y in range(height) for x in range(width)]
    return torch.tensor(places + [(-1, -1)] * (8 - len(places)))


def without_types(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in batch.items() if k != "mm_token_type_ids"}


def got_ocr2_batch() -> dict[str, Any]:
    return llava_batch() | {"pixel_values": random_normal(4, 3, 32, 32)}


def next_video_batch() -> dict[str, Any]:
    """As of LLaVA-NeXT, and with transformers 5 a video of two frames, of one token each."""
    batch = llava_next_batch()
    if not hasattr(tf, "LlavaOnevisionModel"):
        return batch
    ids = torch.cat([batch["input_ids"], torch.tensor([[9, 9, 9], [VIDEO] * 2 + [9]])], 1)
    labels = ids.masked_fill(ids >= START, -100)
    videos = {"pixel_values_videos": random_normal(1, 2, 3, 8, 8)}
    return batch | videos | {"input_ids": ids, "labels": labels}


def qwen2_audio_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 sounds, of 16, 12, 8 and 16 frames with one token for 4."""
    frames = torch.tensor([[16], [12], [8], [16]])
    samples = [[3, *[IMAGE] * 4, 7, *[IMAGE] * 3, 8, *[IMAGE] * 2, 9], [4, *[IMAGE] * 4, 7]]
    seen = (torch.arange(16) < frames).long()
    sounds = {"input_features": random_normal(4, 3, 16), "feature_attention_mask": seen}
    return sounds | padded(samples)


def voxtral_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 sounds."""
    sounds = {"input_features": random_normal(4, 3, 16)}
    return {k: x for k, x in llava_batch().items() if k != "pixel_values"} | sounds


BATCHES = {"llava": llava_batch, "pixtral": pixtral_batch, "mistral3": mistral3_batch}
BATCHES |= {"internvl": llava_batch, "voxtral": voxtral_batch}
BATCHES |= {"llava_next": llava_next_batch, "llava_onevision": onevision_batch}
BATCHES |= {"aya_vision": llava_batch, "cohere2_vision": llava_batch}
BATCHES |= {"gemma3": gemma3_batch, "paligemma": paligemma_batch}
BATCHES |= {"qwen2_audio": qwen2_audio_batch}
BATCHES |= {"vipllava": llava_batch, "ovis2": llava_batch, "got_ocr2": got_ocr2_batch}
BATCHES |= {"llava_next_video": next_video_batch, "glm46v": qwen_batch}
BATCHES |= {"idefics2": idefics2_batch, "deepseek_vl": llava_batch, "lfm2_vl": lfm2_vl_batch}
BATCHES |= {"lighton_ocr": mistral3_batch, "paddleocr_vl": paddleocr_vl_batch}
BATCHES |= {"gemma4": gemma4_batch, "gemma4_blocks": gemma4_batch}
BATCHES["qwen2_5_omni"] = lambda: omni_batch((16, 12, 8), (4, 3, 2))
BATCHES["qwen3_omni"] = lambda: omni_batch((112, 104, 100), (15, 14, 13))
BATCHES |= dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), qwen_batch)
BATCHES |= {"idefics3": idefics3_batch, "smolvlm": idefics3_batch}


def padded(samples: list[list[int]]) -> dict[str, Any]:
    """Samples of one length, with text at their end; media have no labels."""
    length = max(map(len, samples)) + 3
    text = [10 + i % 7 for i in range(length)]
    ids = torch.tensor([tokens + text[: length - len(tokens)] for tokens in samples])
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= START, -100)}


def right_padded(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the last 5 tokens of its second sample, which are text, as padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    return batch | {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def random_normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
