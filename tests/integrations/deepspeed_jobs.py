"""Starting jobs of several ranks for the DeepSpeed tests, and the data and model they share."""

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
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests import forked

ROOT = Path(__file__).parents[2]
VOCABULARY = 32
SEQLEN = 44  # no multiple of 8: shard_batch pads
Batch = dict[str, Any]
FIXED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
FIXED["PYTHONWARNINGS"] = "ignore::FutureWarning"  # DeepSpeed's, thousands of them
# What ranks import, once for all of them (tests/forked.py).
IMPORTED = (
    "tests.integrations.deepspeed_jobs",
    "tests.dsp.test_video_dit",
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


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with our packages importable and one thread a rank."""
    path = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    return os.environ | FIXED | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | more


def python(*modules: str) -> tuple[str, ...]:
    """`python` for a rank: a fork of a process that has imported `modules`.

    Without any: DeepSpeed and transformers.
    """
    there = [name for name in IMPORTED if find_spec(name.partition(".")[0].removeprefix("wf_"))]
    return forked.python(*(modules or there), **FIXED)


def run_ranks(
    command: Sequence[str],
    ranks: int,
    timeout: float = 280.0,
    fresh: bool = False,
    imported: Sequence[str] = (),
) -> list[str]:
    """`python command...` once per rank as torchrun would start it; what each rank printed.

    Args:
        fresh: whether each rank is an interpreter of its own, which imports everything itself,
            and no fork.
        imported: by the process whose forks they are; see `python`.

    Raises:
        AssertionError: with the output of the first rank that failed, or if they did not end in
            time. No process is left behind.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start = [sys.executable] if fresh else python(*imported)
    with ExitStack() as stack:
        # Files, not pipes: a full pipe would stop a rank that the others wait for.
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
    late = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    assert late != list(range(ranks)), f"no rank of {ranks} ended within {timeout} s"
    failed = [rank for rank, code in enumerate(codes) if code and rank not in late]
    assert not failed, f"ranks {failed} failed; rank {failed[0]}:\n{outputs[failed[0]][-6000:]}"
    return outputs


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes; ends all processes as soon as one fails or the time is up."""
    stop = time.monotonic() + timeout
    while time.monotonic() < stop:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def run_cases(
    cases: list[dict[str, Any]], ranks: int, folder: Path, timeout: float = 280.0
) -> dict[str, dict[str, Any]]:
    """One job of `ranks` over all cases; what each case's rank 0 wrote, by the case's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = Path(__file__).with_name("deepspeed_worker.py")
    run_ranks([str(worker), str(folder)], ranks, timeout)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


def tiny_llama(layers: int = 2, **more: Any) -> LlamaForCausalLM:
    """4 heads on 2 key heads unless `more` says else, the same weights in every process."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    words = shape | heads | more
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **words)
    return LlamaForCausalLM(config)


def text(first: int) -> Iterator[Batch]:
    """An endless stream of single sequences from number `first` on.

    Of four in a row one holds three documents and one as many as the planner has a kind for. The
    number of valid labels differs from one to the next, so that an average over ranks instead of
    tokens shows.
    """
    few, many = (0, 9, 30, SEQLEN), tuple(range(0, SEQLEN + 1, 4))
    number = first
    while True:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCABULARY, (1, SEQLEN), generator=draw)
        ids[:, 1::2] = (ids[:, ::2] * 5 + 3) % VOCABULARY  # something to learn
        labels = ids.clone()
        labels[:, : 7 * (number % 5)] = -100
        borders = ((0, SEQLEN), few, (0, SEQLEN), many)[number % 4]
        yield {"input_ids": ids, "labels": labels, "cu_seqlens": borders}
        number += 1


def dense_loss_sum(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the token losses on one rank and their number, by nothing of ours."""
    borders = batch["cu_seqlens"]
    document = torch.bucketize(torch.arange(SEQLEN), torch.tensor(borders), right=True)
    causal = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    seen = causal & (document[:, None] == document[None])
    mask = torch.zeros(1, 1, SEQLEN, SEQLEN, dtype=model.dtype).masked_fill(~seen, float("-inf"))
    starts = torch.tensor(borders)[document - 1]
    positions = (torch.arange(SEQLEN) - starts)[None]
    logits = model(batch["input_ids"], attention_mask=mask, position_ids=positions).logits[0]
    labels = batch["labels"][0]
    predicted = [i for i in range(SEQLEN - 1) if i + 1 not in borders and labels[i + 1] != -100]
    targets = labels[[i + 1 for i in predicted]]
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = -torch.log_softmax(logits[predicted].to(wide), -1).gather(1, targets[:, None])
    return losses.sum(), len(predicted)
