"""HeteGen predicted beside measured, and beside streaming, the CPU alone and other packages.

    OMP_NUM_THREADS=1 python benchmarks/hetegen.py --out benchmarks/results/hetegen.md

Seconds of a decoding pass, median. A shaped device has real tensors and threads as lanes whose
work takes no less than its bytes at a given rate. What a model does between its linears is measured
while it streams alone, which is run before the prediction of HeteGen is made: no time of a run is
in its own prediction. Parts: grid, cores, peers.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from hetegen_cores import cores
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from wf_backends.hetegen import ShapedDevice, dispatch_model

PROMPT = 4
CALL_SECONDS = 3e-4  # of a plan that is made before the model ran; streaming hides calls
HEADLINE = 3.17  # host over link: +317 % over streaming
ABOUT = """\
Printed by `OMP_NUM_THREADS=1 python benchmarks/hetegen.py`. Seconds of a decoding pass, median.
In the grid threads stand for link, host and accelerator, each with a rate of its own; the first
row has the rates at which the law gives +317 % over streaming. What a model does between its
linears ("call") is measured while it streams alone, before the prediction is made. In the second
lab nothing is shaped: one thread copies and stands for the accelerator, the other is the host.
"""
TITLES = {
    "grid": "Grid",
    "cores": "Two threads on two cores",
    "peers": "Beside other packages",
}
PEERS = """\
On a CPU other packages have no link: accelerate fetches weights from a mapping, which is given
the link's time here, and so are DeepSpeed's fetches of parameters, which on a CPU are references.
Their copies to an accelerator, pinned memory and streams do not run on a CPU.
"""
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    ),
    "gpt2": GPT2Config(
        vocab_size=512, n_embd=256, n_layer=4, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=None,
    ),
    "opt": OPTConfig(
        vocab_size=512, hidden_size=256, ffn_dim=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=256, eos_token_id=None, pad_token_id=0,
    ),
    "mixtral": MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        eos_token_id=None,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a shaped device; rates in bytes a second, memory as a share of the model's."""

    model: str
    link: float
    host: float
    accelerator: float
    memory: float
    batch: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a decoding pass."""

    measured: float
    predicted: float
    call: float
    alpha: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["grid", "cores", "peers"])
    parser.add_argument("--tokens", type=int, default=5, help="decoding passes of a setting")
    parser.add_argument("--rows", type=int, default=None, help="of the grid; all if not given")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    args = parser.parse_args()
    make_model("llama")  # libraries log to stdout when they are imported
    if args.out is not None:
        with args.out.open("w") as file, redirect_stdout(file):
            run_parts(args)
    else:
        run_parts(args)


def run_parts(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(f"# HeteGen: predicted beside measured\n\n{ABOUT}")
    print(f"torch {torch.__version__}, {processor()}, load {load()} at the beginning\n")
    runs: dict[str, Callable[[], None]] = {
        "grid": lambda: grid(args.tokens, args.rows),
        "cores": cores,
        "peers": lambda: peers(args.tokens),
    }
    for part in args.parts:
        start = time.perf_counter()
        print(f"## {TITLES[part]}\n")
        runs[part]()
        print(f"\n{time.perf_counter() - start:.0f} s\n", flush=True)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor())}, {torch.get_num_threads()} thread for each lane"


def load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def settings() -> list[Setting]:
    """Host over link, memory, accelerator over link; models, links and batches in turns.

    A machine whose memory gives less than 1.5 GB/s to a thread cannot keep the rates.
    """
    rows = [Setting("llama", 6e6, 6e6 * HEADLINE, 1.5e9, 0.15, 1)]
    shapes = product((0.5, 1.0, HEADLINE), (0.15, 0.5), (100, 3), ("llama", "gpt2"))
    for i, (ratio, memory, faster, model) in enumerate(shapes):
        link = (15e6, 30e6)[i // 2 % 2]
        name = "opt" if model == "gpt2" and i % 4 == 3 else model
        rows.append(Setting(name, link, link * ratio, link * faster, memory, (1, 4)[i // 4 % 2]))
    experts = product((1.0, HEADLINE), (0.3, 0.6))
    rows += [Setting("mixtral", 15e6, 15e6 * ratio, 1.5e9, kept, 1) for ratio, kept in experts]
    return rows


def grid(tokens: int, count: int | None) -> None:
    """Each setting with the best alpha, streaming alone and the host alone."""
    models = {name: make_model(name) for name in CONFIGS}
    for name, model in models.items():  # what is done at the first calls is done
        decode(model, Setting(name, 1e9, 1e9, 3e9, 0.15, 1), 0.0, 2, "auto")
    print(
        "| model | batch | link, host, accelerator MB/s | memory | call ms | alpha | predicted "
        "| measured | measured / predicted | streaming | host | of the better | over streaming |"
    )
    print("|" + 13 * "---|")
    off, slower = [], []
    for row in settings()[:count]:
        model = models[row.model]
        streaming = decode(model, row, CALL_SECONDS, tokens, 0.0)
        ours, host = (decode(model, row, streaming.call, tokens, a) for a in ("auto", 1.0))
        better = min(streaming.measured, host.measured)
        off.append(abs(ours.measured / ours.predicted - 1))
        slower.append(ours.measured / better)
        print(
            f"| {row.model} | {row.batch} | {row.link / 1e6:.0f}, {row.host / 1e6:.0f}, "
            f"{row.accelerator / 1e6:.0f} | {100 * row.memory:.0f} % | {1e3 * streaming.call:.2f} "
            f"| {ours.alpha:.2f} "
            f"| {ours.predicted:.4f} | {ours.measured:.4f} "
            f"| {ours.measured / ours.predicted:.3f} | {streaming.measured:.4f} "
            f"| {host.measured:.4f} | {slower[-1]:.2f} "
            f"| {100 * (streaming.measured / ours.measured - 1):+.0f} % |",
            flush=True,
        )
    print(
        f"\n{len(off)} settings: predicted within {100 * max(off):.1f} % of measured, "
        f"{sum(o <= 0.1 for o in off)} within 10 %; at most {max(slower):.2f} of the better of "
        "streaming and the host alone"
    )


def decode(
    model: nn.Module, row: Setting, call: float, tokens: int, alpha: float | str
) -> Measured:
    """Generate some tokens on a shaped device."""
    device = ShapedDevice(row.link, row.host, row.accelerator, call_seconds=call)
    memory: dict[int | str, int | str] = {0: int(row.memory * nbytes(model))}
    words = {"batch": row.batch, "prompt": PROMPT, "alpha": alpha}
    with dispatch_model(model, memory, device, **words) as handle:  # type: ignore[arg-type]
        generate(model, prompts(row.batch), tokens)
        told = handle.report()["decode"]
        shares = [split.alpha("decode") for split in handle.plan.splits]
    return Measured(
        told["measured_seconds"],
        told["predicted_seconds"],
        told["call_seconds"],
        sum(shares) / len(shares),
    )


def prompts(batch: int) -> Tensor:
    return torch.randint(1, 512, (batch, PROMPT), generator=torch.manual_seed(1))


def generate(model: nn.Module, ids: Tensor, tokens: int) -> None:
    words = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    model.generate(ids, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, **words)  # type: ignore[operator]


def peers(tokens: int) -> None:
    """accelerate's cpu_offload and DeepSpeed's ZeRO-Inference behind the same link."""
    row = Setting("llama", 30e6, 30e6 * HEADLINE, 3e9, 0.15, 1)
    print(f"llama, link {row.link / 1e6:.0f} MB/s, host {row.host / 1e6:.0f} MB/s, memory 15 %")
    print(f"\n{PEERS}")
    print("| | seconds a token |\n|---|---|")
    peers = {
        "HeteGen": partial(our_seconds, alpha="auto"),
        "streaming with prefetch": partial(our_seconds, alpha=0.0),
        "accelerate cpu_offload": accelerate_seconds,
        "DeepSpeed ZeRO-Inference": zero_seconds,
    }
    for name, seconds in peers.items():
        try:
            print(f"| {name} | {seconds(make_model(row.model), row, tokens):.4f} |", flush=True)
        except ImportError as error:
            print(f"| {name} | not installed: {error} |")


def seconds_a_token(model: nn.Module, tokens: int) -> float:
    """Of generating, the prompt's pass included, after a first time."""
    generate(model, prompts(1), tokens)
    start = time.perf_counter()
    generate(model, prompts(1), tokens)
    return (time.perf_counter() - start) / (tokens + 1)


def our_seconds(model: nn.Module, row: Setting, tokens: int, alpha: float | str) -> float:
    device = ShapedDevice(row.link, row.host, row.accelerator)
    memory: dict[int | str, int | str] = {0: int(row.memory * nbytes(model))}
    with dispatch_model(model, memory, device, alpha=alpha, prompt=PROMPT):  # type: ignore[arg-type]
        return seconds_a_token(model, tokens)


class SlowLink(dict):
    """Weights by name that take their bytes at the link's rate to fetch."""

    def __init__(self, model: nn.Module, link: float) -> None:
        super().__init__((name, p.detach().clone()) for name, p in model.state_dict().items())
        self.link = link

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        time.sleep(tensor.nbytes / self.link)
        return tensor


def accelerate_seconds(model: nn.Module, row: Setting, tokens: int) -> float:
    """It fetches each module's weights when the module is called, and drops them afterwards."""
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"), state_dict=SlowLink(model, row.link))
    return seconds_a_token(model, tokens)


def zero_seconds(model: nn.Module, row: Setting, tokens: int) -> float:
    """ZeRO stage 3 with parameters on the host; those of the memory stay, and others of as many
    bytes may be there or on their way.

    On a CPU it fetches by taking a reference, so that its fetches are given the link's time here.
    """
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters as fetching

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    kept = int(row.memory * nbytes(model)) // 4
    words = {"stage3_model_persistence_threshold": kept, "stage3_max_live_parameters": kept,
             "stage3_prefetch_bucket_size": kept // 2}  # fmt: skip
    offload = {"stage": 3, "offload_param": {"device": "cpu"}, **words}
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": offload}
    )
    link = Link(row.link)
    for name in ("NoGatherHandle", "NoGatherCoalescedHandle"):
        setattr(fetching, name, link.delayed(getattr(fetching, name)))
    with torch.no_grad():
        return seconds_a_token(engine.module.eval(), tokens)


class Link:
    """A link between the host and what stands for the accelerator, for DeepSpeed's fetches."""

    def __init__(self, rate: float) -> None:
        self.rate, self.due = rate, 0.0

    def delayed(self, handle: type) -> type:
        """The class of a fetch that is done after its bytes have passed, one fetch at a time."""
        link = self

        class Delayed(handle):
            def __init__(self, params) -> None:  # type: ignore[no-untyped-def]
                fetched = [params] if isinstance(params, Tensor) else list(params)
                super().__init__(params)
                size = sum(each.ds_numel * each.itemsize for each in fetched)
                link.due = self.due = max(link.due, time.perf_counter()) + size / link.rate

            def wait(self, **words) -> None:  # type: ignore[no-untyped-def]
                time.sleep(max(0.0, self.due - time.perf_counter()))
                super().wait(**words)

        return Delayed


if __name__ == "__main__":
    main()
