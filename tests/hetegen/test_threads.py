"""A split model that several threads call, and `remove` while calls are running."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hetegen.models import MLP, MLP_SPLIT, fast_device, split_and_resident
from wf_backends.hetegen import ShapedDevice, dispatch_model, split_model
from wf_backends.hetegen.dispatch import Handle

TIMEOUT = 20  # seconds; a thread that has not ended by then is in a deadlock


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Python switches threads after 10 us instead of 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def start(call: Callable[..., None], *args: object, name: str | None = None) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, name=name, daemon=True)
    thread.start()
    return thread


def join(threads: Sequence[threading.Thread], timeout: float = TIMEOUT) -> None:
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_outputs_are_exact_in_threads_that_call_one_model() -> None:
    model, reference = MLP(6), MLP(6)
    errors: list[Exception] = []

    def call(seed: int) -> None:
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for _ in range(20):
                try:
                    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-5)
                except Exception as error:
                    errors.append(error)

    with dispatch_model(model, {0: 50_000}, fast_device()):
        join([start(call, seed) for seed in range(3)])
    assert not errors


@pytest.mark.usefixtures("frequent_thread_switches")
def test_after_calls_of_several_threads_each_call_is_counted_as_a_pass() -> None:
    """Hooks that several threads enter and leave at the same time leave no module as running."""
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(64, 64))))
    with dispatch_model(model, {0: 14_000}, fast_device()) as handle:
        runner = handle._runner
        assert runner is not None

        def run_hooks() -> None:
            for _ in range(20_000):
                runner.enter(model)
                runner.leave(model)

        join([start(run_hooks) for _ in range(4)], timeout=60)
        for passes in (1, 2):
            with torch.no_grad():
                model(torch.randn(1, 64))
            assert not runner._outermost
            assert handle.report()["decode"]["passes"] == passes


@pytest.mark.usefixtures("frequent_thread_switches")
def test_a_report_may_be_read_while_another_thread_calls_the_model() -> None:
    with dispatch_model(MLP(), MLP_SPLIT, fast_device()) as handle:
        assert handle._runner is not None
        add_call, done = handle._runner.record.add_call, threading.Event()

        def call() -> None:
            while not done.is_set():
                add_call("decode", True, 0.0, 1.0)

        thread = start(call)
        try:
            assert all(handle.report()["decode"]["passes"] >= 0 for _ in range(300))
        finally:
            done.set()
            join([thread])


def test_a_report_of_another_thread_may_come_as_soon_as_the_first_pass_is_there() -> None:
    class Reported(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            assert handle.report()["decode"]["passes"] >= 0

    with dispatch_model(MLP(), MLP_SPLIT, fast_device()) as handle, torch.no_grad():
        assert handle._runner is not None
        handle._runner.record._passes = Reported()
        handle.model(torch.randn(1, 64))


class PausedMLP(nn.Module):
    """Calls an MLP twice, and waits for `resume` between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.paused, self.resume = MLP(), threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        self.paused.set()
        assert self.resume.wait(TIMEOUT)
        return self.mlp(x)


@split_and_resident
def test_remove_is_refused_while_another_thread_calls_the_model(memory: dict) -> None:
    model, x, outputs, device = PausedMLP(), torch.randn(2, 64), list[Tensor](), fast_device()
    expected = MLP()(MLP()(x)).detach()

    def call() -> None:
        with torch.no_grad():
            outputs.append(model(x))

    handle = dispatch_model(model, memory, device)
    thread = start(call, name="caller")
    assert model.paused.wait(TIMEOUT)
    with pytest.raises(RuntimeError, match=r"the thread 'caller' calls the model: wait for the en"):
        handle.remove()
    assert device.bytes == handle.plan.accelerator_bytes
    model.resume.set()
    join([thread])
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-5)
    handle.remove()
    handle.remove()  # a second time it does nothing
    with torch.no_grad():
        assert device.bytes == 0 and torch.equal(model(x), expected)


def test_remove_in_another_thread_works_after_ctrl_c_in_a_call() -> None:
    """torch runs no hook at the end of a call that Ctrl-C ended."""
    model, device = MLP(), fast_device()
    handle = dispatch_model(model, MLP_SPLIT, device)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers[1].register_forward_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 64))
    hook.remove()
    join([start(handle.remove)])
    assert device.bytes == 0


@split_and_resident
def test_remove_is_refused_in_a_hook_of_the_model_but_not_of_another(memory: dict) -> None:
    """Also in a hook of a linear that is called by itself."""
    model, x, device, errors = MLP(), torch.randn(2, 64), fast_device(), list[str]()
    reference = MLP()
    handle = dispatch_model(model, memory, device)

    def remove(*_: object) -> None:
        try:
            handle.remove()
        except RuntimeError as error:
            errors.append(str(error))

    model.layers[1].register_forward_hook(remove)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(model.layers[1](x), reference.layers[1](x), rtol=0, atol=1e-5)
        refusal = "handle.remove() within a call of the model: call it when the call has ended"
        assert errors == [refusal, refusal]
        assert device.bytes == handle.plan.accelerator_bytes
        other_model = nn.Identity()
        other_model.register_forward_hook(remove)
        other_model(x)
        assert len(errors) == 2 and device.bytes == 0
        assert torch.equal(model(x), reference(x)) and len(errors) == 2


@split_and_resident
def test_remove_in_two_threads_closes_the_device_once_before_either_returns(memory: dict) -> None:
    closing, closed = threading.Event(), list[float]()

    class SlowToClose(ShapedDevice):
        def close(self) -> None:
            closing.set()
            time.sleep(0.3)
            super().close()
            closed.append(time.perf_counter())

    handle = dispatch_model(MLP(), memory, SlowToClose(1e8, 2e8, 1e10))
    thread = start(handle.remove)
    assert closing.wait(TIMEOUT)
    handle.remove()
    assert len(closed) == 1
    join([thread])
    assert len(closed) == 1


def call_and_remove(model: nn.Module, handle: Handle, x: Tensor, number: int) -> Tensor | None:
    """Call a split linear; another thread removes before instruction `number` of split_model.py.

    Returns:
        The output; None if `remove` came first and the call was refused.
    """
    instructions = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        if frame.f_code.co_filename != split_model.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(instructions) == number:
            join([start(handle.remove)])
        return trace

    sys.settrace(trace)
    try:
        return model(x)
    except RuntimeError as error:
        assert "while handle.remove() puts it back" in str(error)
        return None
    finally:
        sys.settrace(None)


def test_remove_during_a_call_of_a_linear_is_exact_or_refuses_it_and_restarts_no_lane() -> None:
    """No hook of a module tells of a linear's call: `remove` does not know of it in advance."""
    x, linear, threads_before = torch.randn(2, 64), MLP().layers[0], set(threading.enumerate())
    outs, was_removed = list[Tensor | None](), True
    while was_removed:
        model = MLP()
        with (
            dispatch_model(model, MLP_SPLIT, ShapedDevice(1e8, 1e8, 1e9)) as handle,
            torch.no_grad(),
        ):
            outs.append(call_and_remove(model.layers[0], handle, x, len(outs)))
            was_removed = handle._runner is None
        assert set(threading.enumerate()) <= threads_before
    for out in outs:
        if out is not None:
            torch.testing.assert_close(out, linear(x), rtol=0, atol=1e-5)
    assert None in outs[:-1] and outs[-2] is not None  # refused first, computed last


def test_remove_frees_a_bias_after_the_call_that_adds_it() -> None:
    """Freed memory is overwritten: the first outputs were wrong."""
    model, reference, x, device = MLP(), MLP(), torch.randn(2, 64), fast_device()
    handle = dispatch_model(model, MLP_SPLIT, device)
    removing, bytes_at_add = list[threading.Thread](), list[int]()

    class RemoveBeforeAdd(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            if func is torch.ops.aten.add_.Tensor:
                removing.append(start(handle.remove))
                removing[0].join(0.3)
                bytes_at_add.append(device.bytes)
            return func(*args, **kwargs or {})  # type: ignore[operator]

    with torch.no_grad(), RemoveBeforeAdd():
        outputs = model.layers[0](x)
    join(removing)
    assert bytes_at_add == [handle.plan.accelerator_bytes] and device.bytes == 0
    torch.testing.assert_close(outputs, reference.layers[0](x), rtol=0, atol=1e-5)
