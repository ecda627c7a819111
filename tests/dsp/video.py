"""The example's video transformer in tests: small configurations, and its gradients on a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples" / "video_dit")
    import train_video
    import video_data
    from video_model import VideoDiT, VideoDiTConfig, from_patches, to_patches
    from video_parallel import ParallelVideo, stages

__all__ = [
    "VideoDiT",
    "VideoDiTConfig",
    "from_patches",
    "stages",
    "to_patches",
    "train_video",
    "video_data",
]

SMALL = {"frames": 5, "height": 12, "width": 28, "patch": 4, "dim": 16, "heads": 4}
"""5 frames and 21 places: no multiple of the ranks, and 6 and 8 ranks have no frame each."""
TWO_PAIRS = ("space", "time", "space", "time")
SWITCH = {"switch": True}
RING = {"route": {"name": "ring"}}


def small_video(stages, parallel, **sizes) -> dict[str, Any]:
    """A configuration of the example, with other sizes than SMALL's where named."""
    model = {**SMALL, "stages": stages, "text_length": 9, **sizes}
    return {"model": model, "parallel": parallel, "training": {"batch": 2, "lr": 0.01, "seed": 3}}


def gradients(comm, config) -> tuple[float, dict[str, Tensor], int, dict[str, int]]:
    """A training step in float64, of a model none of whose parameters is zero.

    Returns:
        The loss, the gradients by parameter, the switches, and the bytes sent by label.
    """
    model_config = VideoDiTConfig(**config["model"])
    model = VideoDiT(model_config).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype) * 0.2)
    parallel = ParallelVideo(model, config["parallel"], comm)
    batch = train_video.make_batch(model_config, None, 0, config["training"])
    loss = train_video.flow_loss(model, batch, 0, torch.float64)
    loss.backward()
    parallel.average_gradients()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), grads, parallel.tracker.switches, dict(comm.sent)
