r"""Train the video transformer on short clips, by DSP, Ulysses, rings or a mix of them.

    python examples/video_dit/train_video.py --config configs/video_dit/dsp.json  # one rank
    torchrun --nproc-per-node 4 examples/video_dit/train_video.py \
        --config configs/video_dit/ulysses.json
    mpirun -n 4 python examples/video_dit/train_video.py --config configs/video_dit/mix.json

All of them give the same loss as one rank. `--video-dir` takes your own frames.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from video_data import Clip, read_folder, simulate, to_batch
from video_model import VideoDiT, VideoDiTConfig
from video_parallel import ParallelVideo

from wf_backends import launch
from wf_backends.comm import Communicator, make_comm


def main() -> None:
    """Join the ranks, train, print the loss and the bytes sent."""
    args = parse()
    config = json.loads(args.config.read_text())
    launch.init(timeout=args.timeout)
    train(make_comm(), config, args.steps, args.video_dir)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a file of configs/video_dit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    parser.add_argument("--video-dir", type=Path, help="frames to train on, see video_data.py")
    return parser.parse_args()


def train(
    comm: Communicator,
    config: Mapping[str, Any],
    steps: int,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Train; returns the loss of each step, the same on all ranks.

    Args:
        config: "model", "parallel" and "training" of a config file.
    """
    model_config = VideoDiTConfig(**config["model"])
    training = config["training"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = initialise(VideoDiT(model_config).to(dtype), training["seed"]).to(device)
    parallel = ParallelVideo(model, config["parallel"], comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training["lr"])
    clips = read_folder(folder, *_size(model_config)) if folder else None
    losses: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        batch = make_batch(model_config, clips, step, training)
        loss = flow_loss(model, batch, step, dtype)
        optimizer.zero_grad()
        loss.backward()
        parallel.average_gradients()
        optimizer.step()
        losses.append(loss.item())
        if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
            seconds = time.perf_counter() - start
            sent = sum(parallel.sp.report().values())
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}  {seconds:.2f} s  ", end="")
            print(f"{sent / 1e6:.2f} MB sent since the last line", flush=True)
    return losses


def initialise(model: VideoDiT, seed: int) -> VideoDiT:
    """Draw the weights from `seed`, the same on all ranks; layers of zeros (adaLN) stay."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.any():
            nn.init.xavier_uniform_(module.weight, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
    return model


def make_batch(
    config: VideoDiTConfig, clips: list[Clip] | None, step: int, training: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on all ranks: video (B, T, H, W, C) and text (B, L)."""
    indices = range(step * training["batch"], (step + 1) * training["batch"])
    if clips is None:
        batch = [simulate(training["seed"] + index, *_size(config)) for index in indices]
    else:
        batch = [clips[index % len(clips)] for index in indices]
    return to_batch(batch, config.text_length)


def flow_loss(
    model: VideoDiT, batch: tuple[Tensor, Tensor], step: int, dtype: torch.dtype
) -> Tensor:
    """Flow matching: mean squared error of the predicted velocity noise - video.

    The model sees (1 - t) video + t noise, with t uniform in [0, 1].
    """
    device = next(model.parameters()).device
    video, text = batch[0].to(device, dtype), batch[1].to(device)
    generator = torch.Generator().manual_seed(step)  # on the CPU: the same on all ranks
    noise = torch.randn(video.shape, generator=generator).to(video)
    times = torch.rand(len(video), generator=generator).to(video)
    t = times.view(-1, 1, 1, 1, 1)
    velocity = model((1 - t) * video + t * noise, times, text)
    return (velocity - (noise - video)).square().mean()


def _size(config: VideoDiTConfig) -> tuple[int, int, int]:
    return config.frames, config.height, config.width


if __name__ == "__main__":
    main()
