"""One rank of eight on tensors without memory: nothing strays to the host or waits for a value.

Tensors of torch's device "meta" play a GPU's: operators give shapes, dtypes and strides, torch's
CUDA kernels for attention too. There is no value to be asked for, which on a GPU would make the
host wait, and nothing that could be copied to the host.
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
from wf_backends.parallel.attention import DistributedAttention, run
from wf_backends.parallel.softmax import make_softmax, plain_softmax
from wf_backends.schedule.mask import CAUSAL, Band, Mask

SIZE, RANK, ROWS, HEADS, KV_HEADS, HEAD_DIM = 8, 3, 1024, 16, 8, 64
GPU = torch.device("meta")
FLASH, CUDNN = "_flash_attention_forward", "_scaled_dot_product_cudnn_attention"


class Silent(Communicator, Pending):
    """A rank over NCCL and gloo whose peers agree with it, take everything and send nothing."""

    on_host = True

    def carries(self, device: torch.device) -> bool:
        return True

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        for (_, sent), (_, arriving) in zip(sends, recvs, strict=False):
            if sent.device.type == "cpu":  # headers
                arriving.copy_(sent)
        return self

    def wait(self) -> None: ...

    def poll(self) -> None: ...


class Apart(TorchDispatchMode):
    """Fails at the first operator that mixes the GPU's tensors with others, or asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if (
            func is torch.ops.aten._local_scalar_dense.default
        ):  # for ColossalAI's meta kernel it is 0
            assert args[0].device != GPU, "the host waits for a value"
        found = func(*args, **(kwargs or {}))
        on = {x.device.type for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)}
        assert len(on) < 2, f"{func} mixes {on}"
        self.ran.add(func.overloadpacket.__name__)
        return found


class OnGpu:
    """Plans with a kernel that takes the GPU's tensors for what they are."""

    kernel: Kernel

    def _make_call(self, told: Any, mask: Mask, spec: KernelSpec, *args: Any) -> Any:
        make: Any = super()
        call, group = make._make_call(told, mask, replace(spec, device="cuda"), *args)
        return call._replace(kernel=self.kernel), group


class AttentionOnGpu(OnGpu, DistributedAttention): ...


def attention_on_gpu(words: dict[str, Any], kernel: Kernel) -> DistributedAttention:
    """The rank's attention, by a config's words."""
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": SIZE} | words)
    comm = Silent(RANK, SIZE)
    found = AttentionOnGpu(config, comm, JobTopology(comm, None, PRESETS["one-host"], Path()))
    found.kernel = kernel
    return found


def sdpa_on(capability: tuple[int, int]) -> SdpaKernel:
    machine = Machine((2, 13), 91501, capability, enabled=True, deterministic=False)
    return SdpaKernel(lambda q, k, band: choose(cuda_tile(machine, q, k, band))[0])


KERNELS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceKernel,
    "sdpa on a Hopper": partial(sdpa_on, (9, 0)),
    "sdpa on an Ampere": partial(sdpa_on, (8, 0)),
}
WORDS: list[dict[str, Any]] = [
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
# Each kernel meets each words and each mask; all three together, every second time.
CALLS = [
    pytest.param(kernel, words, mask, id=f"{kernel}-{words}-{mask}")
    for i, kernel in enumerate(KERNELS)
    for j, words in enumerate(WORDS)
    for k, mask in enumerate(MASKS)
    if (i + j + k) % 2 == 0
]


def call(words: dict[str, Any], mask: Mask, kernel: Kernel) -> set[str]:
    """The operators of a forward and a backward."""
    attention = attention_on_gpu(words, kernel)
    q, k, v = (
        torch.empty(2, ROWS, heads, HEAD_DIM, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    with Apart() as mode:
        softmax = plain_softmax(16)
        planned = attention.call(q, k, v, mask, softmax, None)
        out = run(q, k, v, *planned, softmax.learned)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    for found, like in zip((out, *grads), (q, q, k, v), strict=True):
        assert (found.shape, found.dtype, found.device) == (like.shape, like.dtype, GPU)
    return mode.ran


@pytest.mark.parametrize(("kernel", "words", "mask"), CALLS)
def test_a_call_stays_on_the_gpu_and_asks_for_no_value(
    kernel: str, words: Any, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none on meta
    ran = call(words, MASKS[mask], KERNELS[kernel]())
    assert bool(ran & {FLASH, CUDNN}) == (kernel != "reference")
    assert FLASH in ran or kernel != "sdpa on an Ampere"
    assert CUDNN in ran or kernel != "sdpa on a Hopper" or mask not in ("full", "causal")
    assert CUDNN not in ran or kernel == "sdpa on a Hopper"


@pytest.mark.parametrize("seed", (None, 3))
def test_so_does_a_call_with_every_option(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none on meta
    q = torch.empty(2, ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    slopes, sinks = torch.empty(2, HEADS, device=GPU)
    for words in ({"route": "ring"}, {"route": "ring", "ulysses_degree": 4}):
        with Apart():
            softmax = make_softmax(q, None, 30.0, slopes, sinks, 0.1, seed)
            attention = attention_on_gpu(words, ReferenceKernel())
            planned = attention.call(q, q, q, MASKS["causal"], softmax, None)
            run(q, q, q, *planned, softmax.learned)


@pytest.mark.parametrize(("rows", "keys", "band"), ((40, 12, Band(right=3)), (40, 12, Band(20, 2))))
def test_so_does_a_tile_in_parts(rows: int, keys: int, band: Band) -> None:
    """More rows than keys, as flash-attn's window does not say it."""
    kernel = sdpa_on((8, 0))
    assert len(split_window(rows, keys, band)) > 1
    q = torch.empty(2, rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    k = torch.empty(2, keys, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    with Apart():
        out, lse = kernel.forward(q, k, k, Scores(0.1), band)
        grads = kernel.backward(TileGrad(q, q, k, k, q, lse, lse), Scores(0.1), band)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape, k.shape]


def shards(sp: SequenceParallel) -> None:
    x = torch.empty(2, SIZE * ROWS, 4, device=GPU, requires_grad=True)
    mine = sp.shard(x)
    whole = sp.unshard(mine)
    (grad,) = torch.autograd.grad(whole, x, torch.empty_like(whole))
    assert mine.shape == (2, ROWS, 4) and whole.shape == grad.shape == x.shape


def loss(sp: SequenceParallel) -> None:
    logits = torch.empty(2, ROWS, 100, dtype=torch.bfloat16, device=GPU, requires_grad=True)
    labels = torch.empty(2, ROWS, dtype=torch.int64, device=GPU)
    found = sp.loss(logits, labels)
    (grad,) = torch.autograd.grad(found, logits)
    assert (found.shape, found.dtype, grad.shape) == ((), torch.float32, logits.shape)


def dropout(sp: SequenceParallel) -> None:
    x = torch.empty(2, ROWS, 4, device=GPU, requires_grad=True)
    positions = torch.empty(ROWS, dtype=torch.int64, device=GPU)
    found = position_dropout(x, positions, 0.1, seed=3)
    (grad,) = torch.autograd.grad(found, x, torch.empty_like(found))
    assert found.shape == grad.shape == x.shape


def switches(sp: SequenceParallel) -> None:
    dsp = DynamicSequenceParallel(sp.comm)
    x = torch.empty(2, 16, 24, 4, device=GPU, requires_grad=True)
    whole = dsp.gather(dsp.switch(dsp.split(x, 1), 1, 2), 2)
    (grad,) = torch.autograd.grad(whole, x, torch.empty_like(whole))
    assert whole.shape == grad.shape == x.shape


@pytest.mark.parametrize("work", (shards, loss, dropout, switches))
def test_so_does_what_stands_around_attention(work: Callable[[SequenceParallel], None]) -> None:
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=SIZE), Silent(RANK, SIZE))
    with Apart():
        work(sp)


def test_measuring_takes_a_gpus_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but their times; no value of them is asked for either."""
    kernel = sdpa_on((9, 0))
    monkeypatch.setattr("wf_backends.cluster.measure_kernels.select", lambda *_: kernel)
    found = measure_topology(Silent(RANK, SIZE), [f"host {rank // 4}" for rank in range(SIZE)], GPU)
    assert (found.hosts, found.ranks_per_host, found.kernels[0][0]) == (2, 4, "sdpa")


@pytest.mark.parametrize(
    "wait",
    (
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: bool(x[0]),
        lambda x: x.copy_(torch.zeros(4)),
    ),
)
def test_what_waits_for_the_gpu_or_strays_from_it_is_seen(wait: Callable[[Tensor], object]) -> None:
    with Apart(), pytest.raises((AssertionError, NotImplementedError)):
        wait(torch.empty(4, device=GPU))
