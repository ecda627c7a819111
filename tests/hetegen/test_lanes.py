"""The lanes of a simulated device: errors, Ctrl-C, prefetching, and the time between calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.hetegen.models import MLP, MLP_SPLIT, fast_device, make_model, max_memory
from wf_backends.hetegen import ShapedDevice, dispatch_model
from wf_backends.hetegen.weights.plan import LANE_NAMES, LaneName

SLOWDOWN = 1e5  # of the lanes that go on after another lane has failed


def lane_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.split("_")[0] in LANE_NAMES]


class FailingDevice(ShapedDevice):
    """While `failing`, all work of one lane raises, and all other lanes are very slow."""

    def __init__(self, lane: LaneName) -> None:
        super().__init__(1e8, 2e8, 1e10, call_seconds=0)
        self.lane, self.failing, self.failure_time = lane, False, 0.0

    def fail(self) -> None:
        self.failure_time = time.perf_counter()
        raise OSError(f"{self.lane} failed")

    def submit(self, lane, run, *args):  # type: ignore[no-untyped-def]
        if self.failing and lane == self.lane:
            return super().submit(lane, self.fail)
        return super().submit(lane, run, *args)

    def _seconds(self, lane: str, nbytes: int) -> float:
        return super()._seconds(lane, nbytes) * (SLOWDOWN if self.failing else 1.0)


@pytest.mark.parametrize("lane", LANE_NAMES)
def test_an_error_in_a_lane_is_raised_while_other_lanes_work_and_all_threads_end(
    lane: LaneName,
) -> None:
    model, x, device = MLP(), torch.randn(1, 64), FailingDevice(lane)
    expected = MLP()(x).detach()
    handle = dispatch_model(model, MLP_SPLIT, device)
    with torch.no_grad():
        model(x)
        device.failing = True
        with pytest.raises(OSError, match=f"{lane} failed"):
            model(x)
        seconds = time.perf_counter() - device.failure_time
        one_call = SLOWDOWN * handle.plan.decode_seconds / len(model.layers)
        assert seconds < one_call / 2
        assert lane_threads() == []
        device.failing = False
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert lane_threads() == [] and torch.equal(model(x), expected)


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; a shell's background job starts with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_interrupts_a_slow_copy_and_all_threads_end() -> None:
    model, x = MLP(), torch.randn(1, 64)
    handle = dispatch_model(model, {0: 20_000}, ShapedDevice(1e3, 1e3, 1e9), alpha=0.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        timer.start()
        model(x)
    assert time.perf_counter() - start < handle.plan.decode_seconds / 4
    assert lane_threads() == []
    handle.remove()
    assert torch.equal(model(x), MLP()(x))


def test_the_first_layers_copies_for_a_token_start_before_the_last_token_is_sampled() -> None:
    """A pass does not copy again what the pass before it left in the slabs."""
    model, device = make_model("llama"), fast_device()
    handle = dispatch_model(model, max_memory(model, 0.4), device, alpha=0.0)
    copy_times: list[float] = []
    sample_times: list[float] = []
    submit = device.submit

    def submit_with_time(lane, *args):  # type: ignore[no-untyped-def]
        if lane == "link":
            copy_times.append(time.perf_counter())
        return submit(lane, *args)

    def keep_sample_time(ids: Tensor, scores: Tensor) -> Tensor:
        sample_times.append(time.perf_counter())
        return scores

    device.submit = submit_with_time  # type: ignore[method-assign]
    ids = torch.ones(1, 4, dtype=torch.long)
    model.generate(  # type: ignore[operator]
        ids,
        attention_mask=ids,
        pad_token_id=0,
        max_new_tokens=3,
        logits_processor=[keep_sample_time],
    )
    prefetched = handle._runner._maker._prefetched  # type: ignore[union-attr]
    assert any(job.linear == 0 for job in prefetched)
    assert copy_times[-1] < sample_times[-1]
    handle.remove()


def test_measured_call_seconds_are_the_models_own_time_without_that_of_the_lanes() -> None:
    """The next prediction adds them to the time of the lanes, which must not count twice.

    Beside a model whose lanes take no time: threads that wake late on a busy machine delay both.
    """
    own_seconds = 2e-3  # at least, of each call

    class SlowMLP(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                time.sleep(own_seconds)
                x = layer(x)
            return x

    handles = [
        dispatch_model(SlowMLP(), {0: 20_000}, ShapedDevice(rate, rate, 1e9, call_seconds=0))
        for rate in (3e4, 1e9)
    ]
    with torch.no_grad():
        for handle in 3 * handles:
            handle.model(torch.randn(1, 64))
    reports = [handle.report() for handle in handles]
    beside_slow, beside_fast = (report["decode"]["call_seconds"] for report in reports)
    lane_seconds = reports[0]["lanes"]["link"]["busy_seconds"] / (3 * len(MLP().layers))
    assert min(beside_slow, beside_fast) >= own_seconds
    assert abs(beside_slow - beside_fast) < lane_seconds / 2  # else it would be lane_seconds
    for handle in handles:
        handle.remove()
