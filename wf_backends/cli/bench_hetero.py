"""`wallfacer bench-hetero`: the rates that HeteGen plans with, and predicted tokens per second."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

import torch
from typer import Option

from wf_backends import hetegen
from wf_backends._validation import one_of, parse_bytes
from wf_backends.cli import options as o
from wf_backends.cluster import save_text

WEIGHT_BYTES = 2**27  # of a weight of the models that are too large for an accelerator
WITHOUT_AMX = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # faster for one token
RATE_LABELS = {
    "link": "pinned host memory to accelerator",
    "staging": "weights in host memory to accelerator",
    "host": "the host's GEMM",
    "accelerator": "the accelerator's GEMM",
    "memory": "host memory, GEMM and link at a time",
}


def bench_hetero(
    model_size: Annotated[str, Option(help="Bytes of the model's weights.")] = "14GB",
    max_memory: Annotated[str, Option(help="Of the accelerator, for weights.")] = "0B",
    dtype: Annotated[str, Option(help=f"Of the weights: {', '.join(o.ITEMSIZES)}.")] = "bfloat16",
    pin_weights: o.PinWeights = False,
    cache_dir: o.CacheDir = None,
    fresh: o.Fresh = False,
) -> None:
    """Measure this machine's rates, and predict tokens per second with HeteGen, streaming, the CPU.

    A token takes as long as the slowest of link, host, accelerator and the host's memory. Batch 1.

    Example:

        wallfacer bench-hetero --model-size 26GB --max-memory 12GB
    """
    size = parse_bytes("--model-size", model_size)
    memory = parse_bytes("--max-memory", max_memory)
    one_of("--dtype", dtype, tuple(o.ITEMSIZES))
    if not size:
        raise ValueError(f"--model-size must be more than 0 bytes, got {model_size!r}")
    device, rates, source = known_rates(cache_dir, dtype, pin_weights, fresh)
    token_rates = rates.at(1, o.ITEMSIZES[dtype])
    resident = min(1.0, memory / size)
    alpha = hetegen.best_alpha(resident, token_rates, WEIGHT_BYTES)
    shares = {"HeteGen": (alpha, resident), "streaming": (0, resident), "the CPU alone": (1, 0)}
    print(f"{device}, {source}")
    for name, label in RATE_LABELS.items():
        print(f"  {label:40}{getattr(rates, name) / 1e9:8.2f} GB/s")
    print(f"alpha {alpha:.2f}: the host's share; resident {resident:.2f}")
    for method, (share, rho) in shares.items():
        seconds = size * hetegen.seconds_per_byte(share, rho, token_rates, WEIGHT_BYTES)
        print(f"  {method:40}{1 / seconds:8.2f} tokens/s")


def known_rates(cache_dir: Path | None, dtype: str, pin_weights: bool, fresh: bool) -> tuple:
    """(device, rates, their source): kept in the folder at the first use, and measured again if
    there was no accelerator then and is one now. The process computes without AMX from now on."""
    os.environ.setdefault(*WITHOUT_AMX)
    name = f"hetero-{socket.gethostname()}-{dtype}{'-pinned' if pin_weights else ''}.json"
    path = o.cache_folder_of(cache_dir) / name
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or unreadable
        kept = {} if fresh else json.loads(path.read_text())
        rates = {name: rate for name, rate in kept["rates"].items() if rate is not None}
        if kept["device"] != "threads" or not torch.accelerator.is_available():
            return kept["device"], hetegen.Rates(**rates), f"from {path}"
    device, rates = hetegen.measure_machine(getattr(torch, dtype), pin_weights)
    if fresh:
        return device, rates, "measured"
    finite = {name: rate for name, rate in asdict(rates).items() if rate < inf}  # JSON has no inf
    text = json.dumps({"device": device, "rates": finite}, indent=2)
    return device, rates, f"measured; {save_text(path, text)}"
