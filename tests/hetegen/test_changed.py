"""A split model whose weights are changed, copied or shared out: made right, or refused by name."""

from __future__ import annotations

import copy
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import Plain, fast_device
from wf_backends.hetegen import ShapedDevice, dispatch_model

SPLIT = {0: 30_000}
FITS = {0: "1MB"}


def by_data(weight: Tensor) -> None:
    weight.data += 1


def by_its_state(weight: Tensor) -> None:
    weight.detach()[0].add_(1)


@pytest.mark.parametrize("change", [lambda weight: weight.add_(1), by_data, by_its_state])
def test_weights_that_are_written_to_are_not_computed_with_old_copies(
    change: Callable[[Tensor], object],
) -> None:
    model, other, x = Plain(), Plain(), torch.randn(2, 64)
    with torch.no_grad():
        handle = dispatch_model(model, SPLIT, fast_device())
        model(x)
        for one in (model, other):
            change(one.layers[1].weight)
        with pytest.raises(ValueError, match=r"layers\.1\.weight was changed.*handle\.remove\(\)"):
            model(x)
        handle.remove()
        assert torch.equal(model(x), other(x))
        with dispatch_model(model, SPLIT, fast_device()):
            torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-5)


def test_a_split_model_is_not_converted() -> None:
    """The lanes would compute with the weights of before, and keep their memory."""
    model, x = Plain(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, SPLIT, fast_device())
        model.to("cpu").float()  # what changes nothing is taken
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        for convert in (lambda: model.bfloat16(), lambda: model.to(torch.float16)):
            with pytest.raises(ValueError, match=r"neither moved nor converted.*handle\.remove"):
                convert()
        handle.remove()
        assert torch.equal(model(x), expected)


class Scaled(nn.Module):
    """With a tensor that is not split before one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.3))
        self.plain = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x * self.scale.float())


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="cpu"),
    ],
)
def test_a_conversion_is_refused_before_it_has_changed_anything(
    convert: Callable[[nn.Module], object],
) -> None:
    """Also where the first tensors would be changed in place, or modules be given others."""
    model, x = Scaled(), torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dispatch_model(model, SPLIT, fast_device())
        with pytest.raises(ValueError, match=r"nor converted, and layers.*would.*handle\.remove"):
            convert(model.plain)
        with pytest.raises(ValueError, match=r"nor converted, and scale would.*handle\.remove"):
            convert(model)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        assert torch.equal(model(x), expected)
        assert model.half().scale.dtype == torch.float16


def test_a_weight_of_two_models_is_split_for_one() -> None:
    """Either `remove` would make it plain, or leave it split for lanes that have ended."""
    one, other, x = Plain(), Plain(), torch.randn(2, 64)
    other.layers[1].weight = one.layers[2].weight
    with torch.no_grad():
        expected = other(x)
        handle = dispatch_model(one, SPLIT, fast_device())
        with pytest.raises(ValueError, match=r"shares layers\.1\.weight .*the other's handle\.rem"):
            dispatch_model(other, SPLIT, fast_device())
        torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-5)
        handle.remove()
        with dispatch_model(other, SPLIT, fast_device()):
            torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-5)


def test_weights_that_are_saved_alone_are_plain() -> None:
    model = Plain()
    with dispatch_model(model, SPLIT, fast_device()):
        torch.save(list(model.parameters()), saved := io.BytesIO())
    saved.seek(0)
    for loaded, parameter in zip(torch.load(saved), Plain().parameters(), strict=True):
        assert type(loaded) is nn.Parameter and torch.equal(loaded, parameter)


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_a_split_model_is_neither_copied_nor_pickled(memory: dict) -> None:
    """A copy would hold an accelerator's memory that no `remove` gives back."""
    model, x = Plain(), torch.randn(2, 64)
    with dispatch_model(model, memory, fast_device()):
        for act in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(ValueError, match=r"neither copied nor pickled.*handle\.remove\(\)"):
                act(model)
        torch.save(model.state_dict(), saved := io.BytesIO())
    saved.seek(0)
    assert all(torch.equal(x, Plain().state_dict()[k]) for k, x in torch.load(saved).items())
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_a_device_is_that_of_one_model(memory: dict) -> None:
    """Its lanes stop at an error of either, and its memory is counted for one."""
    model, other, device = Plain(), Plain(), fast_device()
    handle = dispatch_model(model, memory, device)
    with pytest.raises(ValueError, match="device is that of another model.*a ShapedDevice of its"):
        dispatch_model(other, memory, device)
    handle.remove()
    dispatch_model(other, memory, device).remove()


@pytest.fixture
def threads_in_turns() -> Iterator[None]:
    """Threads follow each other after 10 us of Python, no longer 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_in_turns")
def test_several_threads_call_one_model() -> None:
    model, alone = Plain(6), Plain(6)
    wrong: list[object] = []

    def call(seed: int) -> None:
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for _ in range(20):
                try:
                    torch.testing.assert_close(model(x), alone(x), rtol=0, atol=1e-5)
                except Exception as error:
                    wrong.append(error)

    with dispatch_model(model, {0: 50_000}, fast_device()):
        threads = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@pytest.mark.usefixtures("threads_in_turns")
def test_passes_are_told_apart_after_calls_of_several_threads() -> None:
    """However threads meet inside of it, the count of running modules comes back to none."""
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(64, 64))))
    with dispatch_model(model, {0: 14_000}, fast_device()) as handle:
        runner = handle._runner
        assert runner is not None

        def run_modules() -> None:
            for _ in range(20_000):
                runner.enter(model)
                runner.leave(model)

        threads = [threading.Thread(target=run_modules, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for passes in (1, 2):
            with torch.no_grad():
                model(torch.randn(1, 64))
            assert not runner._outermost
            assert handle.report()["decode"]["passes"] == passes


class Waiting(nn.Module):
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.begun, self.go_on = Plain(), threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x)
        self.begun.set()
        assert self.go_on.wait(20)
        return self.plain(x)


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_a_model_is_not_put_back_while_another_thread_calls_it(memory: dict) -> None:
    model, x, found = Waiting(), torch.randn(2, 64), list[Tensor]()

    def call() -> None:
        with torch.no_grad():
            found.append(model(x))

    device = fast_device()
    handle = dispatch_model(model, memory, device)
    thread = threading.Thread(target=call, name="caller", daemon=True)
    thread.start()
    assert model.begun.wait(20)
    with pytest.raises(RuntimeError, match=r"the thread 'caller' calls the model: wait for the en"):
        handle.remove()
    assert device.bytes == handle.plan.accelerator_bytes
    model.go_on.set()
    thread.join(20)
    with torch.no_grad():
        torch.testing.assert_close(found[0], Plain()(Plain()(x)), rtol=0, atol=1e-5)
        handle.remove()
        handle.remove()
        assert device.bytes == 0 and torch.equal(model(x), Plain()(Plain()(x)))


def test_a_call_that_ctrl_c_ended_is_no_call_any_more() -> None:
    """torch tells no hook of its end: another thread could not put the model back afterwards."""
    model, device = Plain(), fast_device()
    handle = dispatch_model(model, SPLIT, device)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers[1].register_forward_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 64))
    hook.remove()
    thread = threading.Thread(target=handle.remove, daemon=True)
    thread.start()
    thread.join(20)
    assert device.bytes == 0


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_a_model_is_not_put_back_within_a_call_of_it(memory: dict) -> None:
    """Nor by a hook of a linear that is called alone; other models' calls are no matter."""
    model, x, device, told = Plain(), torch.randn(2, 64), fast_device(), list[str]()
    handle = dispatch_model(model, memory, device)

    def remove(*_: object) -> None:
        try:
            handle.remove()
        except RuntimeError as error:
            told.append(str(error))

    model.layers[1].register_forward_hook(remove)
    with torch.no_grad():
        torch.testing.assert_close(model(x), Plain()(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(model.layers[1](x), Plain().layers[1](x), rtol=0, atol=1e-5)
        assert told == 2 * ["handle.remove() within a call of the model: call it when the call "
                            "has ended"]  # fmt: skip
        assert device.bytes == handle.plan.accelerator_bytes
        other = nn.Identity()
        other.register_forward_hook(remove)
        other(x)
        assert len(told) == 2 and device.bytes == 0
        assert torch.equal(model(x), Plain()(x)) and len(told) == 2


@pytest.mark.filterwarnings("ignore:the model takes")
@pytest.mark.parametrize("memory", [SPLIT, FITS])
def test_two_threads_put_a_model_back_once(memory: dict) -> None:
    """The second waits for the first: the model is as it was when either returns."""
    begun, closed = threading.Event(), list[float]()

    class Slow(ShapedDevice):
        def close(self) -> None:
            begun.set()
            time.sleep(0.3)
            super().close()
            closed.append(time.perf_counter())

    handle = dispatch_model(Plain(), memory, Slow(1e8, 2e8, 1e10))
    thread = threading.Thread(target=handle.remove, daemon=True)
    thread.start()
    assert begun.wait(20)
    handle.remove()
    assert len(closed) == 1
    thread.join(20)


@pytest.mark.usefixtures("threads_in_turns")
def test_linears_that_another_thread_calls_meanwhile_are_right_or_refused() -> None:
    """No module tells of such calls; none starts the lanes again that `remove` has ended."""
    x, alone, wrong = torch.randn(2, 64), Plain().layers[0], list[object]()
    lanes = set(threading.enumerate())

    def call(model: Plain, ready: threading.Event) -> None:
        with torch.no_grad():
            for _ in range(30):
                ready.set()
                try:
                    torch.testing.assert_close(model.layers[0](x), alone(x), rtol=0, atol=1e-5)
                except RuntimeError as error:
                    if "while handle.remove() puts it back" not in str(error):
                        wrong.append(error)
                except Exception as error:
                    wrong.append(error)

    for _ in range(20):
        model, ready = Plain(), threading.Event()
        with dispatch_model(model, SPLIT, ShapedDevice(1e6, 1e6, 1e9)):
            thread = threading.Thread(target=call, args=(model, ready), daemon=True)
            thread.start()
            assert ready.wait(20)
        thread.join(20)
        assert set(threading.enumerate()) <= lanes
    assert not wrong


class Mixed(nn.Module):
    """Rows of 66 bytes in bfloat16, beside float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(33, 65, dtype=torch.bfloat16)
        self.whole = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.narrow(x.bfloat16()).float()[..., :16])


def test_slabs_hold_rows_of_several_types() -> None:
    x = torch.ones(2, 33)
    with torch.no_grad():
        expected = Mixed()(x)
        model = Mixed()
        with dispatch_model(model, {0: 2_500}, fast_device(), alpha=0.0) as handle:
            assert handle.plan.slab_bytes % 4  # where each begins in one memory
            for _ in range(2):
                torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-2)
