"""The video transformer under DSP, Ulysses, rings and their mix: training equals one rank's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, run_threads

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples" / "video_dit")
    import train_video
    import video_data
    from video_model import VideoDiT, VideoDiTConfig, from_patches, to_patches
    from video_parallel import ParallelVideo, stages

SMALL = {"frames": 5, "height": 12, "width": 28, "patch": 4, "dim": 16, "heads": 4}
CONFIGS = sorted((ROOT / "configs" / "video_dit").glob("*.json"))
RING = {"route": {"name": "ring"}}
CONCENTRIC = {"route": {"name": "concentric", "team_size": 2}}


def small(stages, parallel, **sizes):
    model = {**SMALL, "stages": stages, "text_length": 9, **sizes}
    return {"model": model, "parallel": parallel, "training": {"batch": 2, "lr": 0.01, "seed": 3}}


def gradients(comm, words):
    """Loss, and the gradients of all parameters, of a model without zeros, in float64."""
    config = VideoDiTConfig(**words["model"])
    model = VideoDiT(config).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype) * 0.2)
    spread = ParallelVideo(model, words["parallel"], comm)
    batch = train_video.make_batch(config, None, 0, words["training"])
    loss = train_video.flow_loss(model, batch, 0, torch.float64)
    loss.backward()
    spread.average_gradients()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), grads, spread.tracker.switches, dict(comm.sent)


TWO = ("space", "time", "space", "time")
WAYS = [
    (TWO, {"switch": True}, 4),
    (("time", "time", "space", "space", "time"), {"switch": True}, 2),  # kept where it may be
    (TWO, {"switch": False, "wallfacer": RING}, 0),
    (TWO, {"switch": False, "wallfacer": {"route": "all_gather", "strategy": "lss"}}, 0),
]


def assert_exact(words, num_ranks, switches=None):
    ((right, wanted, *_),) = run_threads(1, gradients, words | {"parallel": {"switch": True}})
    for loss, grads, counted, _ in run_threads(num_ranks, gradients, words):
        assert loss == pytest.approx(right, abs=1e-10)
        assert switches is None or counted == switches
        for name, grad in wanted.items():
            assert grad.abs().max() > 0, name
            assert (grads[name] - grad).abs().max() < 1e-10, name


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_gradients_are_exact(num_ranks, way):
    """5 frames and 21 places: no number of ranks divides them, 6 and 8 ranks have no frame."""
    stages, parallel, switches = WAYS[way]
    assert_exact(small(stages, parallel), num_ranks, switches - (parallel["switch"] and way == 0))


@pytest.mark.parametrize("num_ranks", (2, 4, 8))
def test_ulysses_and_concentric_rings(num_ranks):
    ulysses = {"switch": False, "wallfacer": {"ulysses_degree": min(4, num_ranks)}}
    assert_exact(small(TWO, ulysses, frames=2), num_ranks)
    if num_ranks > 2:
        assert_exact(small(TWO, {"switch": False, "wallfacer": CONCENTRIC}), num_ranks)


@pytest.mark.parametrize("num_ranks", (2, 4))
@pytest.mark.parametrize("route", (RING, {"ulysses_degree": 2}))
def test_a_mix_of_switches_and_attention_over_everything(num_ranks, route):
    stages = ("space", "full", "time", "full", "space")
    words = small(stages, {"switch": True, "wallfacer": route}, frames=4, width=32)
    assert_exact(words, num_ranks)


def test_derived_bytes_of_a_pair_of_blocks():
    """(P - 1) / P of a rank's activation for each switch, as much backward."""
    words = small(TWO, {"switch": True}, frames=8, width=32)
    for *_, sent in run_threads(4, gradients, words):
        unit = 2 * (8 // 4) * 24 * 16 * 8  # batch, frames, places, dim, float64
        assert sent["forward switch"] == sent["backward switch"] == 3 * unit * 3 // 4
        assert sent["forward gather"] == 3 * unit * 3  # 48 values a token for 16
        assert not sent.get("backward split") and not sent.get("backward gather")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_published_configs_train_as_one_rank(path):
    words = json.loads(path.read_text())
    one = words | {"parallel": {"switch": True}}
    (right,) = run_threads(1, train_video.train, one, 3)
    for losses in run_threads(4, train_video.train, words, 3):
        assert losses == pytest.approx(right, abs=1e-5)
    assert right[-1] < right[0]


def test_patches_are_there_and_back():
    config = VideoDiTConfig(**SMALL)
    video = torch.randn(2, 5, 12, 28, 3)
    assert torch.equal(from_patches(to_patches(video, 4), config), video)


def test_simulated_clips_move_and_say_what_they_show():
    clip = video_data.simulate(1, 8, 32, 32)
    assert clip.pixels.shape == (8, 32, 32, 3) and np.abs(clip.pixels).max() <= 1
    assert (clip.pixels[0] != clip.pixels[-1]).any() and "ball" in clip.text
    assert (video_data.simulate(1, 8, 32, 32).pixels == clip.pixels).all()


def test_frames_of_a_folder_are_clips(tmp_path: Path):
    (tmp_path / "a_cat_runs").mkdir()
    for index in range(7):
        picture = np.full((40, 50, 3), 10 * index, dtype=np.uint8)
        np.save(tmp_path / "a_cat_runs" / f"{index}.npy", picture)
    clips = video_data.read_folder(tmp_path, 3, 32, 32)
    assert [clip.text for clip in clips] == ["a cat runs"] * 2
    assert clips[1].pixels.shape == (3, 32, 32, 3)
    assert clips[1].pixels[0, 0, 0, 0] == pytest.approx(2 * 30 / 255 - 1)
    with pytest.raises(ValueError, match="has no folder with 9"):
        video_data.read_folder(tmp_path, 9, 32, 32)
    with pytest.raises(ValueError, match="smaller than"):
        video_data.read_folder(tmp_path, 3, 64, 64)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"stages": ("space", "depth")}, "stages must be of"),
        ({"patch": 5}, "patch must divide height 12"),
        ({"heads": 3}, "dim must be a multiple of 2 x heads 3"),
    ],
)
def test_bad_models_are_refused(words, says):
    with pytest.raises(ValueError, match=says):
        VideoDiTConfig(**{**SMALL, **words})


def test_attention_over_everything_refuses_a_cut_that_does_not_divide():
    words = small(("time", "full"), {"switch": True, "wallfacer": RING})
    with pytest.raises(ValueError, match="contiguous"):
        run_threads(2, gradients, words)


@pytest.mark.parametrize(("first", "cut"), [("space", "time"), ("time", "space")])
def test_the_first_stage_finds_what_it_needs_whole(first, cut):
    model = VideoDiT(VideoDiTConfig(**SMALL, stages=(first, "full")))
    assert stages(model, switch=True).starts_along == cut
    assert stages(model, switch=False).needs == {}


def test_an_unknown_parallel_key_is_refused():
    words = small(TWO, {"swich": True})
    with pytest.raises(ValueError, match="unknown key 'swich'"):
        run_threads(1, gradients, words)
