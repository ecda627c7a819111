"""Parts of the tiny models that take images, videos and sounds among tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import transformers as tf

from tests.integrations.families import NoFloat32
from tests.integrations.media_batches import AUDIO, AUDIO_START, IMAGE, START, VIDEO, qwen_batch
from tests.integrations.transformers_models import HEADS, SMALL

TEXT = {**SMALL, **HEADS}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
OMNI_TOKENS = TOKENS | {"audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2}
PATCHES |= {"depth": 2, "hidden_size": 16}
WINDOWS = {**PATCHES, "window_size": 8, "fullatt_block_indexes": [1], "intermediate_size": 24}
WINDOWS |= {"out_hidden_size": 32}
CLIP = {"num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
OF_4 = {**CLIP, "hidden_size": 16, "intermediate_size": 24}
OF_16 = {**OF_4, "patch_size": 2}  # patches of an image
QWEN2_AUDIO = {"d_model": 16, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
QWEN2_AUDIO |= {"encoder_layers": 2, "num_mel_bins": 3, "max_source_positions": 8}
OMNI_AUDIO = QWEN2_AUDIO | {"output_dim": 32, "max_source_positions": 16}
IMAGES_AND_VIDEOS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


@dataclass(frozen=True)
class Part:
    """A config of transformers inside another one."""

    config: str
    sizes: dict[str, Any]


@dataclass(frozen=True)
class MediaModel:
    """A class of transformers, the fields of its config, and a batch for it."""

    name: str
    """Without `head`."""
    sizes: dict[str, Any]
    batch: Callable[[], dict[str, Any]] = qwen_batch
    head: str = "ForConditionalGeneration"
    changes: dict[str, Part] = field(default_factory=dict)
    """Fields that are set after the config was made."""
    has_experts: bool = False
    config: str = ""
    """The name of its config, if it is not `name` and "Config"."""

    def build(self) -> Any:
        fields = deepcopy(self.sizes)
        config_class = getattr(tf, self.config or f"{self.name}Config")
        config = config_class(**{k: made(x) for k, x in fields.items()})
        for key, part in self.changes.items():
            setattr(config, key, made(part))
        if self.has_experts:  # the other implementations have no float64
            config._experts_implementation = "eager"
        model = getattr(tf, self.name + self.head)(config)
        if self.name == "Qwen3OmniMoeThinker":
            owners = [x for x in (model, model.model) if hasattr(x, "get_rope_index")]
            for owner in owners:  # it joins positions of the dtypes of `float`
                owner.get_rope_index = without_float32(owner.get_rope_index)
        if self.name == "Kimi_K25":
            tower = model.model.vision_tower  # it averages the frames of a video in float32
            tower.temporal_merge = without_float32(tower.temporal_merge)
        return model


def made(value: Any) -> Any:
    return getattr(tf, value.config)(**value.sizes) if isinstance(value, Part) else value


def without_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with NoFloat32():
            return function(*args, **kwargs)

    return wide


def rope(*section: int, **more: Any) -> dict[str, Any]:
    """Rotary parameters with so many frequencies for time, height and width."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section], **more}


def text(model_type: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TEXT, **sizes}
