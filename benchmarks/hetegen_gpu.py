"""HeteGen on a GPU: tokens a second beside streaming, the host alone and other packages.

    python benchmarks/hetegen_gpu.py                  # about 170 s: 7 GB of weights in bfloat16
    python benchmarks/hetegen_gpu.py --quick          # about 100 s
    python benchmarks/hetegen_gpu.py --device cpu --layers 2 --width 1024    # threads for lanes

A Llama of random weights. A pass: the model's call over one token of each sequence, with its cache,
until the next token is known to the host; the median of some. "memory" is what HeteGen may use
beyond what is not split and three slabs, as a share of the split weights. OMP_NUM_THREADS must not
be 1: the host's lane computes with torch's threads. Parts: ours, peers.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from measure import attempt, cores_and_load, cpu_name
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from wf_backends.hetegen import Accelerator, Rates, ShapedDevice, dispatch_model, measure_machine

PROMPT = 16
SLABS = 3
WHERE = {"cuda": "cuda:0", "cpu": "cpu"}
LIMIT = 230  # seconds after which the process ends itself with a traceback
HEAD = (
    "| | memory | batch | alpha | tokens/s | pass s | linears s | predicted s | measured / "
    "predicted | call ms | GPU GB: planned, peak |\n|" + 11 * "---|"
)


@dataclass(frozen=True)
class Run:
    """What all measurements share."""

    device: torch.device
    rates: Rates
    passes: int
    seconds: float

    def lanes(self, rates: Rates) -> Any:
        if self.device.type == "cuda":
            return Accelerator(rates)
        return ShapedDevice(1e9, 3e9, 2e10, call_seconds=rates.call_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["ours", "peers"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement, about")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--quick", action="store_true", help="two shares, 4 passes, batch 1")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # makes a plan for each length of a cache
    if args.quick:
        args.shares, args.passes = [0.0, 0.5], 4
    start = time.perf_counter()
    print_machine(args.device)
    model = make_model(args.layers, args.width, args.device)
    size = sum(p.nbytes for p in model.parameters())
    print(f"{args.layers} layers of {args.width}: {size / 1e9:.2f} GB, made in "
          f"{time.perf_counter() - start:.1f} s\n", flush=True)  # fmt: skip
    rates = measure_machine(torch.bfloat16)[1] if args.device == "cuda" else Rates(1e9, 3e9, 2e10)
    print(rates, flush=True)
    run = Run(torch.device(WHERE[args.device]), rates, args.passes, args.seconds)
    parts: dict[str, Callable[[], None]] = {
        "ours": lambda: ours(model, run, args.shares, not args.quick),
        "peers": lambda: peers(model, run, args.shares),
    }
    for part in args.parts:
        print(f"\n## {part}\n", flush=True)
        attempt(parts[part])


def print_machine(device: str) -> None:
    card = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    threads = f"{torch.get_num_threads()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS')}"
    print(f"torch {torch.__version__}, {card}; {cpu_name()}, {cores_and_load()}, threads {threads}")


def make_model(layers: int, width: int, random_on: str) -> nn.Module:
    """A Llama in bfloat16; its random numbers come from the GPU, which is faster."""
    model = empty_model(layers, width, "cpu")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, device=random_on).mul_(0.02))
    return model


def empty_model(layers: int, width: int, where: str) -> nn.Module:
    config = LlamaConfig(
        vocab_size=min(32000, 8 * width), hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model = model.to_empty(device=where).eval().requires_grad_(False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(where)  # its buffers are not weights
    return model


def ours(model: nn.Module, run: Run, shares: list[float], more: bool) -> None:
    """HeteGen, streaming, the host alone; then with the call that streaming has."""
    print(HEAD)
    alone_on_gpu(model, run, (1, 8) if more else (1,))
    for share in shares:
        call = split_row("streaming", model, run, share, 1, 0.0, run.rates)
        split_row("HeteGen", model, run, share, 1, "auto", run.rates)
        if call is not None:
            known = replace(run.rates, call_seconds=call)
            split_row("HeteGen, call as streaming's", model, run, share, 1, "auto", known)
        if share == shares[0]:
            split_row("the host alone", model, run, share, 1, 1.0, run.rates)
    for share in (shares[0], shares[-1]) if more else ():
        for name, alpha in (("streaming", 0.0), ("HeteGen", "auto")):
            split_row(name, model, run, share, 8, alpha, run.rates)


def alone_on_gpu(model: nn.Module, run: Run, batches: tuple[int, ...]) -> None:
    if run.device.type != "cuda":
        return
    there = make_like(model, str(run.device))
    for batch in batches:
        seconds = decode(there, run, batch)
        print(f"| alone on the GPU | all | {batch} | | {batch / seconds:.2f} | {seconds:.4f} |"
              + 5 * " |", flush=True)  # fmt: skip


def make_like(model: Any, where: str) -> nn.Module:
    """A copy of the model."""
    copied = empty_model(model.config.num_hidden_layers, model.config.hidden_size, where)
    for to, of in zip(copied.parameters(), model.parameters(), strict=True):
        to.copy_(of)
    return copied


def budget(model: Any, share: float) -> int:
    """Bytes of the GPU for a share of the split weights, with the rest and slabs."""
    largest = model.lm_head.weight.nbytes
    other = model.model.embed_tokens.weight.nbytes + 2**20
    split = sum(p.nbytes for p in model.parameters()) - other
    return int(other + SLABS * largest / 4 + share * split) + 2**22


def split_row(
    name: str, model: nn.Module, run: Run, share: float, batch: int, alpha: Any, rates: Rates
) -> float | None:
    """Print a row; the seconds from call to call, None where it failed."""
    told: list[float] = []
    attempt(lambda: told.append(_split_row(name, model, run, share, batch, alpha, rates)))
    return told[0] if told else None


def _split_row(
    name: str, model: nn.Module, run: Run, share: float, batch: int, alpha: Any, rates: Rates
) -> float:
    memory, device = budget(model, share), run.lanes(rates)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with dispatch_model(model, {0: memory}, device, alpha=alpha, batch=batch, prompt=64) as handle:
        seconds = decode(model, run, batch)
        told, plan = handle.report()["decode"], handle.plan
        peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
    linears, predicted = told["measured_seconds"], told["predicted_seconds"]
    used = sum(split.alpha("decode") * split.linear.nbytes for split in plan.splits)
    of_host = used / sum(split.linear.nbytes for split in plan.splits)
    print(
        f"| {name} | {100 * share:.0f} % | {batch} | {of_host:.2f} | {batch / seconds:.2f} "
        f"| {seconds:.4f} | {linears:.4f} | {predicted:.4f} | {linears / predicted:.2f} "
        f"| {1e3 * told['call_seconds']:.3f} | {plan.accelerator_bytes / 1e9:.2f}, "
        f"{peak / 1e9:.2f} |",
        flush=True,
    )
    return told["call_seconds"]


def decode(model: Any, run: Run, batch: int) -> float:
    """Median seconds of a decoding pass after a prompt and two passes."""
    ids = torch.randint(1, model.config.vocab_size, (batch, PROMPT), generator=torch.manual_seed(1))
    token, took, cache, end = ids.to(run.device), list[float](), DynamicCache(), 0.0
    with torch.no_grad():
        for i in range(3 + run.passes):
            start = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            token.cpu()
            took.append(time.perf_counter() - start)
            end = start + run.seconds if i == 2 else end
            if i > 4 and time.perf_counter() > end:
                break
    return median(took[3:])


def peers(model: Any, run: Run, shares: list[float]) -> None:
    """Other packages with the same weights: seconds of a pass, batch 1."""
    import hetegen_peers as others

    share = shares[len(shares) // 2]
    memory = budget(model, share)
    print("| | GPU GB: allowed, peak | tokens/s | pass s |\n|---|---|---|---|")
    for name, prepare in others.PEERS.items():
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def measured(name: str = name, prepare: Any = prepare) -> None:
            seconds = decode(prepare(make_like(model, "cpu"), run.device, memory), run, 1)
            peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
            print(f"| {name} | {memory / 1e9:.2f}, {peak / 1e9:.2f} | {1 / seconds:.2f} "
                  f"| {seconds:.4f} |", flush=True)  # fmt: skip

        attempt(measured)


if __name__ == "__main__":
    main()
