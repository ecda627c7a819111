"""Several ranks on one GPU: as exact as one process with the same kernel, on every scheme."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.dense import largest
from tests.gpu.ranks_on_gpu import SCHEMES, OnGpu, Words, alone, attend, errors, line, masks
from tests.helpers import ROOT, run_processes, run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    from bytes import named_points
    from one_rank import Alone

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SEQLEN = 1072  # no tile in multiples of 128: cuDNN would compile its graphs anew in every thread
FOR_CUDNN = 2048
TIMES = 1.3
"""That of one process which an error of several may be: 1.26 on an H100. A kernel rounds what it
gives once, and a sum of several results is rounded once more."""
Found = dict[tuple[str, int], tuple[list[float], float]]
NOISY = (torch.bfloat16, torch.float32)
SPREAD = [(size, name) for size, schemes in SCHEMES.items() for name in schemes]


def check(name: str, case: OnGpu, many: list[float]) -> None:
    """Print the errors, and compare them with one rank's."""
    one = alone(case)
    print(line(name, case, many, one), flush=True)
    assert all(a <= TIMES * b for a, b in zip(many, one, strict=True)), (many, one)


@pytest.mark.parametrize("mask", masks(SEQLEN))
@pytest.mark.parametrize(("size", "name"), SPREAD)
def test_threads_err_as_one_process_does(size, name, mask):
    case = OnGpu(SEQLEN, mask)
    found = run_threads(size, attend, SCHEMES[size][name], case)
    check(f"{size} ranks, {name}", case, errors(found[0], case))


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"batch": 2, "head_dim": 128},
        {"heads": 4, "kv_heads": 4, "head_dim": 256},
        {"alibi": True},
        {"sinks": True},
        {"softcap": 5.0},
        {"kernel": "reference", "dropout_p": 0.3, "dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ("ring", "USP"))
def test_other_dtypes_heads_and_options(name, more):
    case = OnGpu(SEQLEN, "causal", **more)
    found = run_threads(4, attend, SCHEMES[4][name], case)
    check(f"4 ranks, {name}, {more}", case, errors(found[0], case))


@pytest.mark.parametrize("layout", ("document_zigzag", "balanced"))
def test_layouts_that_follow_from_the_mask(layout):
    case = OnGpu(SEQLEN, "slices" if layout == "balanced" else "documents")
    found = run_threads(4, attend, {"route": "ring", "layout": layout}, case)
    check(f"4 ranks, {layout}", case, errors(found[0], case))


@pytest.mark.parametrize("mask", ("causal", "documents"))
def test_float64_is_exact(mask):
    case = OnGpu(402, mask, dtype=torch.float64, kernel="reference")
    for name, words in SCHEMES[4].items():
        found = errors(run_threads(4, attend, words, case)[0], case)
        print(line(f"4 ranks, {name}", case, found, found), flush=True)
        assert largest(found) < 1e-10


CASES = [
    *(OnGpu(FOR_CUDNN, mask, head_dim=128) for mask in ("full", "causal", "documents")),
    OnGpu(FOR_CUDNN, "causal", batch=2),
    OnGpu(SEQLEN, "window", dtype=torch.float16),
    OnGpu(402, "causal", dtype=torch.float64, kernel="reference"),
]


def attend_in_turn(comm: Communicator, schemes: dict[str, Words], cases: list[OnGpu]) -> Found:
    """Errors and seconds by scheme and case, as this gloo process finds them."""
    assert not comm.carries(torch.device("cuda"))
    found = {}
    for name, words in schemes.items():
        for at, case in enumerate(cases):
            start = time.perf_counter()
            many = errors(attend(comm, words, case), case)
            found[name, at] = many, time.perf_counter() - start
    return found


@pytest.mark.parametrize("size", (2, 4))
def test_gloo_processes_err_as_one_process_does(size):
    """Device tensors go through host memory; tiles of whole chunks go to cuDNN."""
    start = (sys.executable,)  # a fork cannot use CUDA once its parent has
    job = run_processes(size, attend_in_turn, SCHEMES[size], CASES, timeout=140, start=start)
    failed = []
    for (name, at), (many, seconds) in job[0].items():
        case, told = CASES[at], f"{size} gloo processes, {name}, {seconds:.2f} s"
        if case.dtype == torch.float64:
            print(line(told, case, many, many), flush=True)
            failed += [] if largest(many) < 1e-10 else [told]
            continue
        try:
            check(told, case, many)
        except AssertionError as error:
            failed.append(f"{told}, {case}: {error}")
    assert not failed, "\n".join(failed)


def test_one_thread_after_another_finds_the_same():
    """What is left of a call, such as memory that is used again, changes nothing."""
    case, words = replace(CASES[1], seqlen=SEQLEN), SCHEMES[8]["USP in chunks"]
    runs = [run_threads(8, attend, words, case)[0][0] for _ in range(3)]
    assert all(torch.equal(runs[0], again) for again in runs[1:])


@pytest.mark.parametrize("name", named_points(8))
def test_a_warm_call_never_waits_for_the_device(name):
    """One rank of eight whose messages are on the device: neither forward nor backward asks."""
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v, dout = (torch.randn(1, 256, n, 64, **options) for n in (16, 8, 8, 16))
    noise = {dtype: torch.randn(1 << 22, device="cuda").to(dtype) for dtype in NOISY}
    words = {"sequence_parallel_size": 8, **named_points(8)[name]}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), Alone(3, 8, noise))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        for mode in ("default", "default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            torch.autograd.grad(sp.attention(*leaves, causal=True), leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
