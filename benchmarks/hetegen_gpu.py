"""HeteGen on a GPU: tokens a second beside streaming, the host alone and other packages.

    python benchmarks/hetegen_gpu.py                  # 7 GB of weights in bfloat16
    python benchmarks/hetegen_gpu.py --quick
    python benchmarks/hetegen_gpu.py --device cpu --layers 2 --width 1024    # threads for lanes

A Llama of random weights. A pass is the model's call for one token of each sequence, with its
cache, until the next token is known to the host; the table has the median of several. "memory" is
the GPU memory for split weights, as a share of them; slabs and all other weights come on top.
OMP_NUM_THREADS must not be 1: the host's lane computes with torch's threads. Parts: buffers (copies
pass through pinned memory), weights (they are pinned), peers. "threads of Python" has these for
lanes in place of the workers of C++, and plans for the rates that are measured with them.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import hetegen_peers
import torch
from measure import attempt, cores_and_load, cpu_name, print_head, print_row
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from wf_backends.hetegen import Accelerator, Rates, ShapedDevice, dispatch_model
from wf_backends.hetegen.measure import measure_rates
from wf_backends.hetegen.streams import Streams

PROMPT = 16  # tokens
WARM_UP_PASSES = 3  # the prompt and two tokens
NUM_SLABS = 3
DEVICES = {"cuda": "cuda:0", "cpu": "cpu"}
SETTINGS = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")  # with which the host computes
TIME_LIMIT_S = 230  # after it the process ends itself with a traceback
HEAD = ("", "memory", "batch", "alpha", "tokens/s", "pass s", "linears s", "predicted s")
HEAD += ("measured / predicted", "call ms", "GPU GB: planned, peak")


@dataclass(frozen=True)
class Run:
    """What all measurements share.

    pin_memory: of `dispatch_model`. passes, seconds: of one measurement, at most; it has at least
    3 passes.
    """

    device: torch.device
    pin_memory: Any
    passes: int
    seconds: float

    def rates(self, streams: Streams | None) -> Rates:
        """Measured rates."""
        if streams is None:
            return Rates(1e9, 3e9, 2e10)
        return measure_rates(streams, torch.bfloat16, self.pin_memory == "weights")


@dataclass(frozen=True)
class Lanes:
    """What has the lanes: streams, whose threads are workers or threads of Python, or None."""

    streams: Streams | None
    rates: Rates

    def device(self) -> Any:
        """The device for `dispatch_model`."""
        if self.streams is None:
            return ShapedDevice(self.rates.link, self.rates.host, self.rates.accelerator)
        return Accelerator(self.rates, self.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["buffers", "weights", "peers"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement, about")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--quick", action="store_true", help="two shares, 4 passes, batch 1")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # makes a plan for each length of a cache
    if args.quick:
        args.shares, args.passes = [0.0, 0.5], 4
    start = time.perf_counter()
    print_machine(args.device)
    model = make_model(args.layers, args.width, args.device)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    seconds = time.perf_counter() - start
    print(f"{args.layers} layers of {args.width}: {size:.2f} GB, made in {seconds:.1f} s\n")
    for part in args.parts:
        print(f"\n## {part}\n", flush=True)
        device, pin_memory = torch.device(DEVICES[args.device]), part != "weights" or "weights"
        run = Run(device, pin_memory, args.passes, args.seconds)
        table = peer_table if part == "peers" else partial(our_table, quick=args.quick)
        attempt(partial(table, model, run, args.shares))


def print_machine(device: str) -> None:
    card = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    settings = ", ".join(f"{name} {os.environ.get(name)}" for name in SETTINGS)
    print(f"torch {torch.__version__}, {card}; {cpu_name()}, {cores_and_load()}; {settings}")


def make_model(layers: int, width: int, random_device: str) -> nn.Module:
    """A Llama in bfloat16 on the host; a GPU draws its random weights faster."""
    model = empty_model(layers, width, "cpu")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, device=random_device).mul_(0.02))
    return model


def empty_model(layers: int, width: int, device: str) -> nn.Module:
    """A Llama in bfloat16 whose weights are not set yet."""
    config = LlamaConfig(
        vocab_size=min(32000, 8 * width), hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # with its buffers computed
    return model


def copy_of(model: Any, device: str) -> nn.Module:
    """A copy of the model on a device."""
    copied = empty_model(model.config.num_hidden_layers, model.config.hidden_size, device)
    for target, source in zip(copied.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    return copied


def our_table(model: nn.Module, run: Run, shares: Sequence[float], quick: bool) -> None:
    """HeteGen, streaming and the host alone."""
    on_gpu = run.device.type == "cuda"
    kinds = {"": Streams(), ", threads of Python": Streams(flags=False)} if on_gpu else {"": None}
    lanes = {name: Lanes(streams, run.rates(streams)) for name, streams in kinds.items()}
    for name, of_kind in lanes.items():
        print(f"rates{name}: {of_kind.rates}\n", flush=True)
    print_head(*HEAD)
    if on_gpu:
        gpu_alone_rows(model, run, (1,) if quick else (1, 8))
    for share, batch in [(share, 1) for share in shares] + ([] if quick else [(shares[-1], 8)]):
        for kind, of_kind in lanes.items():
            row = partial(split_row, model=model, run=run, lanes=of_kind, share=share, batch=batch)
            attempt(partial(row, f"streaming{kind}", alpha=0.0))
            attempt(partial(row, f"HeteGen{kind}", alpha="auto"))
            if share == shares[0] and batch == 1:
                attempt(partial(row, f"the host alone{kind}", alpha=1.0))


def gpu_alone_rows(model: nn.Module, run: Run, batches: Sequence[int]) -> None:
    """Print a row per batch size: all weights are on the GPU."""
    gpu_model = copy_of(model, str(run.device))
    for batch in batches:
        seconds = decode(gpu_model, run, batch)
        tokens_per_s = f"{batch / seconds:.2f}"
        print_row("alone on the GPU", "all", batch, "", tokens_per_s, f"{seconds:.4f}", *[""] * 5)


def split_row(
    name: str,
    model: nn.Module,
    run: Run,
    lanes: Lanes,
    share: float,
    batch: int,
    alpha: float | str,
) -> None:
    """Print the row of a split model, with `share` of the split weights in the memory."""
    memory, device = memory_for(model, share), lanes.device()
    reset_gpu_peak(run.device)
    options: dict[str, Any] = {"alpha": alpha, "batch": batch, "prompt": 64}
    options["pin_memory"] = run.pin_memory
    with dispatch_model(model, {0: memory}, device, **options) as handle:
        seconds = decode(model, run, batch)
        figures, plan = handle.report()["decode"], handle.plan
        peak = gpu_peak(run.device)
    linears, predicted = figures["measured_seconds"], figures["predicted_seconds"]
    host_bytes = sum(split.alpha("decode") * split.linear.nbytes for split in plan.splits)
    mean_alpha = host_bytes / sum(split.linear.nbytes for split in plan.splits)
    cells = [f"{100 * share:.0f} %", batch, f"{mean_alpha:.2f}", f"{batch / seconds:.2f}"]
    cells += [f"{seconds:.4f}", f"{linears:.4f}", f"{predicted:.4f}", f"{linears / predicted:.2f}"]
    cells += [f"{1e3 * figures['call_seconds']:.3f}"]
    print_row(name, *cells, f"{plan.accelerator_bytes / 1e9:.2f}, {peak / 1e9:.2f}")


def memory_for(model: Any, share: float) -> int:
    """Bytes of the GPU for this share of the split weights, all other weights, and the slabs."""
    largest = model.lm_head.weight.nbytes
    not_split = model.model.embed_tokens.weight.nbytes + 2**20
    split = sum(parameter.nbytes for parameter in model.parameters()) - not_split
    return int(not_split + NUM_SLABS * largest / 4 + share * split) + 2**22


def decode(model: Any, run: Run, batch: int) -> float:
    """Median seconds of a decoding pass after a warm-up."""
    prompt = torch.randint(
        1, model.config.vocab_size, (batch, PROMPT), generator=torch.manual_seed(1)
    )
    token = prompt.to(run.device)
    cache = DynamicCache()
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(WARM_UP_PASSES + run.passes):
            start = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            token.cpu()  # waits for the GPU
            seconds.append(time.perf_counter() - start)
            measured = seconds[WARM_UP_PASSES:]
            if len(measured) >= 3 and sum(measured) > run.seconds:
                break
    return median(seconds[WARM_UP_PASSES:])


def peer_table(model: Any, run: Run, shares: Sequence[float]) -> None:
    """Other packages with the same weights and memory: seconds of a pass, batch 1."""
    print_head("", "GPU GB: allowed, peak", "tokens/s", "pass s")
    memory = memory_for(model, shares[len(shares) // 2])
    for name, prepare in hetegen_peers.PEERS.items():
        attempt(partial(peer_row, name, prepare, model, run, memory))


def peer_row(name: str, prepare: Callable[..., Any], model: Any, run: Run, memory: int) -> None:
    """Print the row of a package; `prepare` is a function of hetegen_peers.py, memory in bytes."""
    reset_gpu_peak(run.device)
    seconds = decode(prepare(copy_of(model, "cpu"), run.device, memory), run, 1)
    gigabytes = f"{memory / 1e9:.2f}, {gpu_peak(run.device) / 1e9:.2f}"
    print_row(name, gigabytes, f"{1 / seconds:.2f}", f"{seconds:.4f}")


def reset_gpu_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gpu_peak(device: torch.device) -> int:
    """Bytes at the peak since `reset_gpu_peak`; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
