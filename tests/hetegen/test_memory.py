"""Memory of the accelerator and of the host: how it is given, allocated, pinned and freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.hetegen.models import MLP, MLP_RESIDENT, fast_device, max_memory
from wf_backends._validation import parse_bytes
from wf_backends.hetegen import ShapedDevice, dispatch_model
from wf_backends.hetegen.pinned import BLOCK_BYTES

MEMORY: dict[int | str, int | str] = {0: 20_000}  # of the 66,560 bytes of an MLP


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("20GB", 20 * 10**9), ("1.5GiB", 3 * 2**29), ("7 kib", 7 * 1024), ("12B", 12), (5, 5)],
)
def test_sizes_are_parsed_in_decimal_and_binary_units(text: object, nbytes: int) -> None:
    assert parse_bytes("max_memory", text) == nbytes


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({0: "20 parsecs"}, r"max_memory\[0\].*'20 parsecs'"),
        ({0: -1}, r"max_memory\[0\].*-1"),
        ({0: "9" * 400 + "GB"}, r"max_memory\[0\] must be a number of bytes .* got '999"),
        ({0: True}, r"max_memory\[0\].*True"),
        ({"accelerator": "GB"}, r"max_memory\['accelerator'\].*'GB'"),
        ({0: "1GB", "cpu": 1.5}, r"max_memory\['cpu'\].*1.5"),
        ({0: "1GB", 1: "1GB"}, r"may have the keys 0 .*got 1"),
        ({"gpu": "1GB"}, r"the keys 0 \(or \"accelerator\"\) and \"cpu\", got 'gpu'$"),
        ({0: "1GB", "accelerator": "1GB"}, "both 0 and"),
        ({"cpu": "1GB"}, "must say how much of the accelerator"),
        ({0: 100}, r"max_memory\[0\] must be at least 1792 bytes.*got 100"),
        ({0: 30_000, "cpu": 60_000}, r"max_memory\[\"cpu\"\] must be at least .*got 60000"),
    ],
)
def test_wrong_max_memory_is_refused(memory: dict[int | str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch_model(MLP(), memory, fast_device())


def test_a_model_that_fits_is_resident_and_a_warning_says_so() -> None:
    model, device = MLP(), fast_device()
    with pytest.warns(UserWarning, match="takes 66560 bytes and fits .* 1000000: it is simply"):
        handle = dispatch_model(model, MLP_RESIDENT, device)
    assert handle.plan.fits and device.peak_bytes == 66560
    assert all(type(layer.weight) is nn.Parameter for layer in model.layers)
    assert handle.report() == {"fits": True}
    handle.remove()
    assert device.bytes == 0


@pytest.mark.parametrize("pin_memory", [True, "weights"])
def test_remove_frees_slabs_pinned_memory_and_resident_rows_at_once_while_the_handle_lives(
    pin_memory: bool | str,
) -> None:
    model, device = MLP(), fast_device()
    allocated = list[weakref.ref[torch.UntypedStorage]]()

    def allocate(method: Callable[..., Tensor], argument: object) -> Tensor:
        tensor = method(argument)
        allocated.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    device.place = partial(allocate, device.place)  # type: ignore[method-assign]
    device.pinned = partial(allocate, device.pinned)  # type: ignore[method-assign]
    gc.disable()
    try:
        handle = dispatch_model(model, max_memory(model, 0.5), device, pin_memory=pin_memory)
        with torch.no_grad():
            model(torch.ones(1, 64))
        slabs, resident = handle.plan.slabs, len(handle.plan.splits)
        pinned = slabs if pin_memory is True else 1  # a block of all weights
        num_alive = sum(memory() is not None for memory in allocated)
        assert num_alive == slabs + pinned + resident + len(model.layers)  # with their biases
        handle.remove()
        assert all(memory() is None for memory in allocated)
    finally:
        gc.enable()
    assert handle.report()["decode"]["passes"] == 1


@pytest.mark.parametrize("pin_memory", [True, "weights"])
def test_without_pinned_memory_outputs_are_exact_and_the_plan_counts_with_slower_copies(
    pin_memory: bool | str,
) -> None:
    class NoPinnedMemory(ShapedDevice):
        def pinned(self, nbytes: int) -> Tensor:
            raise MemoryError("no pinned memory is left")

    model, x = MLP(), torch.randn(1, 64)
    device, message = NoPinnedMemory(1e7, 1e7, 1e9), r"pageable, 5e\+06 bytes/s instead of 1e\+07"
    with pytest.warns(UserWarning, match=rf"copies are {message}.*s instead of"):
        handle = dispatch_model(model, MEMORY, device, pin_memory=pin_memory)
    with handle, torch.no_grad():
        torch.testing.assert_close(model(x), MLP()(x), rtol=0, atol=1e-5)
        assert device.pinned_bytes == 0 and handle.plan.rates.link == 5e6
        assert handle.plan.splits[0].alpha("decode") > 0.5  # 0.5 with a link as fast as the host


def test_pin_memory_false_needs_host_memory_for_the_weights_alone() -> None:
    device = fast_device()
    weights = 4 * 64 * 64 * 4  # layers, rows, columns, bytes of a float32
    memory = MEMORY | {"cpu": weights}
    with pytest.raises(ValueError, match=rf"at least {weights + 2304} bytes.* got {weights}$"):
        dispatch_model(MLP(), memory, device)
    with dispatch_model(MLP(), memory, device, pin_memory=False) as handle:
        assert device.pinned_bytes == 0 and handle.plan.rates.link == 5e7


def test_an_error_during_allocation_restores_the_model_and_frees_all_memory() -> None:
    class FullDevice(ShapedDevice):
        def place(self, tensor: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    model, device = MLP(), FullDevice(1e8, 2e8, 1e10)
    with pytest.raises(RuntimeError, match="out of memory"):
        dispatch_model(model, MEMORY, device)
    assert all(type(layer.weight) is nn.Parameter for layer in model.layers)
    assert (device.bytes, device.pinned_bytes) == (0, 0)


def test_pinned_weights_share_blocks_and_leave_them_when_the_model_is_restored() -> None:
    model, device = MLP(), fast_device()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with dispatch_model(model, MEMORY, device, pin_memory="weights") as handle:
        memory = {layer.weight.untyped_storage().data_ptr() for layer in model.layers}
        assert len(memory) == 1 and device.pinned_bytes == BLOCK_BYTES
        assert handle.plan.host_bytes == 4 * 64 * 64 * 4  # layers, rows, columns, bytes: no buffers
    assert len({layer.weight.untyped_storage().data_ptr() for layer in model.layers}) == 4
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_no_weight_is_twice_in_memory_once_it_is_pinned() -> None:
    model = MLP()
    memory = [weakref.ref(layer.weight.untyped_storage()) for layer in model.layers]
    with dispatch_model(model, MEMORY, fast_device(), pin_memory="weights"):
        assert all(storage() is None for storage in memory)


def test_weights_that_no_copy_reads_are_not_pinned() -> None:
    device = fast_device()
    with dispatch_model(MLP(), MEMORY, device, alpha=1.0, pin_memory="weights"):
        assert device.pinned_bytes == 0
