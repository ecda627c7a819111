"""Clips for the video transformer: simulated ones, and frames in folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.dsp.video import video_data


def test_a_simulated_clip_moves_and_its_text_names_a_ball():
    clip = video_data.simulate(1, 8, 32, 32)
    assert clip.pixels.shape == (8, 32, 32, 3) and np.abs(clip.pixels).max() <= 1
    assert (clip.pixels[0] != clip.pixels[-1]).any() and "ball" in clip.text


def test_a_simulated_clip_is_the_same_for_the_same_seed():
    first, second = (video_data.simulate(1, 8, 32, 32) for _ in range(2))
    assert (first.pixels == second.pixels).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a video of 7 frames of 40 x 50; all pixels of frame i are 10 i."""
    (tmp_path / "a_cat_runs").mkdir()
    for i in range(7):
        frame = np.full((40, 50, 3), 10 * i, dtype=np.uint8)
        np.save(tmp_path / "a_cat_runs" / f"{i}.npy", frame)
    return tmp_path


def test_a_folder_of_7_frames_is_two_clips_of_3(folder: Path):
    clips = video_data.read_folder(folder, 3, 32, 32)
    assert [clip.text for clip in clips] == ["a cat runs"] * 2
    assert clips[1].pixels.shape == (3, 32, 32, 3)
    assert clips[1].pixels[0, 0, 0, 0] == pytest.approx(2 * 30 / 255 - 1)


def test_a_folder_with_too_few_frames_is_refused(folder: Path):
    with pytest.raises(ValueError, match="has no folder with 9"):
        video_data.read_folder(folder, 9, 32, 32)


def test_frames_that_are_too_small_are_refused(folder: Path):
    with pytest.raises(ValueError, match="smaller than"):
        video_data.read_folder(folder, 3, 64, 64)
