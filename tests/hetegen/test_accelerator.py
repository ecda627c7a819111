"""The lanes of `Accelerator`, with streams and events emulated by threads of the CPU."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import MLP, generate, make_ids, make_model, max_memory
from wf_backends.hetegen import Handle, Rates, dispatch_model, worker
from wf_backends.hetegen.accelerator import Accelerator, StreamEnd
from wf_backends.hetegen.device import OPERATIONS, multiply
from wf_backends.hetegen.measure import _rates_of_lanes, measure_rates
from wf_backends.hetegen.streams import Streams

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

    Args:
        flags: whether the threads are workers of C++, as on CUDA.

    Attributes:
        waits: "host", "link" or "MainThread" -> how often that thread waited for an event;
            "all" -> how often all streams were waited for; "timeout" -> waits of streams in vain.
    """

    def __init__(self, flags: bool = False, can_pin: bool = True) -> None:
        self.device = torch.device("cpu")
        self.flags = flags
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

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.can_pin

    def set_flag(self, stream: Stream, flag: Tensor, number: int) -> None:  # type: ignore[override]
        stream.put(lambda: flag.fill_(number))

    def wait_for_flag(self, stream: Stream, flag: Tensor, number: int) -> None:  # type: ignore[override]
        def poll() -> None:
            end = time.perf_counter() + TIMEOUT
            while int(flag) < number:
                assert time.perf_counter() < end
                time.sleep(1e-5)

        stream.put(poll)

    def synchronize(self) -> None:
        self.waits["all"] += 1
        for stream in self.streams:
            done = threading.Event()
            stream.put(done.set)
            assert done.wait(TIMEOUT)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self.can_pin:
            raise RuntimeError("cannot pin")
        return torch.empty(shape, dtype=dtype, device="cpu")

    def copy(self, stream: Stream, source: Tensor, target: Tensor) -> None:  # type: ignore[override]
        stream.put(lambda: target.copy_(source))


@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("pin_memory", [True, "weights"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_generated_tokens_are_equal_and_the_caller_never_waits_for_the_device(
    name: str, pin_memory: bool | str, flags: bool
) -> None:
    model, ids = make_model(name), make_ids(2, 7)
    expected = generate(model, ids, 5)
    streams = EmulatedStreams(flags)
    device, memory = Accelerator(RATES, streams), max_memory(model, 0.5)
    handle = dispatch_model(model, memory, device, pin_memory=pin_memory)
    assert torch.equal(generate(model, ids, 5), expected)
    # Workers read flags; threads of Python wait for events.
    assert set(streams.waits) == (set() if flags else {"host", "link"})
    report = handle.report()
    assert report["decode"]["measured_seconds"] > 0
    assert report["lanes"]["host"]["busy_seconds"] > 0
    handle.remove()
    assert streams.waits["all"] >= 1  # before memory is freed
    assert handle.report()["lanes"]["host"]["busy_seconds"] > 0
    assert torch.equal(generate(model, ids, 5), expected)


def test_a_thread_of_python_has_computed_its_rows_when_the_call_of_a_linear_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a caller that waits for the GPU and holds Python's GIL would block the thread."""
    model, device = MLP(), Accelerator(RATES, EmulatedStreams())
    computed: list[str] = []

    def multiply_slowly(*args: Tensor) -> None:
        time.sleep(0.01)
        multiply(*args)
        computed.append("rows")

    monkeypatch.setitem(OPERATIONS, "multiply", multiply_slowly)
    with dispatch_model(model, MEMORY, device, alpha=0.5), torch.no_grad():
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: computed.append("call"))
        model(torch.randn(1, 64))
    assert computed == ["rows", "call"] * len(model.layers)


@pytest.mark.parametrize("pinned", [True, False])
def test_with_workers_the_caller_waits_for_nothing(pinned: bool) -> None:
    """Its stream has work before these calls that ends only when they have returned. They share a
    slab, a pinned buffer and the memory of outputs."""
    streams = EmulatedStreams(flags=True)
    device, returned = Accelerator(RATES, streams), threading.Event()
    stream = streams.stream()
    streams.current = lambda: stream  # type: ignore[method-assign]
    weights, x = torch.randn(3, 3, 4), torch.randn(2, 3)
    outs, products, slab = torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), torch.zeros(3, 4)
    buffer = torch.zeros(3, 4) if pinned else None
    busy = streams.event()
    stream.put(lambda: returned.wait(TIMEOUT))
    busy.record(stream)
    read = StreamEnd(busy)
    for weight, out, product in zip(weights, outs, products, strict=True):
        copied = device.copy(weight, buffer, slab, after=read)
        computed = device.compute_on_host("multiply", weight, x, out, 8)
        run = partial(multiply, slab, x, product)
        read = device.compute(partial(stream.put, run), 8, copied)
        device.wait([computed])
    assert not busy.query() and not outs.any() and not products.any() and not streams.waits
    returned.set()
    device.close()
    torch.testing.assert_close(outs, x @ weights)
    torch.testing.assert_close(products, x @ weights)


def test_a_worker_needs_no_gil() -> None:
    """A caller may hold it while it waits for a GPU whose stream waits for the worker."""
    sleep_with_gil = ctypes.PyDLL(None).usleep
    ready, done = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    seconds = torch.zeros((), dtype=torch.float64)
    thread = worker._extension().Worker(ready, done, seconds, worker.raise_in_thread)
    x, outs = torch.randn(256, 256), torch.empty(40, 256, 256)
    tasks = [thread.multiply(x, x, out) for out in outs]
    ready.fill_(tasks[-1])
    sleeps = 0
    while int(done) < tasks[-1]:
        sleeps += 1
        sleep_with_gil(200_000)  # microseconds
    thread.close()
    assert sleeps <= 5  # a thread of Python would have done a few tasks between two of them
    torch.testing.assert_close(outs[-1], x @ x)


@pytest.mark.parametrize("flags", [True, False])
def test_a_default_device_changes_nothing(flags: bool) -> None:
    model, x = MLP(), torch.randn(1, 64)
    device = Accelerator(RATES, EmulatedStreams(flags))
    with torch.no_grad(), torch.device("meta"):
        with dispatch_model(model, MEMORY, device, alpha=0.5):
            out = model(x)
    torch.testing.assert_close(out, MLP()(x), rtol=0, atol=1e-5)


def fail_in_worker(device: Accelerator, out: Tensor) -> None:
    """A worker looks up a token that the vocabulary lacks."""
    ids, weight = torch.tensor([1, 99]), torch.ones(4, 3)
    device.wait([device.compute_on_host("look_up", weight, ids, out, 8)])


def read_failed_rows(device: Accelerator, streams: EmulatedStreams) -> None:
    """Call a worker that fails and read its output, as from a GPU; call nothing of HeteGen more."""
    stream, out = streams.stream(), torch.zeros(2, 3)
    streams.current = lambda: stream  # type: ignore[method-assign]
    fail_in_worker(device, out)
    del streams.current
    read = streams.event()
    read.record(stream)
    read.synchronize()
    pytest.fail(f"nothing was raised, and this was read: {out}")


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_an_error_of_a_worker_is_raised_at_once_and_once_in_the_callers_thread(
    in_main_thread: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model, streams = MLP(), EmulatedStreams(flags=True)
    device = Accelerator(RATES, streams)
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    x = torch.randn(1, 64)
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        with pytest.raises(RuntimeError, match="are NaN.*index out of range") as caught:
            if in_main_thread:
                read_failed_rows(device, streams)
            pool.submit(read_failed_rows, device, streams).result()
        assert caught.type is RuntimeError
        assert re.search("are NaN.*index out of range", capfd.readouterr().err)
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
        assert pool.submit(threading.get_ident).result(TIMEOUT)  # its thread raises nothing more
    handle.report()
    handle.remove()


def test_a_caller_that_holds_the_gil_while_a_worker_fails_raises_right_afterwards() -> None:
    """It may be waiting for these outputs: the worker gives them to it without Python."""
    sleep_with_gil = ctypes.PyDLL(None).usleep
    ready, done = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    seconds = torch.zeros((), dtype=torch.float64)
    thread = worker._extension().Worker(ready, done, seconds, worker.raise_in_thread)
    out = torch.zeros(2, 3)
    task = thread.look_up(torch.ones(4, 3), torch.tensor([1, 99]), out)
    with pytest.raises(RuntimeError, match="are NaN.*index out of range"):
        ready.fill_(task)
        sleep_with_gil(2_000_000)  # microseconds; the worker waits for the GIL for one second
        time.sleep(0.1)
        pytest.fail("nothing was raised")
    assert thread.has_raised() and out.isnan().all()
    thread.close()
    assert int(done) == task


def test_rows_whose_copy_failed_after_a_call_are_copied_again_by_the_next() -> None:
    model, x, count = MLP(), torch.randn(1, 64), Counter[str]()
    device = Accelerator(RATES, EmulatedStreams(flags=True))
    with dispatch_model(model, MEMORY, device, alpha=0.0), torch.no_grad():
        link = device._worker("link")
        assert link is not None
        thread = link.thread

        def copy(rows: Tensor, pinned: Tensor, ready: int) -> int:
            count["copies"] += 1
            if count["copies"] == count["fails"]:  # after a wait
                return thread.copy(rows.flatten()[:3], pinned, 10**9)
            return thread.copy(rows, pinned, ready)

        link.thread = SimpleNamespace(
            copy=copy, check=thread.check, cancel=thread.cancel, has_raised=thread.has_raised
        )
        model(x)
        before = count["copies"]
        model(x)
        count["fails"] = 2 * count["copies"] - before  # the last of this pass: rows for the next
        out = model(x)
        with pytest.raises(RuntimeError, match="a worker failed"):
            for _ in range(int(TIMEOUT / 0.01)):
                link._ready.fill_(10**9)  # again: the link's stream writes to it, too
                time.sleep(0.01)
        device.streams.synchronize()
        link._ready.copy_(link._done)
        torch.testing.assert_close(model(x), out, rtol=0, atol=0)


@pytest.mark.parametrize("raised_by", ["next call", "report", "remove"])
def test_an_error_of_a_worker_whose_callers_thread_is_idle_is_raised_by_what_comes_next(
    raised_by: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model, streams, go_on = MLP(), EmulatedStreams(flags=True), threading.Event()
    device = Accelerator(RATES, streams)
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    stream, out = streams.stream(), torch.zeros(2, 3)
    stream.put(lambda: go_on.wait(TIMEOUT))
    streams.current = lambda: stream  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        pool.submit(fail_in_worker, device, out).result()
        del streams.current
        go_on.set()
        streams.synchronize()
        assert out.isnan().all()
        assert pool.submit(threading.get_ident).result(TIMEOUT)  # an error would have ended it
        with pytest.raises(RuntimeError, match="index out of range"):
            if raised_by == "next call":
                model(torch.randn(1, 64))
            getattr(handle, raised_by)()
        x = torch.randn(1, 64)
        if raised_by == "next call":
            torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
            handle.remove()
    if raised_by == "report":
        with pytest.raises(RuntimeError, match="index out of range"):
            handle.remove()
    assert not device.in_use
    torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)


def test_a_stream_that_waits_for_a_workers_task_ends_when_the_lanes_are_stopped() -> None:
    """As after Ctrl-C, before the stream has reached what the task waits for."""
    streams = EmulatedStreams(flags=True)
    device, go_on = Accelerator(RATES, streams), threading.Event()
    stream, busy = streams.stream(), threading.Event()
    streams.current = lambda: stream  # type: ignore[method-assign]
    weight, x, out = torch.ones(3, 4), torch.ones(2, 3), torch.zeros(2, 4)
    stream.put(lambda: go_on.wait(TIMEOUT))
    device.wait([device.compute_on_host("multiply", weight, x, out, 8)])
    threading.Timer(0.05, go_on.set).start()
    device.stop()
    assert go_on.is_set() and not busy.is_set() and not streams.waits["timeout"]
    device.wait([device.compute_on_host("multiply", weight, x, out, 8)])
    device.close()
    assert torch.equal(out, torch.full((2, 4), 3.0))


def test_without_a_compiler_a_warning_says_so_and_outputs_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(worker, "_extension", fail)
    check_fallback("pip install ninja.*Ninja is required")


def test_without_flags_that_threads_see_a_warning_says_so_and_outputs_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(EmulatedStreams, "set_flag", lambda *_: None)
    check_fallback("did not see each other's flags")


def check_fallback(warning: str) -> None:
    """Without workers a model is split over threads of Python."""
    model, x = MLP(), torch.randn(1, 64)
    with torch.no_grad(), pytest.warns(UserWarning, match=f"threads of Python.*{warning}"):
        streams = EmulatedStreams(flags=True)
        with dispatch_model(model, MEMORY, Accelerator(RATES, streams), alpha=0.5):
            out = model(x)
    torch.testing.assert_close(out, MLP()(x), rtol=0, atol=1e-5)
    assert not streams.flags  # nor is it tried again


@pytest.mark.parametrize("flags", [True, False])
def test_pinned_memory_of_the_hosts_inputs_and_outputs_is_allocated_once(flags: bool) -> None:
    model, streams, sizes = MLP(), EmulatedStreams(flags), list[int]()
    pinned = streams.pinned
    device = Accelerator(RATES, streams)
    with dispatch_model(model, MEMORY, device, alpha=0.5), torch.no_grad():
        streams.pinned = lambda shape, dtype: sizes.append(shape[0]) or pinned(shape, dtype)  # type: ignore[method-assign]
        for batch in (3, 1, 2, 3):
            x = torch.randn(batch, 64)
            torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
    flag_sizes = [2, 2] if flags else []  # of two workers
    assert sizes == [3 * 64 * 4, 3 * 32 * 4, *flag_sizes]  # inputs, outputs of half of the rows


@pytest.mark.parametrize("flags", [True, False])
def test_the_hosts_next_output_waits_until_the_last_was_copied(flags: bool) -> None:
    """Both have the same memory. A caller may use another stream for each call."""
    streams = EmulatedStreams(flags)
    slow, done = streams.stream(), threading.Event()
    device = Accelerator(RATES, streams)
    ones, sevens, eye = torch.ones(1, 2), torch.full((1, 2), 7.0), torch.eye(2)
    out, other = torch.zeros(1, 2), torch.zeros(1, 2)
    streams.current = lambda: slow  # type: ignore[method-assign]
    with torch.inference_mode():
        computed = device.compute_on_host("multiply", eye, ones, out, 8)
        if not flags:  # the thread of Python has computed it
            computed.finish()
        slow.put(lambda: time.sleep(0.2))  # before the copy
        device.wait([computed])
        streams.current = CallerStream  # type: ignore[method-assign]
        device.wait([device.compute_on_host("multiply", eye, sevens, other, 8)])
        slow.put(done.set)
        assert done.wait(TIMEOUT)
    device.close()
    assert torch.equal(out, ones) and torch.equal(other, sevens)


def test_outputs_are_exact_without_pinned_memory_and_a_warning_is_given() -> None:
    model, x = MLP(), torch.randn(1, 64)
    with pytest.warns(UserWarning, match="pinned memory ran out"):
        handle = dispatch_model(model, MEMORY, Accelerator(RATES, EmulatedStreams(can_pin=False)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
    handle.remove()


@contextmanager
def failing_host_lane(model: nn.Module) -> Iterator[tuple[Handle, Accelerator]]:
    """Split the model; work of the host's thread, one of Python, fails."""

    def fail(*_: Tensor) -> None:
        raise OSError("host lane failed")

    device = Accelerator(RATES, EmulatedStreams())
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATIONS, "multiply", fail)
        yield handle, device


def test_an_error_in_the_hosts_thread_is_raised_by_the_call_and_the_next_call_is_exact() -> None:
    model, x, start = MLP(), torch.randn(1, 64), time.perf_counter()
    with failing_host_lane(model) as (handle, _):
        with pytest.raises(OSError, match="host lane failed"):
            model(x)
        assert time.perf_counter() - start < TIMEOUT
    with torch.no_grad():
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


def test_flags_are_given_to_cudas_driver_and_its_errors_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    errors = iter([0, 0, 801])  # the last is CUDA_ERROR_NOT_SUPPORTED

    def call(name: str, *args: Any) -> int:
        calls.append((name, *(arg.value for arg in args)))
        return next(errors)

    names = ["cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2"]
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    streams = Streams.__new__(Streams)
    streams.device = torch.device("cuda", 1)
    streams._driver = SimpleNamespace(**{name: partial(call, name) for name in names})
    flag, stream = torch.zeros(1, dtype=torch.int64), SimpleNamespace(cuda_stream=5)
    streams.set_flag(stream, flag, 2**40)
    streams.wait_for_flag(stream, flag, 7)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue64_v2 .* error 801"):
        streams.wait_for_flag(stream, flag, 7)
    address = flag.data_ptr()
    assert calls[:2] == [(names[0], 5, address, 2**40, 0), (names[1], 5, address, 7, 0)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_error_names_shaped_device() -> None:
    with pytest.raises(ValueError, match=r"no accelerator here.*device=ShapedDevice\("):
        dispatch_model(MLP(), {0: 30_000})


@pytest.mark.parametrize(
    "streams",
    [None, EmulatedStreams(), EmulatedStreams(flags=True)],
    ids=["no accelerator", "threads of Python", "workers"],
)
def test_measured_rates_are_finite(streams: EmulatedStreams | None) -> None:
    with torch.device("meta"):  # as a script's default device, which is a GPU
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
