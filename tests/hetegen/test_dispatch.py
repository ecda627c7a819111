"""Memory, refusals and faults."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import Plain, fast_device, make_model, split_memory
from wf_backends._validation import parse_bytes
from wf_backends.hetegen import ShapedDevice, dispatch_model
from wf_backends.hetegen.split_model import SplitWeight
from wf_backends.weights.plan import LANE_NAMES, LaneName


def lane_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.split("_")[0] in LANE_NAMES]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("20GB", 20 * 10**9), ("1.5GiB", 3 * 2**29), ("7 kib", 7 * 1024), ("12B", 12), (5, 5)],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes("it", text) == nbytes


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        ({0: "20 parsecs"}, r"max_memory\[0\].*'20 parsecs'"),
        ({0: -1}, r"max_memory\[0\].*-1"),
        ({0: "9" * 400 + "GB"}, r"max_memory\[0\] must be a number of bytes .* got '999"),
        ({0: True}, r"max_memory\[0\].*True"),
        ({"accelerator": "GB"}, r"max_memory\['accelerator'\].*'GB'"),
        ({0: "1GB", "cpu": 1.5}, r"max_memory\['cpu'\].*1.5"),
        ({0: "1GB", 1: "1GB"}, r"may have the keys 0 .*got 1"),
        ({0: "1GB", "cpus": "1GB"}, r"got 'cpus'; did you mean 'cpu'\?"),
        ({0: "1GB", "accelerator": "1GB"}, "both 0 and"),
        ({"cpu": "1GB"}, "must say how much of the accelerator"),
        ({0: 100}, r"max_memory\[0\] must be at least 1792 bytes.*got 100"),
        ({0: 30_000, "cpu": 60_000}, r"max_memory\[\"cpu\"\] must be at least .*got 60000"),
    ],
)
def test_bad_memory_is_refused(memory: dict[int | str, int | str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        dispatch_model(Plain(), memory, fast_device())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"alpha": 1.5}, 'alpha must be "auto" or a share from 0 to 1, got 1.5'),
        ({"alpha": "best"}, "alpha must be .* got 'best'"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, got -1"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"prompt": 2.0}, "prompt must be a whole number of at least 1, got 2.0"),
    ],
)
def test_bad_settings_are_refused(words: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        dispatch_model(Plain(), {0: 30_000}, fast_device(), **words)


def test_nothing_to_split_is_refused() -> None:
    with pytest.raises(ValueError, match="LayerNorm has nothing to split"):
        dispatch_model(nn.LayerNorm(8), {0: "1GB"}, fast_device())


def test_what_fits_is_resident_with_a_warning() -> None:
    model, device = Plain(), fast_device()
    with pytest.warns(UserWarning, match="takes 66560 bytes and fits .* 1000000: it is simply"):
        handle = dispatch_model(model, {0: "1MB"}, device)
    assert handle.plan.fits and device.peak_bytes == 66560
    assert all(type(layer.weight) is nn.Parameter for layer in model.layers)
    assert handle.report() == {"fits": True}
    handle.remove()
    assert device.bytes == 0


def test_memory_is_given_back_though_the_handle_lives() -> None:
    placed, device = list[weakref.ref[Tensor]](), fast_device()

    def noted(take: Callable[..., Tensor], of: object) -> Tensor:
        tensor = take(of)
        placed.append(weakref.ref(tensor))
        return tensor

    device.place = partial(noted, device.place)  # type: ignore[method-assign]
    device.pinned = partial(noted, device.pinned)  # type: ignore[method-assign]
    model = Plain()
    handle = dispatch_model(model, split_memory(model, 0.5), device)
    with torch.no_grad():
        model(torch.ones(1, 64))
    slabs_and_rows = handle.plan.slabs * 2 + len(handle.plan.splits)  # slabs and what is pinned
    assert sum(tensor() is not None for tensor in placed) == slabs_and_rows
    handle.remove()
    gc.collect()
    assert all(tensor() is None for tensor in placed)
    assert handle.report()["decode"]["passes"] == 1


def test_gradients_are_refused() -> None:
    model = Plain()
    with dispatch_model(model, {0: 30_000}, fast_device()):
        with pytest.raises(NotImplementedError, match=r"under torch\.no_grad\(\)"):
            model(torch.randn(1, 64, requires_grad=True))


def test_without_pinned_memory_copies_are_pageable_and_the_warning_names_the_cost() -> None:
    class NonePinned(ShapedDevice):
        def pinned(self, nbytes: int) -> Tensor:
            raise MemoryError("none is left")

    model, x = Plain(), torch.randn(1, 64)
    device = NonePinned(1e7, 1e7, 1e9)
    with pytest.warns(UserWarning, match=r"5e\+06 bytes/s instead of 1e\+07.*s instead of"):
        handle = dispatch_model(model, {0: 20_000}, device)
    with torch.no_grad():
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
    assert device.pinned_bytes == 0 and handle.plan.rates.link == 5e6
    assert handle.plan.splits[0].alpha("decode") > 0.5
    handle.remove()


def test_pinned_memory_may_be_declined() -> None:
    device = fast_device()
    weights = 4 * 64 * 64 * 4  # no more is needed of the host
    memory: dict[int | str, int | str] = {0: 20_000, "cpu": weights}
    with pytest.raises(ValueError, match=rf"at least {weights + 2304} bytes.* got {weights}$"):
        dispatch_model(Plain(), memory, device)
    with dispatch_model(Plain(), memory, device, pin_memory=False) as handle:
        assert device.pinned_bytes == 0 and handle.plan.rates.link == 5e7


SLOW = 1e5  # times slower than before


class Broken(ShapedDevice):
    """From some work on one of its lanes raises, while all others are very slow."""

    def __init__(self, lane: LaneName) -> None:
        super().__init__(1e8, 2e8, 1e10, call_seconds=0)
        self.lane, self.broken, self.raised = lane, False, 0.0

    def fail(self) -> None:
        self.raised = time.perf_counter()
        raise OSError(f"no {self.lane}")

    def submit(self, lane, run, *rest):  # type: ignore[no-untyped-def]
        if self.broken and lane == self.lane:
            return super().submit(lane, self.fail)
        return super().submit(lane, run, *rest)

    def _seconds(self, lane: str, nbytes: int) -> float:
        return super()._seconds(lane, nbytes) * (SLOW if self.broken else 1.0)


@pytest.mark.parametrize("lane", LANE_NAMES)
def test_an_error_in_a_lane_reaches_the_caller_while_others_work_and_threads_end(
    lane: LaneName,
) -> None:
    model, x, device = Plain(), torch.randn(1, 64), Broken(lane)
    expected = Plain()(x).detach()
    handle = dispatch_model(model, {0: 30_000}, device)
    with torch.no_grad():
        model(x)
        device.broken = True
        with pytest.raises(OSError, match=f"no {lane}"):
            model(x)
        waited = time.perf_counter() - device.raised
        assert waited < SLOW * handle.plan.decode_seconds / 8  # half a call at these rates
        assert lane_threads() == []
        device.broken = False
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert lane_threads() == [] and torch.equal(model(x), expected)


@pytest.fixture
def _ctrl_c_interrupts() -> Iterator[None]:
    """A job of a shell's background begins with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_interrupts")
def test_ctrl_c_in_the_middle_of_a_slow_copy() -> None:
    model, x = Plain(), torch.randn(1, 64)
    handle = dispatch_model(model, {0: 20_000}, ShapedDevice(1e3, 1e3, 1e9), alpha=0.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(x)
    assert time.perf_counter() - start < handle.plan.decode_seconds / 4
    assert lane_threads() == []
    handle.remove()
    assert torch.equal(model(x), Plain()(x))


def test_an_error_while_memory_is_taken_leaves_the_model_as_it_was() -> None:
    class Full(ShapedDevice):
        def place(self, tensor: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model, device = Plain(), Full(1e8, 2e8, 1e10)
    with pytest.raises(RuntimeError, match="out of memory"):
        dispatch_model(model, {0: 20_000}, device)
    assert all(type(layer.weight) is nn.Parameter for layer in model.layers)
    assert (device.bytes, device.pinned_bytes) == (0, 0)


def test_the_first_layers_copies_start_before_the_last_token_is_sampled() -> None:
    """What a pass leaves in the slabs is not copied again by the next one."""
    model = make_model("llama")
    device = fast_device()
    handle = dispatch_model(model, split_memory(model, 0.4), device, alpha=0.0)
    submitted: list[float] = []
    sampled: list[float] = []
    real = device.submit

    def note(lane, *work):  # type: ignore[no-untyped-def]
        if lane == "link":
            submitted.append(time.perf_counter())
        return real(lane, *work)

    device.submit = note  # type: ignore[method-assign]

    def sample(ids: Tensor, scores: Tensor) -> Tensor:
        sampled.append(time.perf_counter())
        return scores

    ids = torch.ones(1, 4, dtype=torch.long)
    words = {"attention_mask": ids, "pad_token_id": 0, "max_new_tokens": 3}
    model.generate(ids, logits_processor=[sample], **words)  # type: ignore[operator]
    ahead = [job for job in handle._runner._maker._prefetched if job.linear == 0]  # type: ignore[union-attr]
    assert ahead and submitted[-1] < sampled[-1]
    handle.remove()


def test_what_a_call_takes_beside_its_lanes_is_measured_whatever_their_rates() -> None:
    """It goes into the next prediction, so that what lanes do is not counted twice."""

    class Thinking(Plain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                start = time.perf_counter()
                time.sleep(2e-3)
                thought.append(time.perf_counter() - start)
                x = layer(x)
            return x

    for rate in (3e4, 6e4):
        model, device = Thinking(), ShapedDevice(rate, rate, 1e9, call_seconds=0)
        thought: list[float] = []
        with dispatch_model(model, {0: 20_000}, device) as handle, torch.no_grad():
            for _ in range(3):
                model(torch.randn(1, 64))
            lane = handle.report()["lanes"]["link"]["busy_seconds"] / len(thought)
            beside = handle.report()["decode"]["call_seconds"] - sum(thought) / len(thought)
            assert abs(beside) < lane / 2  # which is the whole lane where its time is counted


def test_the_same_module_in_two_places_is_replaced_in_both() -> None:
    model = Plain(2)
    model.layers.append(model.layers[0])
    x = torch.randn(1, 64)
    expected: Callable = nn.Sequential(*(m for layer in model.layers for m in (layer, nn.Tanh())))
    with torch.no_grad():
        y = expected(x)
        with dispatch_model(model, {0: 10_000}, fast_device()) as handle:
            assert len(handle.plan.splits) == 2
            assert all(type(layer.weight) is SplitWeight for layer in model.layers)
            for _ in range(2):
                torch.testing.assert_close(model(x), y, rtol=0, atol=1e-5)
