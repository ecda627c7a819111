"""HeteGen on a GPU: tokens, logits, memory and errors, beside the same model alone on the GPU."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dense import largest
from tests.hetegen.models import CONFIGS, MLP, generate, make_ids, make_model, max_memory
from wf_backends.hetegen import Handle, Rates, dispatch_model
from wf_backends.hetegen.accelerator import Accelerator, HostOutput
from wf_backends.hetegen.device import Operation
from wf_backends.hetegen.measure import measure_rates
from wf_backends.hetegen.split_model import SplitWeight
from wf_backends.hetegen.streams import Streams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

RATES = Rates(1e8, 2e8, 1e10)
MEMORY: dict[int | str, int | str] = {0: 20_000}  # of the 66,560 bytes of an MLP
GPU = torch.device("cuda", 0)
NUM_TOKENS = 6
MAX_ERROR = 1e-5  # of float32, relative to the largest value
ERROR_SECONDS = 5.0  # by then an error in a lane has been raised


class UnpinnedStreams(Streams):
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise RuntimeError("no pinned memory is left")


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


def requested_bytes() -> int:
    """The GPU's memory that tensors asked for; torch allocates up to 1 MB more for each."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def pinned_bytes() -> int:
    """Pinned memory that tensors have."""
    stats = torch.cuda.host_memory_stats()
    return stats.get("active_bytes.current", stats["allocated_bytes.current"])


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.cpu()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("pin_memory", [True, "weights"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logits_of_a_transformer_are_those_of_the_gpu_alone(
    name: str, batch: int, pin_memory: bool | str
) -> None:
    model, ids = make_model(name), make_ids(batch).to(GPU)
    alone = copy.deepcopy(model).to(GPU)
    if hasattr(alone, "set_experts_implementation"):
        # The other implementations take only some dtypes and sizes.
        alone.set_experts_implementation("eager")
    expected, cpu_logits = logits_of(alone, ids), logits_of(model, ids.cpu())
    expected_tokens = [generate(alone, ids, NUM_TOKENS, sample).cpu() for sample in (False, True)]

    options = {"batch": batch, "prompt": 9, "pin_memory": pin_memory}
    handle = dispatch_model(model, max_memory(model, 0.5), Accelerator(RATES), **options)
    split = [weight.detach() for weight in model.parameters() if type(weight) is SplitWeight]
    assert any(weight.is_pinned() for weight in split) == (pin_memory == "weights")
    logits = [logits_of(model, ids) for _ in range(3)]
    tokens = [generate(model, ids, NUM_TOKENS, sample).cpu() for sample in (False, True)]
    report = handle.report()
    handle.remove()

    errors = [relative_error(actual, expected) for actual in logits]
    print(
        f"\n{name} batch {batch}: errors {[f'{error:.1e}' for error in errors]}, "
        f"of the CPU {relative_error(cpu_logits, expected):.1e}; "
        f"{ {phase: report[phase] for phase in ('decode', 'prefill')} }"
    )
    assert largest(errors) <= MAX_ERROR
    for sampled, (actual_ids, expected_ids) in enumerate(zip(tokens, expected_tokens, strict=True)):
        assert torch.equal(actual_ids, expected_ids), (
            sampled,
            actual_ids.tolist(),
            expected_ids.tolist(),
        )
    assert torch.equal(logits_of(model, ids.cpu()), cpu_logits)
    for phase in ("decode", "prefill"):
        assert report[phase]["passes"] > 0 and report[phase]["measured_seconds"] > 0
        assert report[phase]["predicted_seconds"] > 0
    assert all(report["lanes"][lane]["bytes"] > 0 for lane in ("link", "host", "accelerator"))


def test_tokens_with_a_static_cache_are_those_with_a_cache_that_grows() -> None:
    """With a static cache on a GPU transformers compiles a model that is not split."""
    model, ids = make_model("llama"), make_ids(1).to(GPU)
    expected = generate(model, ids.cpu(), NUM_TOKENS)
    with dispatch_model(model, max_memory(model, 0.5), Accelerator(RATES)):
        tokens = model.generate(  # type: ignore[operator]
            ids, max_new_tokens=NUM_TOKENS, cache_implementation="static", do_sample=False
        )
    assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_logits_err_as_those_of_the_gpu_alone(name: str) -> None:
    model, ids = make_model(name), make_ids(3).to(GPU)
    reference = logits_of(copy.deepcopy(model).to(GPU), ids).double()  # in float32
    alone = logits_of(copy.deepcopy(model).bfloat16().to(GPU), ids).double()
    model = model.bfloat16()
    with dispatch_model(model, max_memory(model, 0.5), Accelerator(RATES)):
        split = logits_of(model, ids).double()
    split_rms, alone_rms = (
        float((logits - reference).square().mean().sqrt()) for logits in (split, alone)
    )
    print(f"\n{name} bfloat16: rms error split {split_rms}, on the GPU alone {alone_rms}")
    assert split_rms <= 1.25 * alone_rms


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_memory_of_the_gpu_is_as_planned_and_freed_by_remove(share: float) -> None:
    """9 layers of 1024 x 1024, of whose bytes this share may be on the GPU."""
    model, x = MLP(num_layers=9, width=1024), torch.randn(2, 1024)
    expected = copy.deepcopy(model).to(GPU)(x.to(GPU)).detach().cpu()
    before, pinned_before = requested_bytes(), pinned_bytes()
    allocated_before = torch.cuda.memory_allocated()

    handle = dispatch_model(model, max_memory(model, share), Accelerator(RATES))
    plan, requested = handle.plan, requested_bytes() - before
    allocated = torch.cuda.memory_allocated() - allocated_before
    pinned = pinned_bytes() - pinned_before
    with torch.no_grad():
        outputs = [model(x.to(GPU)).cpu() for _ in range(4)]
    requested_after_calls = requested_bytes() - before
    handle.remove()
    not_freed, pinned_not_freed = requested_bytes() - before, pinned_bytes() - pinned_before

    slab_bytes = plan.slabs * plan.slab_bytes
    errors = [relative_error(out, expected) for out in outputs]
    print(
        f"\n{share}: {requested} bytes on the GPU ({allocated} allocated), {requested_after_calls} "
        f"after calls, {not_freed} not freed; planned {plan.accelerator_bytes} of "
        f"{plan.request.accelerator_bytes}; slabs {slab_bytes}, pinned {pinned}, "
        f"{pinned_not_freed} not freed; errors {[f'{error:.1e}' for error in errors]}"
    )
    assert plan.accelerator_bytes <= plan.request.accelerator_bytes
    assert requested <= plan.accelerator_bytes and not_freed == 0
    assert pinned <= 2 * slab_bytes + 2**14  # the allocator rounds up to powers of 2
    assert largest(errors) <= MAX_ERROR


def test_an_error_of_the_hosts_worker_is_raised_by_the_next_call_and_later_ones_are_exact() -> None:
    model, x = MLP(), torch.randn(1, 64)
    device = Accelerator(RATES)
    handle = dispatch_model(model, MEMORY, device, alpha=0.5)
    compute_on_host = device.compute_on_host

    def fail(operation: Operation, weight: Tensor, *args: Any) -> HostOutput:
        return compute_on_host(operation, weight[1:], *args)  # of another width than the input

    device.compute_on_host = fail  # type: ignore[method-assign]
    start = time.perf_counter()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            assert model(x.to(GPU)).isnan().all()
            model(x.to(GPU))
        seconds = time.perf_counter() - start
        del device.compute_on_host
        out = model(x.to(GPU)).cpu()
    handle.remove()
    print(f"\nthe error came after {seconds:.2f} s")
    assert seconds < ERROR_SECONDS and relative_error(out, MLP()(x)) <= MAX_ERROR


@pytest.mark.parametrize("pin_memory", [True, "weights"])
def test_a_call_returns_before_the_gpu_has_begun_it(pin_memory: bool | str) -> None:
    """With workers the caller waits neither for the GPU nor for the host's rows."""
    model, x = MLP(num_layers=6, width=1024), torch.randn(2, 1024)
    expected, inputs, busy = MLP(6, 1024)(x), x.to(GPU), torch.cuda.Event()
    memory = max_memory(model, 0.4)
    with dispatch_model(model, memory, Accelerator(RATES), alpha=0.3, pin_memory=pin_memory):
        with torch.no_grad():
            model(inputs).cpu()  # allocates
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(10**9)  # half a second
                busy.record()
                outputs = [model(inputs) for _ in range(3)]
                returned_before = not busy.query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert returned_before
        assert largest(relative_error(out.cpu(), expected) for out in outputs) <= MAX_ERROR


def test_outputs_are_exact_without_pinned_memory_and_a_warning_is_given() -> None:
    model, x = MLP(), torch.randn(3, 64)
    with pytest.warns(UserWarning) as warnings:
        handle = dispatch_model(model, MEMORY, Accelerator(RATES, UnpinnedStreams()))
    with torch.no_grad():
        outputs = [model(x.to(GPU)).cpu() for _ in range(3)]
    handle.remove()
    messages = "\n".join(str(warning.message) for warning in warnings)
    assert "pinned memory ran out" in messages
    assert largest(relative_error(out, MLP()(x)) for out in outputs) <= MAX_ERROR


def test_outputs_are_exact_on_a_stream_of_the_caller() -> None:
    """The stream makes the inputs and reads the outputs; the caller waits for nothing."""
    model, x = MLP(num_layers=12, width=256), torch.randn(3, 256)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        with dispatch_model(model, max_memory(model, 0.4), Accelerator(RATES)):
            outputs = [model(x.to(GPU, non_blocking=True)) for _ in range(20)]
            outputs = [out.cpu() for out in outputs]
    assert largest(relative_error(out, MLP(12, 256)(x)) for out in outputs) <= MAX_ERROR


def test_calls_between_linears_that_lock_the_driver_cause_no_deadlock() -> None:
    """A kernel's first launch, freeing memory, and an index on the GPU, for which Python's GIL is
    held, wait for streams that wait for the lanes."""
    model, x = MLP(num_layers=12, width=256), torch.randn(3, 256)
    unused_kernels = iter(
        [torch.special.i0, torch.special.i0e, torch.special.i1, torch.special.erfcx]
    )

    def lock_driver(module: nn.Module, inputs: object, out: Tensor) -> None:
        next(unused_kernels, torch.neg)(out)
        assert torch.arange(1)[torch.zeros((), dtype=torch.int64, device=GPU)] == 0
        torch.empty(2**21, dtype=torch.uint8, pin_memory=True)
        torch.cuda.empty_cache()

    with dispatch_model(model, max_memory(model, 0.4), Accelerator(RATES)), torch.no_grad():
        hooks = [module.register_forward_hook(lock_driver) for module in model.modules()]
        outputs = [model(x.to(GPU)).cpu() for _ in range(5)]
        for hook in hooks:
            hook.remove()
    assert largest(relative_error(out, MLP(12, 256)(x)) for out in outputs) <= MAX_ERROR


def test_calls_on_alternating_streams_are_exact() -> None:
    """The host's inputs and outputs have the same pinned memory in all calls."""
    model, batches = MLP(num_layers=6, width=1024), torch.randn(8, 3, 1024)
    expected = [MLP(6, 1024)(x) for x in batches]
    inputs, streams = batches.to(GPU), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs: list[Tensor] = []
    with dispatch_model(model, max_memory(model, 0.4), Accelerator(RATES)), torch.no_grad():
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                torch.cuda._sleep(10**7 * (i % 2))  # ms, so that the other stream is ahead
                outputs.append(model(x))
        torch.cuda.synchronize()
    assert largest(map(relative_error, (out.cpu() for out in outputs), expected)) <= MAX_ERROR


def test_measured_rates_are_plausible() -> None:
    rates = measure_rates(Streams(), torch.bfloat16, width=2048, seconds=0.1)
    print(f"\n{torch.get_num_threads()} thread: {rates}")
    assert rates.accelerator > rates.host and 1e9 < rates.link < 1e12
    assert 0 < rates.call_seconds < 0.01


def test_the_first_script_of_docs_hetegen_generates_the_tokens_of_the_gpu_alone(
    tmp_path: Path,
) -> None:
    """A model from a folder, measured rates, generate, report and remove."""
    from wf_transformers import model_from_folder

    alone = make_model("llama")
    alone.save_pretrained(tmp_path)  # type: ignore[operator]
    model = model_from_folder(str(tmp_path))
    memory = max_memory(model, 0.5) | {"cpu": "100GB"}
    handle: Handle = dispatch_model(model, max_memory=memory)
    ids = make_ids(1).to(torch.accelerator.current_accelerator())
    tokens = model.generate(ids, max_new_tokens=8)[0].cpu()
    predicted = handle.plan.decode_seconds, handle.plan.streaming_seconds, handle.plan.host_seconds
    print(f"\n{handle.plan.rates}\n{predicted}\n{handle.report()}")
    handle.remove()
    expected = alone.to(GPU).generate(ids, max_new_tokens=8)[0].cpu()  # type: ignore[operator]
    assert torch.equal(tokens, expected)
