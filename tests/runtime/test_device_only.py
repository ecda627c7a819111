"""A call of one rank of eight copies nothing to the host and reads no value from its device.

Reading a value would make the host wait for a GPU. Tensors of torch's device "meta" stand for those
of a GPU: operators give their shapes, dtypes and strides, as do torch's CUDA kernels for attention,
but there is no memory, so that a copy or a read of a value is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.discover import JobTopology
from wf_backends.cluster.measure import measure_topology
from wf_backends.cluster.presets import PRESETS
from wf_backends.comm.protocol import Communicator, Message, Pending
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.kernels import Kernel, KernelSpec, Scores, TileGrad
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.sdpa import SdpaKernel
from wf_backends.kernels.sdpa_cuda import Machine, choose, cuda_tile
from wf_backends.kernels.tile_split import split_window
from wf_backends.parallel import position_dropout
from wf_backends.parallel.attention import DistributedAttention
from wf_backends.parallel.softmax import make_softmax, plain_softmax
from wf_backends.runtime.attention import RouteAttention
from wf_backends.schedule.mask import CAUSAL, Band, Mask

SIZE, RANK, ROWS, HEADS, KV_HEADS, HEAD_DIM = 8, 3, 1024, 16, 8, 64
GPU = torch.device("meta")
FLASH, CUDNN = "_flash_attention_forward", "_scaled_dot_product_cudnn_attention"


class AgreeingPeers(Communicator, Pending):
    """Peers that agree with this rank in every header; rows are received without being written."""

    on_host = True

    def carries(self, device: torch.device) -> bool:
        return True

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        for (_, sent), (_, arriving) in zip(sends, recvs, strict=False):
            if sent.device.type == "cpu":  # a header
                arriving.copy_(sent)
        return self

    def wait(self) -> None: ...

    def poll(self) -> None: ...


class OnDeviceOnly(TorchDispatchMode):
    """Fails at the first operator with tensors of two devices, or that reads a value of a GPU's.

    `operators` has the names of all operators that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        # once ColossalAI is imported, its meta kernel gives 0 in place of an error
        reads_value = func is torch.ops.aten._local_scalar_dense.default
        assert not (reads_value and args[0].device == GPU), "the host waits for a value"
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {x.device.type for x in leaves if isinstance(x, Tensor)}
        assert len(devices) < 2, f"{func} mixes {devices}"
        self.operators.add(func.overloadpacket.__name__)
        return result


class WithKernel:
    """Replaces the kernel of every planned call, which is planned as for a CUDA device."""

    kernel: Kernel

    def _make_call(self, options: Any, mask: Mask, spec: KernelSpec, *args: Any) -> Any:
        parent: Any = super()
        call = parent._make_call(options, mask, replace(spec, device="cuda"), *args)
        return call._replace(kernel=self.kernel)


class AttentionWithKernel(WithKernel, DistributedAttention): ...


def attention_on_gpu(options: dict[str, Any], kernel: Kernel) -> DistributedAttention:
    """The attention of rank 3 of 8 in this configuration."""
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": SIZE} | options)
    comm = AgreeingPeers(RANK, SIZE)
    topology = JobTopology(comm, None, PRESETS["one-host"], Path())
    attention = AttentionWithKernel(config, comm, topology)
    attention.kernel = kernel
    return attention


def sdpa_on(capability: tuple[int, int]) -> SdpaKernel:
    machine = Machine((2, 13), 91501, capability, enabled=True, deterministic=False)
    return SdpaKernel(lambda q, k, band: choose(cuda_tile(machine, q, k, band))[0])


KERNELS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceKernel,
    "sdpa on a Hopper": partial(sdpa_on, (9, 0)),
    "sdpa on an Ampere": partial(sdpa_on, (8, 0)),
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"route": "ring"},
    {"route": "ring", "backward_moves": "queries"},
    {"route": "all_gather", "keep_gathered": True},
    {"route": {"name": "double_ring", "inner": 4}},
    {"route": {"name": "concentric", "team_size": 2}, "layout": "contiguous"},
    {"route": {"name": "mesh", "rows": 2, "cols": 4}, "backward_moves": "queries"},
    {"route": {"name": "mesh", "rows": 4, "cols": 1}, "ulysses_degree": 2},
    {"route": {"name": "mesh", "rows": 2, "cols": 1}, "ulysses_degree": 4, "ulysses_chunks": 2},
    {"route": "ring", "ulysses_degree": 8},
    {"strategy": "lss"},
]
MASKS = {
    "full": Mask(),
    "causal": Mask(CAUSAL),
    "window": Mask(Band(300, 0)),
    "documents": Mask(CAUSAL, (0, 700, 1500, 3000, SIZE * ROWS)),
}
# Every second combination: each kernel still meets each config and each mask.
CALLS = [
    pytest.param(kernel, config, mask, id=f"{kernel}-{config}-{mask}")
    for i, kernel in enumerate(KERNELS)
    for j, config in enumerate(CONFIGS)
    for k, mask in enumerate(MASKS)
    if (i + j + k) % 2 == 0
]


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def operators_of_call(config: dict[str, Any], mask: Mask, kernel: Kernel) -> set[str]:
    """Names of the operators of a forward and a backward."""
    attention = attention_on_gpu(config, kernel)
    q, k, v = (
        torch.empty(2, ROWS, heads, HEAD_DIM, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    with OnDeviceOnly() as mode:
        softmax = plain_softmax(16)
        call = attention.call(q, k, v, mask, softmax, None)
        out = RouteAttention.apply(q, k, v, call, *softmax.learned)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    for actual, x in zip((out, *grads), (q, q, k, v), strict=True):
        assert (actual.shape, actual.dtype, actual.device) == (x.shape, x.dtype, GPU)
    return mode.operators


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize(("kernel", "config", "mask"), CALLS)
def test_attention_stays_on_the_gpu_and_reads_no_value(
    kernel: str, config: dict[str, Any], mask: str
) -> None:
    """Torch's kernels for attention are those that this GPU takes, none for "reference"."""
    operators = operators_of_call(config, MASKS[mask], KERNELS[kernel]())
    attention_kernels = operators & {FLASH, CUDNN}
    if kernel == "reference":
        assert not attention_kernels
    elif kernel == "sdpa on an Ampere":
        assert attention_kernels == {FLASH}
    elif mask in ("full", "causal"):
        assert CUDNN in attention_kernels
    else:
        assert attention_kernels


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize("config", ({"route": "ring"}, {"route": "ring", "ulysses_degree": 4}))
@pytest.mark.parametrize("seed", (None, 3))
def test_attention_with_options_stays_on_the_gpu(seed: int | None, config: dict[str, Any]) -> None:
    q = torch.empty(2, ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    slopes, sinks = torch.empty(2, HEADS, device=GPU)
    with OnDeviceOnly():
        softmax = make_softmax(q, None, 30.0, slopes, sinks, 0.1, seed)
        attention = attention_on_gpu(config, ReferenceKernel())
        call = attention.call(q, q, q, MASKS["causal"], softmax, None)
        RouteAttention.apply(q, q, q, call, *softmax.learned)


@pytest.mark.parametrize("band", (Band(right=3), Band(20, 2)))
def test_a_tile_in_parts_stays_on_the_gpu(band: Band) -> None:
    """40 rows and 12 keys: flash-attn has no window for more rows than keys."""
    kernel = sdpa_on((8, 0))
    assert len(split_window(40, 12, band)) > 1
    q = torch.empty(2, 40, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    k = torch.empty(2, 12, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    with OnDeviceOnly():
        out, lse = kernel.forward(q, k, k, Scores(0.1), band)
        grads = kernel.backward(TileGrad(q, q, k, k, q, lse, lse), Scores(0.1), band)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape]


def shard_and_unshard(sp: SequenceParallel) -> None:
    x = torch.empty(2, SIZE * ROWS, 4, device=GPU, requires_grad=True)
    local = sp.shard(x)
    gathered = sp.unshard(local)
    (grad,) = torch.autograd.grad(gathered, x, torch.empty_like(gathered))
    assert local.shape == (2, ROWS, 4) and gathered.shape == grad.shape == x.shape


def token_loss(sp: SequenceParallel) -> None:
    logits = torch.empty(2, ROWS, 100, dtype=torch.bfloat16, device=GPU, requires_grad=True)
    labels = torch.empty(2, ROWS, dtype=torch.int64, device=GPU)
    loss = sp.loss(logits, labels)
    (grad,) = torch.autograd.grad(loss, logits)
    assert (loss.shape, loss.dtype, grad.shape) == ((), torch.float32, logits.shape)


def dropout(sp: SequenceParallel) -> None:
    x = torch.empty(2, ROWS, 4, device=GPU, requires_grad=True)
    positions = torch.empty(ROWS, dtype=torch.int64, device=GPU)
    out = position_dropout(x, positions, 0.1, seed=3)
    (grad,) = torch.autograd.grad(out, x, torch.empty_like(out))
    assert out.shape == grad.shape == x.shape


def switch_dims(sp: SequenceParallel) -> None:
    dsp = DynamicSequenceParallel(sp.comm)
    x = torch.empty(2, 16, 24, 4, device=GPU, requires_grad=True)
    gathered = dsp.gather(dsp.switch(dsp.split(x, 1), 1, 2), 2)
    (grad,) = torch.autograd.grad(gathered, x, torch.empty_like(gathered))
    assert gathered.shape == grad.shape == x.shape


@pytest.mark.parametrize("use", (shard_and_unshard, token_loss, dropout, switch_dims))
def test_other_methods_stay_on_the_gpu(use: Callable[[SequenceParallel], None]) -> None:
    sp = SequenceParallel(
        SequenceParallelConfig(sequence_parallel_size=SIZE), AgreeingPeers(RANK, SIZE)
    )
    with OnDeviceOnly():
        use(sp)


def test_measuring_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sdpa_on((9, 0))
    monkeypatch.setattr("wf_backends.cluster.measure_kernels.select", lambda *_: kernel)
    hosts = [f"host {rank // 4}" for rank in range(SIZE)]
    topology = measure_topology(AgreeingPeers(RANK, SIZE), hosts, GPU)
    assert (topology.hosts, topology.ranks_per_host, topology.kernels[0][0]) == (2, 4, "sdpa")


@pytest.mark.parametrize(
    "operation",
    (
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: bool(x[0]),
        lambda x: x.copy_(torch.zeros(4)),
    ),
)
def test_reading_a_value_and_mixing_devices_fail(operation: Callable[[Tensor], object]) -> None:
    """Each of these would make the tests above fail."""
    with OnDeviceOnly(), pytest.raises((AssertionError, NotImplementedError)):
        operation(torch.empty(4, device=GPU))
