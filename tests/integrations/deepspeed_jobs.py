"""Jobs of several ranks for the tests of engines, and the data, model and reference they share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests import forked

ROOT = Path(__file__).parents[2]
VOCABULARY = 32
SEQLEN = 44  # not a multiple of 8: shard_batch pads
Batch = dict[str, Any]
FIXED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
FIXED["PYTHONWARNINGS"] = "ignore::FutureWarning"  # DeepSpeed gives thousands of them
IMPORTED = (
    "tests.integrations.deepspeed_jobs",
    "tests.dsp.video",
    "tests.integrations.uncompiled",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "transformers.trainer",
    "wf_accelerate",
    "wf_deepspeed",
    "wf_transformers",
)
"""What the process whose forks are the ranks imports, once for all of them (tests/forked.py)."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with our packages importable and one thread per rank."""
    path = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    return os.environ | FIXED | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | more


def python(*modules: str) -> tuple[str, ...]:
    """Return the command `python` of a rank: a fork of a process that has imported `modules`,
    `IMPORTED` if none are given, of those whose framework is installed."""
    names = modules or IMPORTED
    packages = {name: name.partition(".")[0].removeprefix("wf_") for name in names}
    installed = [name for name, package in packages.items() if find_spec(package)]
    return forked.python(*installed, **FIXED)


def run_ranks(
    command: Sequence[str],
    ranks: int,
    timeout: float = 280.0,
    fresh: bool = False,
    imported: Sequence[str] = (),
) -> list[str]:
    """Run `python command...` on every rank as torchrun would; return what each rank printed.

    Args:
        fresh: whether each rank is a new interpreter, which imports everything itself, not a fork.
        imported: modules that the process whose forks the ranks are has imported; see `python`.

    Raises:
        AssertionError: with the output of the first rank that failed, or if a rank did not end in
            time. No process is left behind.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start = [sys.executable] if fresh else python(*imported)
    with ExitStack() as stack:
        # files: a full pipe would stop a rank that the others wait for
        logs = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [*start, *command],
                env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        codes = _wait(processes, timeout)
        outputs = [(log.seek(0), log.read())[1] for log in logs]
    failed = [rank for rank, code in enumerate(codes) if code]
    assert not failed, f"ranks {failed} failed; rank {failed[0]}:\n{outputs[failed[0]][-6000:]}"
    late = [rank for rank, code in enumerate(codes) if code is None]
    assert not late, f"ranks {late} of {ranks} did not end within {timeout} s"
    return outputs


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Wait until all processes have ended, one has failed, or the time is up; kill the others.

    Returns:
        The exit codes; None for a process that was killed here.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    running = [process.poll() is None for process in processes]
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    return [
        None if was_running and code == -signal.SIGKILL else code
        for was_running, code in zip(running, codes, strict=True)
    ]


def run_cases(
    cases: list[dict[str, Any]], ranks: int, folder: Path, timeout: float = 280.0
) -> dict[str, dict[str, Any]]:
    """Run deepspeed_worker.py over all cases in one job of `ranks`; return rank 0's results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = Path(__file__).with_name("deepspeed_worker.py")
    run_ranks([str(worker), str(folder)], ranks, timeout)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


def tiny_llama(layers: int = 2, **more: Any) -> LlamaForCausalLM:
    """Build a model of 4 heads on 2 key heads, with the same weights in every process.

    Args:
        more: keys of its config, which override these.
    """
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    keys = shape | heads | more
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **keys))


def token_batches(first: int) -> Iterator[Batch]:
    """Yield batches of one sequence, from sequence number `first` on, without end.

    Of four sequences one holds 3 documents and one 11. The number of valid labels differs from one
    sequence to the next, so that an average over ranks instead of tokens shows.
    """
    whole = (0, SEQLEN)
    three_documents, eleven_documents = (0, 9, 30, SEQLEN), tuple(range(0, SEQLEN + 1, 4))
    for number in count(first):
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCABULARY, (1, SEQLEN), generator=random)
        ids[:, 1::2] = (ids[:, ::2] * 5 + 3) % VOCABULARY  # every second token can be learnt
        labels = ids.clone()
        labels[:, : 7 * (number % 5)] = -100
        borders = (whole, three_documents, whole, eleven_documents)[number % 4]
        yield {"input_ids": ids, "labels": labels, "cu_seqlens": borders}


def dense_loss_sum(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Return the sum of the token losses on one rank and their number, with none of our code."""
    borders = batch["cu_seqlens"]
    document = torch.bucketize(torch.arange(SEQLEN), torch.tensor(borders), right=True)  # from 1
    causal = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    seen = causal & (document[:, None] == document[None])
    mask = torch.zeros(1, 1, SEQLEN, SEQLEN, dtype=model.dtype).masked_fill(~seen, float("-inf"))
    starts = torch.tensor(borders)[document - 1]
    positions = (torch.arange(SEQLEN) - starts)[None]
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=positions).logits[0]
    labels = batch["labels"][0]
    predicted = [i for i in range(SEQLEN - 1) if i + 1 not in borders and labels[i + 1] != -100]
    targets = labels[[i + 1 for i in predicted]]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = -torch.log_softmax(logits[predicted].to(dtype), -1).gather(1, targets[:, None])
    return losses.sum(), len(predicted)
