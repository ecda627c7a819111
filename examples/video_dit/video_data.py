"""Video clips with texts: simulated balls that fall, fly and bounce, or frames from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

COLOURS = {"red": (1.0, 0.2, 0.2), "green": (0.2, 0.9, 0.3), "blue": (0.3, 0.4, 1.0)}
GRAVITY = 60.0  # pixels per second squared, in pictures 32 pixels high
FRAME_SECONDS = 1 / 12  # between two frames
PHYSICS_STEPS = 8  # between two frames


@dataclass(frozen=True, slots=True)
class Clip:
    """pixels (T, H, W, C) float32 in [-1, 1], and a text that describes them."""

    pixels: np.ndarray
    text: str


def simulate(seed: int, frames: int, height: int, width: int) -> Clip:
    """One or two balls in a box with a floor: gravity, elastic walls, no contact of the balls."""
    random = np.random.default_rng(seed)
    names = list(random.choice(list(COLOURS), size=random.integers(1, 3), replace=False))
    box = np.array([width, height], dtype=float)
    radius = min(height, width) / 10
    centers = radius + random.random((len(names), 2)) * (box - 2 * radius)
    velocity = random.normal(0, 0.9, (len(names), 2)) * box
    heavy = bool(random.integers(2))
    acceleration = np.array([0.0, GRAVITY * height / 32 if heavy else 0.0])
    pictures = np.empty((frames, height, width, 3), dtype=np.float32)
    for frame in range(frames):
        pictures[frame] = draw(centers, radius, names, height, width)
        for _ in range(PHYSICS_STEPS):
            velocity = velocity + acceleration * FRAME_SECONDS / PHYSICS_STEPS
            centers = centers + velocity * FRAME_SECONDS / PHYSICS_STEPS
            outside = (centers < radius) | (centers > box - radius)
            inwards = np.where(centers < radius, np.abs(velocity), -np.abs(velocity))
            velocity = np.where(outside, inwards, velocity)
            centers = np.clip(centers, radius, box - radius)
    text = " and ".join(f"a {name} ball" for name in names)
    return Clip(pictures, f"{text} {'falling' if heavy else 'flying'}")


def draw(
    centers: np.ndarray, radius: float, names: Sequence[str], height: int, width: int
) -> np.ndarray:
    """A picture (H, W, 3) in [-1, 1]: discs with soft edges on black.

    Args:
        centers: (balls, 2), x and y in pixels.
    """
    y, x = np.mgrid[0:height, 0:width] + 0.5
    picture = np.zeros((height, width, 3))
    for (ball_x, ball_y), name in zip(centers, names, strict=True):
        distance = np.hypot(x - ball_x, y - ball_y)
        opacity = np.clip(radius - distance + 0.5, 0, 1)[..., None]
        picture = picture * (1 - opacity) + opacity * np.array(COLOURS[name])
    return (2 * picture - 1).astype(np.float32)


def read_folder(folder: Path, frames: int, height: int, width: int) -> list[Clip]:
    """Clips of `frames` pictures each, from a folder of frames or a folder of such folders.

    Args:
        folder: holds .png files (or .npy files (H, W, 3), 0..255), in the order of their names;
            a clip's text is the name of its folder.

    Raises:
        ValueError: if no folder holds enough frames, or a frame is too small.
    """
    clips: list[Clip] = []
    for clip_folder in sorted({path.parent for path in folder.rglob("*") if _is_frame(path)}):
        files = sorted(path for path in clip_folder.iterdir() if _is_frame(path))
        for start in range(0, len(files) - frames + 1, frames):
            paths = files[start : start + frames]
            pixels = np.stack([_read_frame(path, height, width) for path in paths])
            clips.append(Clip(pixels, clip_folder.name.replace("_", " ")))
    if not clips:
        raise ValueError(f"--video-dir {folder} has no folder with {frames} .png or .npy frames")
    return clips


def _is_frame(path: Path) -> bool:
    return path.suffix in (".png", ".npy")


def _read_frame(path: Path, height: int, width: int) -> np.ndarray:
    """A frame in [-1, 1], subsampled and center-cropped to (height, width, 3)."""
    if path.suffix == ".npy":
        picture = np.load(path).astype(np.float32) / 255
    else:
        from matplotlib.image import imread

        picture = np.asarray(imread(path), dtype=np.float32)
    if picture.ndim == 2:
        picture = np.repeat(picture[..., None], 3, axis=2)
    stride = min(picture.shape[0] // height, picture.shape[1] // width)
    if stride < 1:
        raise ValueError(f"{path} is {picture.shape[:2]}, smaller than {(height, width)}")
    picture = picture[::stride, ::stride, :3]
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    return 2 * picture[top : top + height, left : left + width] - 1


def to_batch(clips: Sequence[Clip], text_length: int) -> tuple[Tensor, Tensor]:
    """video (B, T, H, W, C) float32 and text (B, L) bytes, truncated or padded with spaces."""
    texts = [clip.text.encode()[:text_length].ljust(text_length) for clip in clips]
    pixels = torch.from_numpy(np.stack([clip.pixels for clip in clips]))
    return pixels, torch.tensor([list(text) for text in texts])
