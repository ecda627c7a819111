"""The video transformer under DSP, Ulysses, rings and their mix: training equals one rank's."""

from __future__ import annotations

import json

import pytest
import torch

from tests.dsp.video import (
    RING,
    SMALL,
    SWITCH,
    TWO_PAIRS,
    VideoDiT,
    VideoDiTConfig,
    from_patches,
    gradients,
    small_video,
    stages,
    to_patches,
    train_video,
)
from tests.helpers import ROOT, run_threads

PUBLISHED = sorted((ROOT / "configs" / "video_dit").glob("*.json"))
CONCENTRIC = {"route": {"name": "concentric", "team_size": 2}}
WAYS = {  # name -> (stages, parallel, switches)
    "dsp": (TWO_PAIRS, SWITCH, 3),
    "dsp, stages repeated": (("time", "time", "space", "space", "time"), SWITCH, 2),
    "ring": (TWO_PAIRS, {"switch": False, "wallfacer": RING}, 0),
    "lss": (
        TWO_PAIRS,
        {"switch": False, "wallfacer": {"route": "all_gather", "strategy": "lss"}},
        0,
    ),
}


def assert_exact(config, num_ranks, switches=None):
    """Check loss and gradients of all ranks against those of one rank."""
    on_one_rank = config | {"parallel": SWITCH}
    ((expected_loss, expected_grads, *_),) = run_threads(1, gradients, on_one_rank)
    for loss, grads, num_switches, _ in run_threads(num_ranks, gradients, config):
        assert loss == pytest.approx(expected_loss, abs=1e-10)
        assert switches is None or num_switches == switches
        for name, expected in expected_grads.items():
            assert expected.abs().max() > 0, name
            assert (grads[name] - expected).abs().max() < 1e-10, name


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 4, 6, 8))
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_exact(num_ranks, way):
    stages, parallel, switches = WAYS[way]
    assert_exact(small_video(stages, parallel), num_ranks, switches)


@pytest.mark.parametrize("num_ranks", (2, 4, 8))
def test_gradients_are_exact_under_ulysses(num_ranks):
    ulysses = {"switch": False, "wallfacer": {"ulysses_degree": min(4, num_ranks)}}
    assert_exact(small_video(TWO_PAIRS, ulysses, frames=2), num_ranks)


@pytest.mark.parametrize("num_ranks", (4, 8))
def test_gradients_are_exact_under_concentric_rings(num_ranks):
    rings = {"switch": False, "wallfacer": CONCENTRIC}
    assert_exact(small_video(TWO_PAIRS, rings), num_ranks)


@pytest.mark.parametrize("num_ranks", (2, 4))
@pytest.mark.parametrize("attention", (RING, {"ulysses_degree": 2}), ids=("ring", "ulysses"))
def test_gradients_are_exact_under_switches_and_attention_over_all_places(num_ranks, attention):
    stages = ("space", "full", "time", "full", "space")
    parallel = {"switch": True, "wallfacer": attention}
    assert_exact(small_video(stages, parallel, frames=4, width=32), num_ranks)


def test_bytes_of_two_pairs_of_blocks_are_as_derived():
    """Each of three switches sends (P - 1) / P of a rank's activation, in either pass."""
    config = small_video(TWO_PAIRS, SWITCH, frames=8, width=32)
    for *_, sent in run_threads(4, gradients, config):
        activation = 2 * (8 // 4) * 24 * 16 * 8  # batch, frames, places, dim, float64
        assert sent["forward switch"] == sent["backward switch"] == 3 * activation * 3 // 4
        assert sent["forward gather"] == 3 * activation * 3  # 48 values a place for 16
        assert not sent.get("backward split") and not sent.get("backward gather")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_configs_train_as_one_rank(path):
    """In float32: losses of three steps agree to 1e-5."""
    config = json.loads(path.read_text())
    (expected,) = run_threads(1, train_video.train, config | {"parallel": SWITCH}, 3)
    for losses in run_threads(4, train_video.train, config, 3):
        assert losses == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]


def test_from_patches_undoes_to_patches():
    video = torch.randn(2, 5, 12, 28, 3)
    assert torch.equal(from_patches(to_patches(video, 4), VideoDiTConfig(**SMALL)), video)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"stages": ("space", "depth")}, "stages must be of"),
        ({"patch": 5}, "patch must divide height 12"),
        ({"heads": 3}, "dim must be a multiple of 2 x heads 3"),
    ],
)
def test_malformed_models_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        VideoDiTConfig(**{**SMALL, **keys})


def test_attention_over_all_places_refuses_frames_that_do_not_divide():
    """5 frames on 2 ranks."""
    config = small_video(("time", "full"), {"switch": True, "wallfacer": RING})
    with pytest.raises(ValueError, match="contiguous"):
        run_threads(2, gradients, config)


@pytest.mark.parametrize(("first_stage", "starts_along"), [("space", "time"), ("time", "space")])
def test_the_video_is_cut_first_along_what_the_first_stage_does_not_need(first_stage, starts_along):
    model = VideoDiT(VideoDiTConfig(**SMALL, stages=(first_stage, "full")))
    assert stages(model, switch=True).starts_along == starts_along


def test_without_switches_no_stage_needs_a_dimension():
    model = VideoDiT(VideoDiTConfig(**SMALL, stages=("space", "full")))
    assert stages(model, switch=False).needs == {}


def test_an_unknown_parallel_key_is_refused():
    with pytest.raises(ValueError, match="unknown key 'swich'"):
        run_threads(1, gradients, small_video(TWO_PAIRS, {"swich": True}))
