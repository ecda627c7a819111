"""The accelerator's lanes on a stand-in for streams, which counts who waits for what."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import Plain, make_model, split_memory
from wf_backends.hetegen import Handle, Rates, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator, Streams
from wf_backends.hetegen.cuda_count import CudaCount
from wf_backends.hetegen.measure import measure_rates

RATES = Rates(1e8, 2e8, 1e10)
SOON = 5.0  # seconds in which what a stream waits for has to come


def asks_the_driver(counts: Counter) -> None:
    """By a lane's thread or the caller's, whose name is counted."""
    if (name := threading.current_thread().name.split("_")[0]) in ("host", "link"):
        counts[name] += 1


class Event:
    """Its end is a call of the driver as well."""

    def __init__(self, counts: Counter) -> None:
        self.recorded, self.passed, self.counts = False, threading.Event(), counts
        self.time = 0.0
        weakref.finalize(self, asks_the_driver, counts)

    def record(self, stream: Stream) -> None:
        asks_the_driver(self.counts)
        self.recorded = True
        stream.put(self._pass)

    def _pass(self) -> None:
        self.time = time.perf_counter()
        self.passed.set()

    def synchronize(self) -> None:
        assert self.recorded  # torch returns at once from an event that nobody recorded
        asks_the_driver(self.counts)
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


class StandInCount:
    def __init__(self, counts: Counter) -> None:
        self.count, self.held, self.changed = 0, 0, threading.Condition()
        self.counts = counts

    def hold(self, stream: Stream, count: int) -> None:
        assert count > self.held  # a work that failed before its join holds nothing
        self.held = count
        stream.put(lambda: self._wait(count))

    def _wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, SOON)

    def raise_to(self, count: int) -> None:
        with self.changed:
            assert count > self.count
            self.count = count
            self.changed.notify_all()

    def raise_on(self, stream: Stream, count: int) -> None:
        stream.put(lambda: self.raise_to(count))

    def reached(self, count: int) -> bool:
        self.counts[f"{threading.current_thread().name.split('_')[0]} looked"] += 1
        return self.count >= count


class StandIn(Streams):
    """Streams of a CPU."""

    def __init__(self, pins: bool = True, gates: bool = True) -> None:
        self.device = torch.device("cpu")
        self.counts: Counter = Counter()
        self.pins, self.gates = pins, gates
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
        memory = torch.empty(shape, dtype=dtype)
        weakref.finalize(memory, asks_the_driver, self.counts)
        return memory

    def copy(self, stream: Stream, source: Tensor, to: Tensor) -> None:  # type: ignore[override]
        asks_the_driver(self.counts)
        stream.put(lambda: to.copy_(source))

    def count(self) -> StandInCount | None:  # type: ignore[override]
        return StandInCount(self.counts) if self.gates else None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each thread waited for another's work."""
    counts: Counter = Counter()
    result = Future.result

    def counted(self: Future, timeout: float | None = None) -> object:
        counts[threading.current_thread().name] += 1
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", counted)
    return counts


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_the_same_tokens_and_the_caller_waits_for_nothing(
    name: str, gates: bool, waits: Counter
) -> None:
    model, ids = make_model(name), torch.randint(3, 90, (2, 7))
    words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    expected = model.generate(ids, **words)  # type: ignore[operator]
    streams, caller = StandIn(gates=gates), threading.current_thread().name
    handle = dispatch_model(model, split_memory(model, 0.5), Accelerator(RATES, streams))
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]
    lanes = {"host looked", "link looked"} if gates else {"host", "link"}
    assert set(streams.counts) == lanes  # threads ask the driver for nothing if there are gates
    assert (waits[caller] == 0) == gates
    assert handle.report()["decode"]["measured_seconds"] > 0
    handle.remove()
    assert streams.counts["all"] == 2  # at the end, before memory is given back
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]


def test_without_pinned_memory() -> None:
    model, x = Plain(), torch.randn(1, 64)
    with pytest.warns(UserWarning, match="pinned memory ran out"):
        handle = dispatch_model(model, {0: 20_000}, Accelerator(RATES, StandIn(pins=False)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
    handle.remove()


@contextmanager
def failing(model: nn.Module, gates: bool = True) -> Iterator[tuple[Handle, Accelerator]]:
    """The model with a host's lane that fails until `device.on_host` is deleted."""
    device = Accelerator(RATES, StandIn(gates=gates))
    handle, on_host = dispatch_model(model, {0: 20_000}, device, alpha=0.5), device.on_host

    def fail(x: Tensor, there: Tensor) -> None:
        time.sleep(0.1)  # the caller is gone by then
        raise OSError("no way back")

    device.on_host = lambda _, *rest: on_host(fail, *rest)  # type: ignore[method-assign]
    with torch.no_grad():
        yield handle, device


@pytest.mark.parametrize("gates", [True, False])
def test_an_error_of_the_hosts_thread_reaches_the_caller(gates: bool) -> None:
    model, x, start = Plain(), torch.randn(1, 64), time.perf_counter()
    with failing(model, gates) as (handle, device):
        with pytest.raises(OSError, match="no way back"):
            model(x)
        assert time.perf_counter() - start < SOON
        del device.on_host
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
        handle.remove()


def test_an_error_in_the_last_call_leaves_no_results_and_is_raised_at_the_end() -> None:
    model = Plain(layers=1, width=128)
    with failing(model) as (handle, _):
        assert model(torch.randn(1, 128)).isnan().any()  # the gate is open, the stream went on
        with pytest.raises(OSError, match="no way back"):
            handle.remove()
        torch.testing.assert_close(
            model(torch.ones(1, 128)), Plain(layers=1, width=128)(torch.ones(1, 128))
        )


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
        del device.on_host
        handle.remove()


def test_pinned_memory_is_used_again() -> None:
    """As much as one call needs: each waits for the one before it here."""
    streams, taken = StandIn(), list[int]()
    pinned = streams.pinned
    device = Accelerator(RATES, streams)
    device._pool._pinned = lambda shape, dtype: taken.append(1) or pinned(shape, dtype)
    for _ in range(50):
        device.wait([device.on_host(lambda x, memory: None, torch.ones(2), torch.ones(2), 4)])
    assert len(taken) == 2
    device.close()
    assert not device._pool._all


def test_a_stream_comes_after_the_one_that_was_the_callers_before() -> None:
    """Else its mark would tell a thread that what the other one has is done."""
    streams, there, out = StandIn(), torch.zeros(1), torch.zeros(2)
    slow, fast = streams.stream(), streams.stream()
    device = Accelerator(RATES, streams)
    slow.put(lambda: time.sleep(0.2))  # type: ignore[attr-defined]
    slow.put(lambda: there.fill_(1))  # type: ignore[attr-defined]
    for i, stream in enumerate([slow, fast]):
        streams.current = lambda stream=stream: stream  # type: ignore[method-assign, misc]
        work = device.on_host(lambda _, memory: memory.copy_(there), there, out[i : i + 1], 4)
        device.wait([work])
    device.close()
    assert out.tolist() == [1, 1]


def test_what_was_asked_for_before_the_end_is_done() -> None:
    """The caller is gone before the host has begun: a result read after `remove` has no NaN."""
    streams = StandIn()
    caller = streams.stream()
    streams.current = lambda: caller  # type: ignore[method-assign]
    device, x, out = Accelerator(RATES, streams), torch.empty(4), torch.zeros(4)
    device.on_host(lambda x, memory: time.sleep(0.2), x, torch.empty(4), 16)
    device.wait([device.on_host(lambda x, memory: memory.fill_(3), x, out, 16)])
    device.close()
    assert out.tolist() == [3, 3, 3, 3]


def test_a_count_of_cuda_lies_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    def call(name: str, *arguments: int) -> tuple[int]:
        calls.append((name, *arguments))
        return (0 if arguments[0] != 13 else 801,)

    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0),
        CUstreamWriteValue_flags=SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0),
        cuMemHostGetDevicePointer=lambda address, flags: (0, address + 1 + flags),
        cuStreamWaitValue32=partial(call, "wait"),
        cuStreamWriteValue32=partial(call, "write"),
    )
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    word = torch.full((1,), -1, dtype=torch.int32)
    count = CudaCount(word, SimpleNamespace(native_handle=7))
    there = word.data_ptr() + 1
    assert word.item() == 0 and calls == [("wait", 7, there, 0, 0)]
    count.hold(SimpleNamespace(native_handle=8), 2**32 + 5)  # modulo 2^32, as the driver compares
    count.raise_on(SimpleNamespace(native_handle=9), 2**32 + 6)
    assert calls[1:] == [("wait", 8, there, 5, 0), ("write", 9, there, 6, 0)]
    count.raise_to(3)
    assert word.item() == 3 and count.reached(3) and not count.reached(4)
    count.raise_to(2**31)
    assert word.item() == -(2**31)  # the same 32 bits
    count.raise_to(2**32 - 1)
    assert count.reached(2**32 - 1) and not count.reached(2**32)
    word.fill_(2)  # a stream raised it to 2^32 + 2
    assert count.reached(2**32) and not count.reached(2**32 + 3)
    with pytest.raises(RuntimeError, match="no counts for streams here: 801"):
        CudaCount(word, SimpleNamespace(native_handle=13))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_the_message_names_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no accelerator here.*device=ShapedDevice\("):
        dispatch_model(Plain(), {0: 30_000})


@pytest.mark.parametrize("streams", [None, StandIn()])
def test_rates_are_measured(streams: StandIn | None) -> None:
    rates = measure_rates(streams, torch.float32, width=2048, seconds=0.02)
    assert rates.memory < float("inf") and rates.staging < float("inf")
    assert rates.host_flops < float("inf") and rates.accelerator_flops < float("inf")
