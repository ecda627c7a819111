r"""Train the video transformer on moving pictures, by DSP, Ulysses, rings or a mix of them.

    python examples/video_dit/train_video.py --config configs/video_dit/dsp.json  # one rank
    torchrun --nproc-per-node 4 examples/video_dit/train_video.py \
        --config configs/video_dit/ulysses.json
    mpirun -n 4 python examples/video_dit/train_video.py --config configs/video_dit/mix.json

Every way gives the loss of one rank. `--video-dir` takes frames of your own.
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
    """Join the ranks, train, print loss and traffic."""
    args = parse()
    words = json.loads(args.config.read_text())
    job = launch.init(timeout=args.timeout)
    try:
        train(make_comm(), words, args.steps, args.video_dir)
    finally:
        job.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="a file of configs/video_dit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a rank waits for peers")
    parser.add_argument("--video-dir", type=Path, help="frames to train on, see video_data.py")
    return parser.parse_args()


def train(
    comm: Communicator,
    words: Mapping[str, Any],
    steps: int,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Losses of `steps` optimizer steps, the same on every rank.

    Args:
        words: "model", "parallel" and "training" of a config file.
    """
    config = VideoDiTConfig(**{k: _tuple(v) for k, v in words["model"].items()})
    training = words["training"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = initialise(VideoDiT(config).to(dtype), training["seed"]).to(device)
    spread = ParallelVideo(model, words["parallel"], comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training["lr"])
    clips = read_folder(folder, *_size(config)) if folder else None
    losses: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        chosen = choose(config, clips, step, training)
        loss = flow_loss(model, chosen, step, dtype)
        optimizer.zero_grad()
        loss.backward()
        spread.average_gradients()
        optimizer.step()
        losses.append(loss.item())
        if comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
            sent, seconds = sum(spread.sp.report().values()), time.perf_counter() - start
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}  {seconds:.2f} s  ", end="")
            print(f"{sent / 1e6:.2f} MB sent since the last line", flush=True)
    return losses


def initialise(model: VideoDiT, seed: int) -> VideoDiT:
    """Weights from a generator of their own, the same on every rank; adaLN's zeros stay."""
    random = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.any():
            nn.init.xavier_uniform_(module.weight, generator=random)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=random)
    return model


def choose(
    config: VideoDiTConfig, clips: list[Clip] | None, step: int, training: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on every rank."""
    at = range(step * training["batch"], (step + 1) * training["batch"])
    if clips is None:
        chosen = [simulate(training["seed"] + index, *_size(config)) for index in at]
    else:
        chosen = [clips[index % len(clips)] for index in at]
    return to_batch(chosen, config.text_length)


def flow_loss(
    model: VideoDiT, batch: tuple[Tensor, Tensor], step: int, dtype: torch.dtype
) -> Tensor:
    """Flow matching: the model shall predict noise - video on the line between them."""
    device = next(model.parameters()).device
    video, text = batch[0].to(device, dtype), batch[1].to(device)
    random = torch.Generator().manual_seed(step)  # of the host: the same on every rank
    noise = torch.randn(video.shape, generator=random).to(video)
    times = torch.rand(len(video), generator=random).to(video)
    along = times.view(-1, 1, 1, 1, 1)
    found = model((1 - along) * video + along * noise, times, text)
    return (found - (noise - video)).square().mean()


def _size(config: VideoDiTConfig) -> tuple[int, int, int]:
    return config.frames, config.height, config.width


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
