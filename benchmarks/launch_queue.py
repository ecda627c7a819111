"""What a full launch queue does to the thread that calls, and to the threads beside it, on CUDA.

    python benchmarks/launch_queue.py [--kinds add triton ...]      # about 60 s, 8 kinds at a time
    python benchmarks/launch_queue.py --device cpu                  # the controls alone

A stream waits behind a gate (HeteGen's `CudaCount`). One kind of call is put on it until one takes
longer than `BLOCKED` seconds, in a process for each kind. Three threads beside it leave a mark
every 0.2 ms:

    python   for each turn in which it got Python's lock (and it opens the gate in the end)
    event    for each `synchronize` of an event that has passed, as HeteGen's threads call it
    driver   for each event that it records on a free stream and waits for

No mark of "python" while a call blocks: the call holds the lock, and since a thread opens the gate
that is a deadlock. The watchdog of faulthandler, which needs no lock, ends it with a traceback.
No mark of "event": the threads of HeteGen's lanes would be stuck, lock or not.

Expected, from torch's sources and the machine code of 2.11: aten's operators, cuda-bindings and
Triton's launcher give the lock back, `torch.cuda.Event.record` and `wait` as well. It is held by
`torch.Event.record`, `torch.Stream.wait_event`, and where a pinned tensor dies that a copy used
(the allocator records an event). The two controls sleep with and without the lock.
"""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from launch_kinds import KINDS, ON_CPU, THRESHOLDS

BLOCKED = 0.05  # seconds
OPENS = 2.5  # seconds after which the gate is opened
WATCHDOG = 9.0  # and after which a process that is stuck is ended
AT_A_TIME = 8
MOST = 20_000  # calls
MARKS = ("python", "event", "driver")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--kinds", nargs="*", default=None, choices=sorted(KINDS), metavar="KIND")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a kind's process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(run_kind(args.one, args.device, args.count), flush=True)
        os._exit(0)  # threads still run
    where = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, {where}, python {sys.version.split()[0]}")
    print("\n| call | before one blocked | it took s | marks in that time: python, event, driver "
          "| deadlock |\n|---|---|---|---|---|")  # fmt: skip
    kinds = args.kinds or (ON_CPU if args.device == "cpu" else list(KINDS))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        rows = pool.map(lambda kind: in_process(kind, args.device, args.timeout), kinds)
        proofs = []
        for kind, (row, proof) in zip(kinds, rows, strict=True):
            print(f"| {kind} | {row} |", flush=True)
            proofs += [f"\n{kind}:\n{proof}"] if proof else []
    print(*proofs, sep="\n")


def in_process(kind: str, device: str, timeout: float) -> tuple[str, str]:
    """(the row of a kind, the traceback where its process was stuck or failed)."""
    with tempfile.NamedTemporaryFile() as count:
        count.write(bytes(8 * 4))
        count.flush()
        command = [sys.executable, __file__, "--one", kind, "--device", device]
        try:
            done = subprocess.run(
                [*command, "--count", count.name], capture_output=True, text=True, timeout=timeout
            )
            out, error, code = done.stdout.strip(), done.stderr, done.returncode
        except subprocess.TimeoutExpired as ended:
            out, error, code = "", f"ended after {timeout} s: {ended.stderr!r}", None
        calls, *marks = memoryview(Path(count.name).read_bytes()).cast("q").tolist()
    if code == 0:
        return out.splitlines()[-1], ""
    stuck = "Timeout (" in error
    told = f"{calls} | {'for good' if stuck else 'failed'} | {marks} in all"
    return f"{told} | {'YES' if stuck else f'exit {code}'}", error[-3000:]


def run_kind(kind: str, device: str, count: Path) -> str:
    """Put calls of a kind on a stream that is held, and tell of the first that blocked."""
    faulthandler.dump_traceback_later(45, exit=True)  # while it is prepared
    with count.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), 8 * 4)).cast("q")
        setting = prepare(device)
        with setting.stream_context:
            call = KINDS[kind](setting)
            setting.synchronize()
            return watch(call, setting, THRESHOLDS.get(kind, BLOCKED), counts)


def prepare(device: str) -> SimpleNamespace:
    """A stream, a gate for it, a free stream and an event that has passed."""
    torch.manual_seed(0)
    if device == "cpu":
        from contextlib import nullcontext

        gate = SimpleNamespace(hold=lambda stream, count: None, raise_to=lambda count: None)
        return SimpleNamespace(
            device="cpu", stream=None, stream_context=nullcontext(), gate=gate, free=None,
            synchronize=lambda: None, passed=None,
        )  # fmt: skip
    from wf_backends.hetegen.cuda_count import CudaCount

    stream, free = torch.cuda.Stream(), torch.cuda.Stream()
    passed = torch.cuda.Event(blocking=True)
    passed.record(free)
    word = torch.empty(1, dtype=torch.int32, pin_memory=True)
    return SimpleNamespace(
        device="cuda", stream=stream, stream_context=torch.cuda.stream(stream),
        gate=CudaCount(word, free), free=free, synchronize=torch.cuda.synchronize, passed=passed,
    )  # fmt: skip


def watch(call: Callable[[], object], setting: Any, threshold: float, counts: memoryview) -> str:
    """Call until one takes longer than the threshold; the cells of its row."""
    ended = threading.Event()
    marks: dict[str, list[float]] = {name: [] for name in MARKS}
    begun = time.perf_counter()
    threads = [
        threading.Thread(target=leave_marks, args=(name, marks[name], setting, ended, counts),
                         daemon=True) for name in MARKS
    ]  # fmt: skip
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    setting.gate.hold(setting.stream, 1)
    for thread in threads:
        thread.start()
    opener = threading.Thread(target=open_later, args=(setting.gate, begun + OPENS), daemon=True)
    opener.start()
    row = f"none of {MOST} | | | no"
    for i in range(MOST):
        start = time.perf_counter()
        if start > begun + OPENS:
            row = f"none of {i} | | | no"
            break
        call()
        took = time.perf_counter() - start
        counts[0] = i + 1
        if took > threshold:
            within = {name: sum(start < at < start + took for at in marks[name]) for name in MARKS}
            row = f"{i} | {took:.2f} | {', '.join(map(str, within.values()))} | no"
            break
    opener.join()
    setting.synchronize()
    ended.set()
    return row


def open_later(gate: Any, at: float) -> None:
    time.sleep(max(0.0, at - time.perf_counter()))
    gate.raise_to(1)


def leave_marks(
    name: str, marks: list[float], setting: Any, ended: threading.Event, counts: memoryview
) -> None:
    while not ended.is_set():
        time.sleep(2e-4)
        if setting.device == "cuda" and name == "event":
            setting.passed.synchronize()
        if setting.device == "cuda" and name == "driver":
            event = torch.cuda.Event(blocking=True)
            event.record(setting.free)
            event.synchronize()
        marks.append(time.perf_counter())
        counts[1 + MARKS.index(name)] += 1


if __name__ == "__main__":
    main()
