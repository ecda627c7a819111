"""HeteGen: predicted and measured time, compared with streaming and with the CPU alone.

    OMP_NUM_THREADS=1 python benchmarks/hetegen.py --out benchmarks/results/hetegen.md

Median seconds of a decoding pass. A shaped device has real tensors, and a thread for each lane that
works no faster than a given rate in bytes per second. HeteGen runs three times. Each prediction has
the time between linears ("call") of the run before: none uses times of the run that it predicts.
Parts: grid, cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from hetegen_cores import cores_table
from measure import cores_and_load, cpu_name, print_head, print_row
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from wf_backends.hetegen import ShapedDevice, dispatch_model

PROMPT = 4
CALL_SECONDS = 3e-4  # assumed in a setting's first plan, whose run measures them
ROUNDS = 3  # of HeteGen: the one with the median ratio of measured and predicted is shown
HEADLINE_RATIO = 3.17  # host rate / link rate at which HeteGen is 317 % faster than streaming
ABOUT = """\
The output of `OMP_NUM_THREADS=1 python benchmarks/hetegen.py`: median seconds of a decoding pass.
In the grid, three threads with given rates stand for the link, the host and the accelerator. The
first row has the rates for which the law predicts +317 % over streaming. HeteGen runs three times,
each predicted with the time between two linears ("call") of the run before; shown is the one with
the median of measured / predicted. In the second lab no rate is imposed: one thread copies and
stands for the accelerator, the other is the host.
"""
TITLES = {"grid": "Grid", "cores": "Two threads on two cores"}
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
    """A model on a shaped device.

    link, host, accelerator: rates in bytes per second. memory: the accelerator's, as a share of the
    model's weights.
    """

    model: str
    link: float
    host: float
    accelerator: float
    memory: float
    batch: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a decoding pass, and the mean share of the host (alpha).

    call: between two linears. predicted_call: the one of the prediction.
    """

    measured: float
    predicted: float
    call: float
    predicted_call: float
    alpha: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["grid", "cores"])
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
    print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()} at the beginning\n")
    runs: dict[str, Callable[[], None]] = {
        "grid": lambda: grid_table(args.tokens, args.rows),
        "cores": cores_table,
    }
    for part in args.parts:
        start = time.perf_counter()
        print(f"## {TITLES[part]}\n")
        runs[part]()
        print(f"\n{time.perf_counter() - start:.0f} s\n", flush=True)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def settings() -> list[Setting]:
    """Combinations of host / link rate, memory and accelerator / link rate.

    Models, links and batch sizes alternate between rows. The machine must give each thread at least
    1.5 GB/s of memory bandwidth.
    """
    rows = [Setting("llama", 6e6, 6e6 * HEADLINE_RATIO, 1.5e9, 0.15, 1)]
    shapes = product((0.5, 1.0, HEADLINE_RATIO), (0.15, 0.5), (100, 3), ("llama", "gpt2"))
    for i, (host_ratio, memory, accelerator_ratio, model) in enumerate(shapes):
        link = (15e6, 30e6)[i // 2 % 2]
        name = "opt" if model == "gpt2" and i % 4 == 3 else model
        host, accelerator = link * host_ratio, link * accelerator_ratio
        rows.append(Setting(name, link, host, accelerator, memory, (1, 4)[i // 4 % 2]))
    for ratio, memory in product((1.0, HEADLINE_RATIO), (0.3, 0.6)):
        rows.append(Setting("mixtral", 15e6, 15e6 * ratio, 1.5e9, memory, 1))
    return rows


def grid_table(tokens: int, max_rows: int | None) -> None:
    """Print a row for each setting: HeteGen with the best alpha, streaming, the host alone."""
    models = {name: make_model(name) for name in CONFIGS}
    for name, model in models.items():  # a warm-up
        decode(model, Setting(name, 1e9, 1e9, 3e9, 0.15, 1), 0.0, 2, "auto")
    head = ("model", "batch", "link, host, accelerator MB/s", "memory", "call ms", "alpha")
    head += ("predicted", "measured", "measured / predicted", "streaming", "host")
    print_head(*head, "of the better", "over streaming")
    errors: list[float] = []  # of predictions, relative
    slowdowns: list[float] = []  # HeteGen / the better of streaming and host
    for setting in settings()[:max_rows]:
        model = models[setting.model]
        ours = hetegen(model, setting, tokens)
        streaming = decode(model, setting, ours.call, tokens, 0.0)
        host = decode(model, setting, ours.call, tokens, 1.0)
        errors.append(abs(ours.ratio - 1))
        slowdowns.append(ours.measured / min(streaming.measured, host.measured))
        megabytes = [rate / 1e6 for rate in (setting.link, setting.host, setting.accelerator)]
        cells = [setting.model, setting.batch, ", ".join(f"{rate:.0f}" for rate in megabytes)]
        cells += [f"{100 * setting.memory:.0f} %", f"{1e3 * ours.predicted_call:.2f}"]
        cells += [f"{ours.alpha:.2f}", f"{ours.predicted:.4f}", f"{ours.measured:.4f}"]
        cells += [f"{ours.ratio:.3f}", f"{streaming.measured:.4f}", f"{host.measured:.4f}"]
        gain = streaming.measured / ours.measured - 1
        print_row(*cells, f"{slowdowns[-1]:.2f}", f"{100 * gain:+.0f} %")
    print(
        f"\n{len(errors)} settings: predicted within {100 * max(errors):.1f} % of measured, "
        f"{sum(error <= 0.1 for error in errors)} within 10 %; at most {max(slowdowns):.2f} "
        "of the better of streaming and the host alone"
    )


def hetegen(model: nn.Module, setting: Setting, tokens: int) -> Measured:
    """The median of some runs, each of which is predicted with the call of the run before."""
    call = decode(model, setting, CALL_SECONDS, tokens, "auto").call
    rounds: list[Measured] = []
    for _ in range(ROUNDS):
        rounds.append(decode(model, setting, call, tokens, "auto"))
        call = rounds[-1].call
    return sorted(rounds, key=lambda run: run.ratio)[ROUNDS // 2]


def decode(
    model: nn.Module, setting: Setting, call_seconds: float, tokens: int, alpha: float | str
) -> Measured:
    """Generate `tokens` tokens on a shaped device; seconds and alpha of the decoding passes."""
    device = ShapedDevice(
        setting.link, setting.host, setting.accelerator, call_seconds=call_seconds
    )
    memory: dict[int | str, int | str] = {0: int(setting.memory * nbytes(model))}
    options = {"batch": setting.batch, "prompt": PROMPT, "alpha": alpha}
    with dispatch_model(model, memory, device, **options) as handle:  # type: ignore[arg-type]
        generate(model, prompts(setting.batch), tokens)
        report = handle.report()["decode"]
        alphas = [split.alpha("decode") for split in handle.plan.splits]
    return Measured(
        report["measured_seconds"],
        report["predicted_seconds"],
        report["call_seconds"],
        call_seconds,
        sum(alphas) / len(alphas),
    )


def prompts(batch: int) -> Tensor:
    return torch.randint(1, 512, (batch, PROMPT), generator=torch.manual_seed(1))


def generate(model: nn.Module, ids: Tensor, tokens: int) -> None:
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    model.generate(ids, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, **options)  # type: ignore[operator]


if __name__ == "__main__":
    main()
