"""The accelerator's lanes on a stand-in for streams, which counts who waits for what."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import Plain, make_model, split_memory
from wf_backends.hetegen import Handle, Rates, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator, HostOutput, Streams
from wf_backends.hetegen.device import Write
from wf_backends.hetegen.measure import measure_rates

RATES = Rates(1e8, 2e8, 1e10)
SOON = 5.0  # seconds in which what a stream waits for has to come


class Event:
    def __init__(self, counts: Counter) -> None:
        self.recorded, self.passed, self.counts = False, threading.Event(), counts
        self.time = 0.0

    def record(self, stream: Stream) -> None:
        self.recorded = True
        stream.put(self._pass)

    def _pass(self) -> None:
        self.time = time.perf_counter()
        self.passed.set()

    def synchronize(self) -> None:
        assert self.recorded  # torch returns at once from an event that nobody recorded
        self.counts[threading.current_thread().name.split("_")[0]] += 1
        assert self.passed.wait(SOON)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class Stream:
    """Does what is put on it in a thread of its own, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                self._queue.get()()

    def put(self, run: Callable[[], object]) -> None:
        self._queue.put(run)

    def wait_event(self, event: Event) -> None:
        assert event.recorded  # torch does not wait for one that is not
        self.put(lambda: event.passed.wait(SOON) or event.counts.update(late=1))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Current(Stream):
    """The caller's stream: a CPU computes at once, and so it waits where a device would."""

    def __init__(self) -> None:
        pass

    def put(self, run: Callable[[], object]) -> None:
        run()


class StandIn(Streams):
    """Streams of a CPU."""

    def __init__(self, pins: bool = True) -> None:
        self.device = torch.device("cpu")
        self.counts: Counter = Counter()
        self.pins = pins
        self.streams: list[Stream] = []

    def stream(self) -> Stream:  # type: ignore[override]
        self.streams.append(Stream())
        return self.streams[-1]

    def event(self, timed: bool = False) -> Event:  # type: ignore[override]
        return Event(self.counts)

    def current(self) -> Stream:  # type: ignore[override]
        return Current()

    def synchronize(self) -> None:
        self.counts["all"] += 1
        for stream in self.streams:
            done = threading.Event()
            stream.put(done.set)
            assert done.wait(SOON)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self.pins:
            raise RuntimeError("cannot pin")
        return torch.empty(shape, dtype=dtype)

    def copy(self, stream: Stream, source: Tensor, target: Tensor) -> None:  # type: ignore[override]
        stream.put(lambda: target.copy_(source))


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_the_same_tokens_and_the_caller_never_waits_for_the_device(name: str) -> None:
    model, ids = make_model(name), torch.randint(3, 90, (2, 7))
    words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    expected = model.generate(ids, **words)  # type: ignore[operator]
    streams = StandIn()
    handle = dispatch_model(model, split_memory(model, 0.5), Accelerator(RATES, streams))
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]
    assert set(streams.counts) == {"host", "link"}  # and not the main thread
    assert handle.report()["decode"]["measured_seconds"] > 0
    handle.remove()
    assert streams.counts["all"] == 1  # at the end, before memory is given back
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]


def test_no_thread_has_work_left_that_the_callers_stream_needs() -> None:
    """Code that keeps Python's lock while it waits for the device would keep it from the thread."""
    model, device, filled = Plain(), Accelerator(RATES, StandIn()), list[HostOutput]()
    handle = dispatch_model(model, {0: 20_000}, device, alpha=0.5)
    compute_on_host = device.compute_on_host

    def slow(write: Write, *rest: Any) -> HostOutput:
        filled.append(compute_on_host(lambda x, out: (time.sleep(0.01), write(x, out)), *rest))
        return filled[-1]

    device.compute_on_host = slow  # type: ignore[method-assign]
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: left.append(not filled[-1].computing.done()))
    left = list[bool]()
    with torch.no_grad():
        model(torch.randn(1, 64))
    handle.remove()
    assert left == [False] * len(model.layers)


def test_without_pinned_memory() -> None:
    model, x = Plain(), torch.randn(1, 64)
    with pytest.warns(UserWarning, match="pinned memory ran out"):
        handle = dispatch_model(model, {0: 20_000}, Accelerator(RATES, StandIn(pins=False)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
    handle.remove()


@contextmanager
def failing(model: nn.Module) -> Iterator[tuple[Handle, Accelerator]]:
    """The model with a host's lane that fails until `device.compute_on_host` is deleted."""
    device = Accelerator(RATES, StandIn())
    handle = dispatch_model(model, {0: 20_000}, device, alpha=0.5)
    compute_on_host = device.compute_on_host

    def fail(x: Tensor, there: Tensor) -> None:
        raise OSError("no way back")

    device.compute_on_host = lambda _, *rest: compute_on_host(fail, *rest)  # type: ignore[method-assign]
    with torch.no_grad():
        yield handle, device


def test_an_error_of_the_hosts_thread_reaches_the_caller() -> None:
    model, x, start = Plain(), torch.randn(1, 64), time.perf_counter()
    with failing(model) as (handle, device):
        with pytest.raises(OSError, match="no way back"):
            model(x)
        assert time.perf_counter() - start < SOON
        del device.compute_on_host
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
        handle.remove()


def test_after_an_error_no_stream_has_work_left_that_uses_memory() -> None:
    """A copy into a slab that comes later than the error would be one of memory that is free."""
    model = Plain()
    with failing(model) as (handle, device):
        late, stream = threading.Event(), device.streams.stream()
        stream.put(lambda: time.sleep(1))  # type: ignore[attr-defined]
        stream.put(late.set)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="no way back"):
            model(torch.randn(1, 64))
        assert late.is_set()
        del device.compute_on_host
        handle.remove()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_the_message_names_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no accelerator here.*device=ShapedDevice\("):
        dispatch_model(Plain(), {0: 30_000})


@pytest.mark.parametrize("streams", [None, StandIn()])
def test_rates_are_measured(streams: StandIn | None) -> None:
    rates = measure_rates(streams, torch.float32, width=2048, seconds=0.02)
    assert rates.memory < float("inf") and rates.staging < float("inf")
    assert rates.host_flops < float("inf") and rates.accelerator_flops < float("inf")
