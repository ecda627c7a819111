"""Tiny random encoders of images, videos and sounds, that are cut inside, and batches for them.

Their numbers of rows are such that 2 or 4 ranks cannot share them equally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.integrations.transformers_models import BERT_DROPOUT, BUILD_LOCK

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **BERT_DROPOUT}
WIDTH |= {"intermediate_size": 48, "initializer_range": 0.2, "num_labels": 5}
PATCHES = {"image_size": 8, "patch_size": 2, "num_channels": 1}  # 16 patches
DECODER = {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2}
DECODER |= {"decoder_num_hidden_layers": 2, "decoder_intermediate_size": 24}
FRAMES = {"image_size": 12, "num_channels": 3, "num_frames": 4, "tubelet_size": 2, "patch_size": 4}
YOLOS = {"image_size": [8, 8], "num_detection_tokens": 3, "use_mid_position_embeddings": True}
JEPA = {"crop_size": 12, "patch_size": 4, "frames_per_clip": 4, "tubelet_size": 2, "in_chans": 3}
# transformers 4 loses a dimension of heads that give time, height and width less than 4 elements
JEPA |= {"mlp_ratio": 2, "num_attention_heads": 2}
JEPA |= {"pred_hidden_size": 24, "pred_num_attention_heads": 2}
JEPA |= {
    "pred_num_hidden_layers": 2,
    "pred_num_mask_tokens": 2,
    "pred_zero_init_mask_tokens": False,
}
TEXT = {"vocab_size": 9, "max_position_embeddings": 16, "pad_token_id": 1}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "projection_size": 32}
CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (8, 3), "conv_stride": (4, 2)}
SPEECH = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 9}
SPEECH |= {
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
}
SPEECH |= {
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "pad_token_id": 0,
}
SPEECH |= {"ctc_loss_reduction": "mean"}


def random_normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def hidden(batch: int, patches: int, count: int) -> Tensor:
    """(batch, patches) bool: `count` True in each sample, in other places."""
    return random_normal(batch, patches).argsort(dim=1) < count


CLASSES = {"labels": torch.tensor([0, 4])}
IMAGES = {"pixel_values": random_normal(2, 1, 8, 8)}
SQUARES = {"pixel_values": random_normal(2, 1, 10, 10)}  # 25 patches
VIDEOS = {"pixel_values": random_normal(2, 4, 3, 12, 12)}  # 18 patches
SOUNDS = {"input_values": random_normal(2, 164), "labels": torch.tensor([[1, 2], [3, 4]])}
PADDED = {"attention_mask": (torch.arange(164)[None] < torch.tensor([[164], [90]])).long()}
NAFLEX = {
    "input_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 3, 3, 4], [7, 6, 5, 4, 3, 3, 8, 8, 2]]),
    "pixel_values": random_normal(2, 19, 4),
    "pixel_attention_mask": (torch.arange(19)[None] < torch.tensor([[18], [12]])).long(),
    "spatial_shapes": torch.tensor([[3, 6], [4, 3]]),
    "return_loss": True,
}


@dataclass(frozen=True)
class Encoder:
    model: str
    config: str
    sizes: dict[str, Any]
    batch: dict[str, Any]


def towers(vision: dict[str, Any]) -> dict[str, Any]:
    return {"vision_config": WIDTH | vision, "text_config": WIDTH | TEXT, "num_labels": 5}


SQUARE = {"image_size": 10, "patch_size": 2, "num_channels": 1}
SPEECHES = WIDTH | SPEECH | CONVOLUTIONS
ENCODERS = {
    "vit": Encoder("ViTForImageClassification", "ViTConfig", PATCHES, IMAGES | CLASSES),
    "deit": Encoder("DeiTForImageClassification", "DeiTConfig", PATCHES, IMAGES | CLASSES),
    "dinov2": Encoder("Dinov2ForImageClassification", "Dinov2Config", PATCHES, IMAGES | CLASSES),
    "dinov2_with_registers": Encoder(
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        PATCHES,
        IMAGES | CLASSES,
    ),
    "dinov3": Encoder(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        PATCHES | {"num_register_tokens": 4, "pos_embed_rescale": None},
        IMAGES,
    ),
    "siglip": Encoder(
        "SiglipModel",
        "SiglipConfig",
        towers(SQUARE),
        SQUARES | {"input_ids": NAFLEX["input_ids"], "return_loss": True},
    ),
    "siglip_classes": Encoder(
        "SiglipForImageClassification", "SiglipConfig", towers(SQUARE), SQUARES | CLASSES
    ),
    "siglip2": Encoder(
        "Siglip2Model",
        "Siglip2Config",
        towers({"num_patches": 16, "patch_size": 2, "num_channels": 1}),
        NAFLEX,
    ),
    "vit_msn": Encoder("ViTMSNForImageClassification", "ViTMSNConfig", PATCHES, IMAGES | CLASSES),
    "ijepa": Encoder("IJepaForImageClassification", "IJepaConfig", SQUARE, SQUARES | CLASSES),
    "vit_mae": Encoder(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        PATCHES | DECODER | {"mask_ratio": 0.4},
        IMAGES | {"noise": random_normal(2, 16)},
    ),
    "yolos": Encoder("YolosModel", "YolosConfig", PATCHES | YOLOS, IMAGES),
    "videomae": Encoder(
        "VideoMAEForPreTraining",
        "VideoMAEConfig",
        FRAMES | DECODER,
        VIDEOS | {"bool_masked_pos": hidden(2, 18, 7)},
    ),
    "videomae_classes": Encoder(
        "VideoMAEForVideoClassification", "VideoMAEConfig", FRAMES | DECODER, VIDEOS | CLASSES
    ),
    "vivit": Encoder(
        "VivitForVideoClassification",
        "VivitConfig",
        FRAMES | {"tubelet_size": [2, 4, 4]},
        VIDEOS | CLASSES,
    ),
    "vjepa2": Encoder(
        "VJEPA2Model",
        "VJEPA2Config",
        JEPA,
        {
            "pixel_values_videos": VIDEOS["pixel_values"],
            "context_mask": [torch.tensor([[0, 1, 4, 7, 9, 10, 12], [2, 3, 4, 11, 13, 15, 17]])],
            "target_mask": [torch.tensor([[2, 3], [0, 16]])],
        },
    ),
    "ast": Encoder(
        "ASTForAudioClassification",
        "ASTConfig",
        {"max_length": 52, "num_mel_bins": 36},
        {"input_values": random_normal(2, 52, 36)} | CLASSES,
    ),
    "wav2vec2": Encoder("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECHES, SOUNDS),
    "wav2vec2_padded": Encoder(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        SPEECHES | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        SOUNDS | PADDED,
    ),
    "hubert": Encoder(
        "HubertForSequenceClassification",
        "HubertConfig",
        SPEECHES,
        {"input_values": SOUNDS["input_values"]} | CLASSES,
    ),
}
ENCODERS = {name: row for name, row in ENCODERS.items() if hasattr(tf, row.config)}


def build(name: str, implementation: str = "sdpa") -> Any:
    """A float64 model in training mode, every parameter of it random, the same every time."""
    row = ENCODERS[name]
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = getattr(tf, row.config)(**{**WIDTH, **row.sizes})
        config._attn_implementation = implementation
        model = getattr(tf, row.model)(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.double().train()
