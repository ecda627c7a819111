"""The bytes that a run allocates, and the peak of a model without a plan, on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from wf_backends.autochunk.graph.errors import as_capture_errors
from wf_backends.autochunk.graph.experts import fake_grouped_mm
from wf_backends.autochunk.graph.inputs import named_weights, restored_attributes
from wf_backends.autochunk.graph.packing import packing_check_on_fakes


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that counts the bytes of the storages that operators allocate inside it.

    `live` and `peak` are bytes. The storages of the tensors `known` are not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        self.peak = max(self.peak, self.live + _temporary_bytes(func, result))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.live += storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address: int, count: int) -> None:
        self._seen.discard(address)
        self.live -= count


def _temporary_bytes(func: Any, result: Any) -> int:
    """Bytes that an operator has for a moment beside its result, and a dispatch mode cannot see.

    The softmax of attention's math kernel makes a mask of the scores that are -inf. On CUDA the
    backward of a softmax multiplies gradient and output first
    (aten/src/ATen/native/cuda/SoftMax.cu).
    """
    if func is torch.ops.aten._safe_softmax.default:
        return result.numel()
    if func is torch.ops.aten._softmax_backward_data.default and result.device.type == "cuda":
        return result.nbytes
    return 0


class FakeRun(StorageTracker):
    """Counts a run on fake tensors, in which the value of a tensor reads as True, so that branches
    are taken as for a mask without padding. A tensor made from a number keeps its value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads_value = func is torch.ops.aten._local_scalar_dense.default
        if reads_value and getattr(args[0], "constant", None) is None:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)


def planning_lock() -> AbstractContextManager[Any]:
    """Inside, a thread may capture a model and run it on fake tensors.

    One thread at a time, and none beside `torch.compile`: a trace changes what torch keeps for the
    whole process.
    """
    from torch._dynamo.convert_frame import compile_lock  # slow to import

    return compile_lock


@contextmanager
def fake_run(model: nn.Module, mode: FakeTensorMode, known: Iterable[Tensor]) -> Iterator[FakeRun]:
    """Inside, a run of the model on fake tensors of `mode` is counted, without those in `known`."""
    tracker = FakeRun(known)
    with packing_check_on_fakes(), fake_grouped_mm(), restored_attributes(model), mode, tracker:
        yield tracker


def in_fake_run() -> bool:
    """Whether this thread is inside a `fake_run`, in which memory counts and values do not."""
    return any(isinstance(mode, FakeRun) for mode in _get_current_dispatch_mode_stack())


def unchunked_peak(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The peak of live bytes of ``model(*args, **kwargs)`` without gradients, beyond weights, other
    tensors that are attributes of modules, and inputs, by a run on fake tensors.

    Raises `CaptureError` if the model does not run on fake tensors.
    """
    modes = [weight.fake_mode for weight in model.parameters() if isinstance(weight, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Tensor) -> Tensor:
        return value if isinstance(value, FakeTensor) else mode.from_tensor(value)

    weights = {name: fake(weight) for name, weight in named_weights(model)}
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    attributes = [x for module in model.modules() for x in vars(module).values()]
    constants = (x for x in attributes if isinstance(x, Tensor) and x.layout is torch.strided)
    with as_capture_errors(model, "run on fake tensors"):  # e.g. nested tensors, TorchScript
        known = *weights.values(), *inputs, *map(fake, constants)
        with torch.no_grad(), fake_run(model, mode, known) as tracker:
            torch.func.functional_call(model, weights, args, kwargs, tie_weights=False)
    return tracker.peak
