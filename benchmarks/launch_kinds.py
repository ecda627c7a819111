"""The calls that `launch_queue.py` puts on a stream: each kind prepares itself and gives a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[[], object]
WIDTH = 512
PASSES = 10  # of 64 linears


def matrix(setting: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (WIDTH, WIDTH)), device=setting.device, dtype=dtype)


def warm(call: Call) -> Call:
    """What a first call does besides is done before the stream is held."""
    call()
    return call


def lock_kept(_: Any) -> Call:
    return lambda: ctypes.PyDLL(None).usleep(500_000)


def lock_given(_: Any) -> Call:
    return lambda: ctypes.CDLL(None).usleep(500_000)


def add(setting: Any) -> Call:
    x = matrix(setting)
    return warm(lambda: x.add_(1))


def matmul(setting: Any) -> Call:
    a, b, out = (matrix(setting) for _ in range(3))
    return warm(lambda: torch.mm(a, b, out=out))


def linear_bias(setting: Any) -> Call:
    layer = nn.Linear(WIDTH, WIDTH, device=setting.device).requires_grad_(False)
    x = matrix(setting, 1, WIDTH)
    return warm(lambda: layer(x))


def sdpa(setting: Any) -> Call:
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    q, k, v = (matrix(setting, 1, 4, 64, 64, dtype=dtype) for _ in range(3))
    return warm(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def copy_to(setting: Any) -> Call:
    there, here = matrix(setting), torch.empty(WIDTH, WIDTH, pin_memory=True)
    return warm(lambda: there.copy_(here, non_blocking=True))


def copy_from(setting: Any) -> Call:
    there, here = matrix(setting), torch.empty(WIDTH, WIDTH, pin_memory=True)
    return warm(lambda: here.copy_(there, non_blocking=True))


def pinned_used_and_freed(setting: Any) -> Call:
    there = matrix(setting)

    def call() -> None:
        there.copy_(torch.empty(WIDTH, WIDTH, pin_memory=True), non_blocking=True)

    return warm(call)


def torch_event(setting: Any) -> Call:
    stream = torch.accelerator.current_stream()
    return warm(lambda: torch.Event(setting.device).record(stream))


def torch_wait(setting: Any) -> Call:
    event, stream = torch.Event(setting.device), torch.accelerator.current_stream()
    event.record(torch.Stream(setting.device))
    return warm(lambda: stream.wait_event(event))


def cuda_event(setting: Any) -> Call:
    stream = torch.accelerator.current_stream()
    return warm(lambda: torch.cuda.Event().record(stream))


def cuda_wait(setting: Any) -> Call:
    event, stream = torch.cuda.Event(), torch.accelerator.current_stream()
    event.record(setting.free)
    return warm(lambda: event.wait(stream))


def gate(setting: Any) -> Call:
    return warm(lambda: setting.gate.hold(setting.stream, 0))


def triton(setting: Any) -> Call:
    from launch_triton import add_one

    x = matrix(setting)
    return warm(lambda: add_one[(1,)](x, BLOCK=WIDTH))


def pinned_new(_: Any) -> Call:
    """cudaHostAlloc, each time, until 2 GB are taken."""
    kept, size = list[Tensor](), iter([2**22] * 500)
    return lambda: kept.append(torch.empty(next(size, 0), dtype=torch.uint8, pin_memory=True))


def device_new(setting: Any) -> Call:
    """cudaMalloc, each time, until 24 GB are taken."""
    kept, size, words = list[Tensor](), iter([2**27] * 180), {"device": setting.device}
    return lambda: kept.append(torch.empty(next(size, 0), dtype=torch.uint8, **words))


def device_free(setting: Any) -> Call:
    """cudaFree, each time."""

    def call() -> None:
        del_me = torch.empty(2**27, dtype=torch.uint8, device=setting.device)
        del del_me
        torch.cuda.empty_cache()

    return warm(call)


def new_kernel(setting: Any) -> Call:
    """Kernels that were not loaded yet, which the driver may load with the device at rest."""
    x = matrix(setting)
    kernels = [
        torch.erfinv, torch.lgamma, torch.digamma, torch.special.i1e, torch.special.ndtri,
        torch.asinh, torch.atanh, torch.expm1, torch.logit, torch.frac, torch.sinc,
    ]  # fmt: skip
    rest = iter(kernels + [torch.neg] * 10_000)
    return lambda: next(rest)(x)


def llama(setting: Any) -> Call:
    """A decoding pass of 32 layers; the threshold is larger, a pass itself takes longer."""
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=32,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(setting.device).eval()
    ids = torch.ones(1, 1, dtype=torch.long, device=setting.device)
    where = torch.zeros_like(ids)  # a mask would be read by the host

    def call() -> None:
        with torch.inference_mode():
            model(ids, position_ids=where, past_key_values=DynamicCache())

    warm(call)
    return warm(call)


def executor(setting: Any) -> Call:
    """HeteGen's own lanes, from a cold start: passes that nobody waits for."""
    from wf_backends.hetegen import Accelerator, Rates, dispatch_model

    linears = [nn.Linear(1024, 1024, bias=False) for _ in range(64)]
    model = nn.Sequential(*linears).requires_grad_(False)
    device = Accelerator(Rates(2e10, 2e10, 1e12))
    handle = dispatch_model(model, {0: 2**26}, device, alpha=0.5)
    x = torch.zeros(4, 1024, device=setting.device)

    def call() -> None:
        with torch.inference_mode():
            for _ in range(PASSES):
                handle.model(x)

    return call


def executor_asks_events(setting: Any) -> Call:
    """The same where its threads ask the driver whether a stream is there."""
    from wf_backends.hetegen import accelerator

    accelerator.Marks = lambda count: SimpleNamespace(mark=lambda stream: None)
    return executor(setting)


def executor_beside(setting: Any) -> Call:
    """With calls between linears that lock the driver: new kernels, memory given back."""
    call, new, free = executor(setting), new_kernel(setting), device_free(setting)

    def between(*_: Any) -> None:
        new()
        free()

    torch.nn.modules.module.register_module_forward_hook(between)
    return call


KINDS: dict[str, Callable[[Any], Call]] = {
    "lock_kept": lock_kept,
    "lock_given": lock_given,
    "add": add,
    "matmul": matmul,
    "linear_bias": linear_bias,
    "sdpa": sdpa,
    "copy_to": copy_to,
    "copy_from": copy_from,
    "pinned_used_and_freed": pinned_used_and_freed,
    "torch_event": torch_event,
    "torch_wait": torch_wait,
    "cuda_event": cuda_event,
    "cuda_wait": cuda_wait,
    "gate": gate,
    "triton": triton,
    "pinned_new": pinned_new,
    "device_new": device_new,
    "device_free": device_free,
    "new_kernel": new_kernel,
    "llama": llama,
    "executor": executor,
    "executor_beside": executor_beside,
    "executor_asks_events": executor_asks_events,
}
ON_CPU = ["lock_kept", "lock_given", "add", "matmul", "linear_bias", "sdpa", "llama"]
THRESHOLDS = {"llama": 0.4, "executor": 8.0, "executor_beside": 8.0, "executor_asks_events": 8.0}
