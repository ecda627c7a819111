"""The accelerator's lanes on a stand-in for streams, which counts who waits for what."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.hetegen.models import Plain, make_model, split_memory
from wf_backends.hetegen import Rates, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator, Streams
from wf_backends.hetegen.measure import measure_rates

RATES = Rates(1e8, 2e8, 1e10)


class Event:
    def __init__(self, counts: Counter) -> None:
        self.recorded, self.counts = False, counts

    def record(self, stream: Stream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded  # torch returns at once from an event that nobody recorded
        self.counts[threading.current_thread().name] += 1


class Stream:
    def __init__(self, current: threading.local) -> None:
        self.current = current

    def __enter__(self) -> None:
        self.current.stream = self

    def __exit__(self, *_: object) -> None:
        del self.current.stream

    def wait_event(self, event: Event) -> None:
        assert self is not None and event.recorded  # torch does not wait for one that is not


class StandIn(Streams):
    """Streams of a CPU, on which everything is done at once."""

    def __init__(self, pins: bool = True) -> None:
        self.device = torch.device("cpu")
        self.counts: Counter = Counter()
        self.pins = pins
        self._current = threading.local()

    def stream(self) -> Stream:  # type: ignore[override]
        return Stream(self._current)

    def event(self) -> Event:  # type: ignore[override]
        return Event(self.counts)

    def current(self) -> Stream:  # type: ignore[override]
        return getattr(self._current, "stream", Stream(self._current))

    def synchronize(self) -> None:
        self.counts["all"] += 1

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if not self.pins:
            raise RuntimeError("cannot pin")
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral"])
def test_the_same_tokens_and_the_caller_waits_for_no_device(name: str) -> None:
    model, ids = make_model(name), torch.randint(3, 90, (2, 7))
    words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
    expected = model.generate(ids, **words)  # type: ignore[operator]
    streams = StandIn()
    handle = dispatch_model(model, split_memory(model, 0.5), Accelerator(RATES, streams))
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]
    assert streams.counts["host"] > 0 and streams.counts["link"] > 0
    assert set(streams.counts) == {"host", "link"}  # and not the main thread
    handle.remove()
    assert streams.counts["all"] == 1  # at the end, before memory is given back
    assert torch.equal(model.generate(ids, **words), expected)  # type: ignore[operator]


def test_without_pinned_memory() -> None:
    model, x = Plain(), torch.randn(1, 64)
    with pytest.warns(UserWarning, match="pinned memory ran out"):
        handle = dispatch_model(model, {0: 20_000}, Accelerator(RATES, StandIn(pins=False)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
    handle.remove()


def test_an_error_of_the_hosts_thread_reaches_the_caller() -> None:
    model, device = Plain(), Accelerator(RATES, StandIn())

    def fail(write: object, out: Tensor) -> None:
        raise OSError("no way back")

    handle = dispatch_model(model, {0: 20_000}, device)
    device.from_host = fail  # type: ignore[method-assign]
    with torch.no_grad(), pytest.raises(OSError, match="no way back"):
        model(torch.randn(1, 64))
    del device.from_host
    with torch.no_grad():
        model(torch.randn(1, 64))
    handle.remove()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_without_an_accelerator_the_message_names_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no accelerator here.*device=ShapedDevice\("):
        dispatch_model(Plain(), {0: 30_000})


@pytest.mark.parametrize("streams", [None, StandIn()])
def test_rates_are_measured(streams: StandIn | None) -> None:
    rates = measure_rates(streams, width=256, seconds=0.02)
    assert rates.memory < float("inf") and rates.staging < float("inf")
    assert rates.host_flops < float("inf") and rates.accelerator_flops < float("inf")
