"""The lanes of `Accelerator`, with streams and events emulated by threads of the CPU."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import MLP, generate, make_ids, make_model, max_memory
from wf_backends.hetegen import Handle, Rates, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator, HostOutput, Streams
from wf_backends.hetegen.device import Write
from wf_backends.hetegen.measure import _rates_of_lanes, measure_rates

RATES = Rates(1e8, 2e8, 1e10)
MEMORY: dict[int | str, int | str] = {0: 20_000}  # of the 66,560 bytes of an MLP
TIMEOUT = 30.0  # seconds; what a stream waits for comes much earlier


class Event:
    """Passes when its stream reaches it. `waits` counts who waits for it on the CPU."""

    def __init__(self, waits: Counter[str]) -> None:
        self.recorded, self.passed, self.waits = False, threading.Event(), waits
        self.time = 0.0

    def record(self, stream: Stream) -> None:
        self.recorded = True
        stream.put(self._pass)

    def _pass(self) -> None:
        self.time = time.perf_counter()
        self.passed.set()

    def synchronize(self) -> None:
        assert self.recorded  # torch would not wait for an event that was not recorded
        self.waits[threading.current_thread().name.split("_")[0]] += 1
        assert self.passed.wait(TIMEOUT)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class Stream:
    """Does its work in order, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                self._queue.get()()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def wait_event(self, event: Event) -> None:
        assert event.recorded  # torch would not wait for an event that was not recorded
        self.put(lambda: event.passed.wait(TIMEOUT) or event.waits.update(timeout=1))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class CallerStream(Stream):
    """The caller's stream. The CPU computes at once, and so the caller waits as a GPU would."""

    def __init__(self) -> None:
        pass

    def put(self, work: Callable[[], object]) -> None:
        work()


class EmulatedStreams(Streams):
    """Streams of the CPU.

    Attributes:
        waits: "host", "link" or "MainThread" -> how often that thread waited for an event;
            "all" -> how often all streams were waited for; "timeout" -> waits of streams in vain.
    """

    def __init__(self, can_pin: bool = True) -> None:
        self.device = torch.device("cpu")
        self.waits: Counter[str] = Counter()
        self.can_pin = can_pin
        self.streams: list[Stream] = []

    def stream(self) -> Stream:  # type: ignore[override]
        self.streams.append(Stream())
        return self.streams[-1]

    def event(self, timed: bool = False) -> Event:  # type: ignore[override]
        return Event(self.waits)

    def current(self) -> Stream:  # type: ignore[override]
        return CallerStream()

    def synchronize(self) -> None:
        self.waits["all"] += 1
        for stream in self.streams:
            done = threading.Event()
            stream.put(done.set)
            assert done.wait(TIMEOUT)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self.can_pin:
            raise RuntimeError("cannot pin")
        return torch.empty(shape, dtype=dtype)

    def copy(self, stream: Stream, source: Tensor, target: Tensor) -> None:  # type: ignore[override]
        stream.put(lambda: target.copy_(source))


@pytest.mark.parametrize("pin_memory", [True, "weights"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_generated_tokens_are_equal_and_the_caller_never_waits_for_the_device(
    name: str, pin_memory: bool | str
) -> None:
    model, ids = make_model(name), make_ids(2, 7)
    expected = generate(model, ids, 5)
    streams = EmulatedStreams()
    device, memory = Accelerator(RATES, streams), max_memory(model, 0.5)
    handle = dispatch_model(model, memory, device, pin_memory=pin_memory)
    assert torch.equal(generate(model, ids, 5), expected)
    assert set(streams.waits) == {"host", "link"}  # the threads of the lanes, not the caller's
    assert handle.report()["decode"]["measured_seconds"] > 0
    handle.remove()
    assert streams.waits["all"] == 1  # before memory is freed
    assert torch.equal(generate(model, ids, 5), expected)


def test_the_hosts_rows_are_computed_before_the_call_of_a_linear_returns() -> None:
    """Otherwise a caller that waits for the GPU and holds Python's GIL would block the thread."""
    model, device = MLP(), Accelerator(RATES, EmulatedStreams())
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    compute_on_host = device.compute_on_host
    host_outputs: list[HostOutput] = []
    computed: list[bool] = []

    def compute_slowly(write: Write, *args: Any) -> HostOutput:
        host_outputs.append(
            compute_on_host(lambda x, out: (time.sleep(0.01), write(x, out)), *args)
        )
        return host_outputs[-1]

    device.compute_on_host = compute_slowly  # type: ignore[method-assign]
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: computed.append(host_outputs[-1].computing.done()))
    with torch.no_grad():
        model(torch.randn(1, 64))
    handle.remove()
    assert computed == [True] * len(model.layers)


def test_pinned_memory_of_the_hosts_inputs_and_outputs_is_allocated_once() -> None:
    model, streams, sizes = MLP(), EmulatedStreams(), list[int]()
    pinned = streams.pinned
    device = Accelerator(RATES, streams)
    with dispatch_model(model, MEMORY, device, alpha=0.5), torch.no_grad():
        streams.pinned = lambda shape, dtype: sizes.append(shape[0]) or pinned(shape, dtype)  # type: ignore[method-assign]
        for batch in (3, 1, 2, 3):
            x = torch.randn(batch, 64)
            torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
    assert sizes == [3 * 64 * 4, 3 * 32 * 4]  # inputs, and outputs of half of the rows


def test_the_hosts_next_output_waits_until_the_last_was_copied() -> None:
    """Both have the same memory. A caller may use another stream for each call."""
    streams = EmulatedStreams()
    slow, done = streams.stream(), threading.Event()
    device = Accelerator(RATES, streams)
    x, out = torch.ones(2), torch.zeros(2)
    streams.current = lambda: slow  # type: ignore[method-assign]
    with torch.inference_mode():
        computed = device.compute_on_host(lambda x, out: out.copy_(x), x, out, 8)
        computed.computing.result()
        slow.put(lambda: time.sleep(0.2))  # type: ignore[attr-defined]  # before the copy
        device.wait([computed])
        streams.current = CallerStream  # type: ignore[method-assign]
        other = torch.zeros(2)
        device.wait([device.compute_on_host(lambda x, out: out.fill_(7), x, other, 8)])
        slow.put(done.set)  # type: ignore[attr-defined]
        assert done.wait(TIMEOUT)
    device.close()
    assert out.tolist() == [1, 1] and other.tolist() == [7, 7]


def test_outputs_are_exact_without_pinned_memory_and_a_warning_is_given() -> None:
    model, x = MLP(), torch.randn(1, 64)
    with pytest.warns(UserWarning, match="pinned memory ran out"):
        handle = dispatch_model(model, MEMORY, Accelerator(RATES, EmulatedStreams(can_pin=False)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
    handle.remove()


@contextmanager
def failing_host_lane(model: nn.Module) -> Iterator[tuple[Handle, Accelerator]]:
    """Split the model; work of the host's lane fails until `device.compute_on_host` is deleted."""
    device = Accelerator(RATES, EmulatedStreams())
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    compute_on_host = device.compute_on_host

    def fail(x: Tensor, out: Tensor) -> None:
        raise OSError("host lane failed")

    device.compute_on_host = lambda _, *args: compute_on_host(fail, *args)  # type: ignore[method-assign]
    with torch.no_grad():
        yield handle, device


def test_an_error_in_the_hosts_thread_is_raised_by_the_call_and_the_next_call_is_exact() -> None:
    model, x, start = MLP(), torch.randn(1, 64), time.perf_counter()
    with failing_host_lane(model) as (handle, device):
        with pytest.raises(OSError, match="host lane failed"):
            model(x)
        assert time.perf_counter() - start < TIMEOUT
        del device.compute_on_host
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
        handle.remove()


def test_an_error_is_raised_only_after_all_streams_have_done_their_work() -> None:
    """A later copy into a slab would write memory that was freed since."""
    model = MLP()
    with failing_host_lane(model) as (handle, device):
        done, stream = threading.Event(), device.streams.stream()
        stream.put(lambda: time.sleep(1))  # type: ignore[attr-defined]
        stream.put(done.set)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="host lane failed"):
            model(torch.randn(1, 64))
        assert done.is_set()
        del device.compute_on_host
        handle.remove()


def test_on_cuda_every_stream_is_one_of_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.11 recording a torch.cuda.Event on a torch.Stream is an error, or worse."""

    class CudaStream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", CudaStream)
    monkeypatch.setattr(torch.cuda, "current_stream", CudaStream)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext()
    )
    streams = Streams.__new__(Streams)  # without asking torch for an accelerator
    streams.device = torch.device("cuda", 1)
    stream, current, target = streams.stream(), streams.current(), torch.zeros(2)
    streams.copy(stream, torch.ones(2), target)
    assert type(stream) is type(current) is CudaStream and entered == [stream]
    assert stream.device == current.device == torch.device("cuda", 1)
    assert torch.equal(target, torch.ones(2))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_error_names_shaped_device() -> None:
    with pytest.raises(ValueError, match=r"no accelerator here.*device=ShapedDevice\("):
        dispatch_model(MLP(), {0: 30_000})


@pytest.mark.parametrize(
    "streams", [None, EmulatedStreams()], ids=["no accelerator", "emulated streams"]
)
def test_measured_rates_are_finite(streams: EmulatedStreams | None) -> None:
    rates = measure_rates(streams, torch.float32, width=512, seconds=0.02)
    assert rates.memory < float("inf") and rates.staging < float("inf")
    assert rates.host_flops < float("inf") and rates.accelerator_flops < float("inf")


def test_a_host_far_slower_than_the_link_is_measured_beside_it() -> None:
    """Its best share is less than a row."""
    link, host, rows = 1e10, 1e4, 512

    def split_rates(alpha: float) -> tuple[float, float]:
        share = round(alpha * rows) / rows
        return (1 - share) / max((1 - share) / link, share / host), host if share else 0.0

    measured = _rates_of_lanes(split_rates, link, 0.0, 2**27)
    assert measured["host_beside_link"] == host and measured["memory"] == link
