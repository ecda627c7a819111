"""HeteGen on a GPU: tokens, logits, memory and errors beside the model alone there."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.dense import largest
from tests.hetegen.models import CONFIGS, Plain, make_model, split_memory
from tests.hetegen.test_exact import generate, ids_of
from wf_backends.hetegen import Handle, Rates, accelerator, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.measure import measure_rates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

RATES = Rates(1e8, 2e8, 1e10)
WHERE = torch.device("cuda", 0)
SOON = 5.0  # seconds in which an error has to come


class Unpinned(accelerator.Streams):
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise RuntimeError("none is left")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


def used() -> int:
    """Bytes of the GPU's memory that were asked for; what is allocated may be 1 MB a block more."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def pinned_bytes() -> int:
    """Of pinned memory that tensors have."""
    told = torch.cuda.host_memory_stats()
    return told.get("active_bytes.current", told["allocated_bytes.current"])


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.cpu()


def off(got: Tensor, expected: Tensor) -> float:
    """The largest difference, beside the largest value."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_and_logits(name: str, batch: int) -> None:
    model, ids = make_model(name), ids_of(batch).to(WHERE)
    alone = copy.deepcopy(model).to(WHERE)
    if hasattr(alone, "set_experts_implementation"):
        alone.set_experts_implementation("eager")  # the others want types and sizes of their own
    expected, on_host = logits_of(alone, ids), logits_of(model, ids.cpu())
    tokens = [generate(alone, ids, sample).cpu() for sample in (False, True)]
    device = Accelerator(RATES)
    handle = dispatch_model(model, split_memory(model, 0.5), device, batch=batch, prompt=9)
    got = [logits_of(model, ids) for _ in range(3)]
    generated = [generate(model, ids, sample).cpu() for sample in (False, True)]
    told = handle.report()
    handle.remove()
    print(
        f"\n{name} batch {batch}: off {[f'{off(each, expected):.1e}' for each in got]}, "
        f"the CPU {off(on_host, expected):.1e}; "
        f"{ {phase: told[phase] for phase in ('decode', 'prefill')} }"
    )
    assert largest(off(each, expected) for each in got) <= 1e-5
    for sampled, (ours, theirs) in enumerate(zip(generated, tokens, strict=True)):
        assert torch.equal(ours, theirs), (sampled, ours.tolist(), theirs.tolist())
    assert torch.equal(logits_of(model, ids.cpu()), on_host)  # as it was
    for phase in ("decode", "prefill"):
        assert told[phase]["passes"] > 0 and told[phase]["measured_seconds"] > 0
        assert told[phase]["predicted_seconds"] > 0
    assert all(told["lanes"][lane]["bytes"] > 0 for lane in ("link", "host", "accelerator"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_is_as_near_as_that_of_the_gpu(name: str) -> None:
    model, ids = make_model(name), ids_of(3).to(WHERE)
    exactly = logits_of(copy.deepcopy(model).to(WHERE), ids).double()
    alone = logits_of(copy.deepcopy(model).bfloat16().to(WHERE), ids).double()
    model = model.bfloat16()
    with dispatch_model(model, split_memory(model, 0.5), Accelerator(RATES)):
        ours = logits_of(model, ids).double()
    errors = [float((each - exactly).square().mean().sqrt()) for each in (ours, alone)]
    print(f"\n{name} bfloat16: root mean square off float32, ours and the GPU's alone: {errors}")
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_memory_is_as_planned_and_given_back(share: float) -> None:
    """9 layers of 1024 x 1024, of which so much may be on the GPU."""
    model, x = Plain(layers=9, width=1024), torch.randn(2, 1024)
    expected = copy.deepcopy(model).to(WHERE)(x.to(WHERE)).detach().cpu()
    before, pinned_before = used(), pinned_bytes()
    allocated = -torch.cuda.memory_allocated()
    handle = dispatch_model(model, split_memory(model, share), Accelerator(RATES))
    plan, taken = handle.plan, used() - before
    allocated += torch.cuda.memory_allocated()
    pinned = pinned_bytes() - pinned_before
    with torch.no_grad():
        got = [model(x.to(WHERE)).cpu() for _ in range(4)]
    after = used() - before
    handle.remove()
    left = used() - before
    pinned_left = pinned_bytes() - pinned_before
    slabs = plan.slabs * plan.slab_bytes
    print(
        f"\n{share}: {taken} bytes on the GPU ({allocated} allocated), {after} after calls, "
        f"{left} left; planned {plan.accelerator_bytes} of {plan.request.accelerator_bytes}; "
        f"slabs {slabs}, pinned {pinned}, {pinned_left} left; "
        f"off {[f'{off(each, expected):.1e}' for each in got]}"
    )
    assert plan.accelerator_bytes <= plan.request.accelerator_bytes
    assert taken <= plan.accelerator_bytes and left == 0
    assert pinned <= 2 * slabs + 2**14  # the allocator rounds to powers of 2
    assert largest(off(each, expected) for each in got) <= 1e-5


def test_an_error_of_a_lane_reaches_the_caller() -> None:
    model, x = Plain(), torch.randn(1, 64)
    device = Accelerator(RATES)
    handle = dispatch_model(model, {0: 20_000}, device, alpha=0.5)
    compute_on_host = device.compute_on_host

    def fail(x: Tensor, there: Tensor) -> None:
        raise OSError("no way back")

    device.compute_on_host = lambda _, *rest: compute_on_host(fail, *rest)  # type: ignore[method-assign]
    start = time.perf_counter()
    with torch.no_grad():
        with pytest.raises(OSError, match="no way back"):
            model(x.to(WHERE))
        took = time.perf_counter() - start
        del device.compute_on_host
        got = model(x.to(WHERE)).cpu()
    handle.remove()
    print(f"\nthe error came after {took:.2f} s")
    assert took < SOON and off(got, Plain()(x)) <= 1e-5


def test_without_pinned_memory() -> None:
    model, x = Plain(), torch.randn(3, 64)
    with pytest.warns(UserWarning) as warned:
        handle = dispatch_model(model, {0: 20_000}, Accelerator(RATES, Unpinned()))
    with torch.no_grad():
        got = [model(x.to(WHERE)).cpu() for _ in range(3)]
    handle.remove()
    texts = "\n".join(str(each.message) for each in warned)
    assert "pinned memory ran out" in texts
    assert largest(off(each, Plain()(x)) for each in got) <= 1e-5


def test_on_a_stream_of_the_callers() -> None:
    """Inputs are made and outputs read there, with nothing that waits in between."""
    model, x = Plain(layers=12, width=256), torch.randn(3, 256)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        with dispatch_model(model, split_memory(model, 0.4), Accelerator(RATES)):
            got = [model(x.to(WHERE, non_blocking=True)) for _ in range(20)]
            got = [each.cpu() for each in got]
    assert largest(off(each, Plain(12, 256)(x)) for each in got) <= 1e-5


def test_calls_that_lock_the_driver_between_linears() -> None:
    """A kernel's first launch and memory given back wait for streams, which wait for the lanes."""
    model, x = Plain(layers=12, width=256), torch.randn(3, 256)
    new = iter([torch.special.i0, torch.special.i0e, torch.special.i1, torch.special.erfcx])

    def between(module: nn.Module, inputs: object, out: Tensor) -> None:
        next(new, torch.neg)(out)
        torch.empty(2**21, dtype=torch.uint8, pin_memory=True)
        torch.cuda.empty_cache()

    with dispatch_model(model, split_memory(model, 0.4), Accelerator(RATES)), torch.no_grad():
        hooks = [each.register_forward_hook(between) for each in model.modules()]
        got = [model(x.to(WHERE)).cpu() for _ in range(5)]
        for hook in hooks:
            hook.remove()
    assert largest(off(each, Plain(12, 256)(x)) for each in got) <= 1e-5


def test_rates_are_those_of_a_machine() -> None:
    rates = measure_rates(accelerator.Streams(), torch.bfloat16, width=2048, seconds=0.1)
    print(f"\n{torch.get_num_threads()} thread: {rates}")
    assert rates.accelerator > rates.host and 1e9 < rates.link < 1e12
    assert 0 < rates.call_seconds < 0.01


def test_the_first_script_of_the_docs(tmp_path: Path) -> None:
    """A folder's model, rates that are measured, generate, report and remove."""
    from wf_transformers import model_from_folder

    alone = make_model("llama")
    alone.save_pretrained(tmp_path)
    model = model_from_folder(str(tmp_path))
    size = sum(split_memory(model, 0.5).values(), 0)  # type: ignore[arg-type]
    handle: Handle = dispatch_model(model, max_memory={0: size, "cpu": "100GB"})
    ids = ids_of(1).to(torch.accelerator.current_accelerator())
    got = model.generate(ids, max_new_tokens=8)[0].cpu()
    told = handle.plan.decode_seconds, handle.plan.streaming_seconds, handle.plan.host_seconds
    print(f"\n{handle.plan.rates}\n{told}\n{handle.report()}")
    handle.remove()
    expected = alone.to(WHERE).generate(ids, max_new_tokens=8)[0].cpu()
    assert torch.equal(got, expected)
