"""`wallfacer generate`: text of a model that is larger than the accelerator's memory."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from wf_backends._validation import parse_bytes, positive
from wf_backends.cli import options as o
from wf_backends.cli.bench_hetero import known_rates
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.hetegen import Accelerator, Rates, ShapedDevice, dispatch_model

LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # that torch takes
GENERATORS = "wallfacer.generators"  # entry points: a folder -> a model with `generate_text`


def generate(
    model: ModelFolder,
    max_memory: Annotated[str, Option(help="Of the accelerator, such as 20GB.")],
    prompt: Annotated[str, Option(help="What the text begins with.")],
    max_new_tokens: Annotated[int, Option(help="Tokens to generate.")] = 64,
    cpu_memory: Annotated[str, Option(help="Of the host; empty for all.")] = "",
    sample: Annotated[bool, Option(help="Draw tokens instead of the likeliest.")] = False,
    seed: Annotated[int, Option(help="Of the draw.")] = 0,
    shaped: Annotated[
        str, Option(help="Without an accelerator: GB/s of link, host, accelerator, as 1,3,20.")
    ] = "",
    cache_dir: o.CacheDir = None,
) -> None:
    """Generate text with a model's linears split over the accelerator and the host.

    The text is written to stdout as it comes, progress and tokens a second to stderr. Weights are
    read from the *.safetensors of the folder. The accelerator's rates are those of `bench-hetero`.

    Example:

        wallfacer generate --model ./llama --max-memory 20GB --prompt "Once upon a time"
    """
    positive("--max-new-tokens", max_new_tokens, o.MOST["seqlen"])
    if not LEAST_SEED <= seed <= MOST_SEED:
        raise ValueError(f"--seed must be from {LEAST_SEED} to {MOST_SEED}, got {seed}")
    if seed and not sample:
        raise ValueError(f"--seed {seed} is of a draw: give --sample too, or leave it out")
    memory: dict[int | str, int | str] = {0: parse_bytes("--max-memory", max_memory)}
    if cpu_memory:
        memory["cpu"] = parse_bytes("--cpu-memory", cpu_memory)
    device = shaped_device(shaped) if shaped else Accelerator()  # refused before it is loaded
    say(f"loading {model}")
    loaded = call_reader(GENERATORS, "generate", model)
    if not shaped:
        device = Accelerator(accelerator_rates(loaded.model, o.folder_of(cache_dir)))
    with dispatch_model(loaded.model, memory, device) as handle:
        plan = handle.plan
        say(
            f"predicted: {1 / plan.decode_seconds:.2f} tokens/s; streaming alone "
            f"{1 / plan.streaming_seconds:.2f}, the CPU alone {1 / plan.host_seconds:.2f}"
        )
        drawn, times = seed if sample else None, list[float]()
        shown = partial(write, times, max_new_tokens)
        loaded.generate_text(prompt, max_new_tokens, shown, drawn, on_host=bool(shaped))
    print()
    say(rate(times))


def accelerator_rates(model: Any, folder: Path) -> Rates:
    """Those that `bench-hetero` keeps for the type of the weights; measured where it has none."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    _, rates, source = known_rates(folder, dtype, fresh=False)
    say(f"rates: {source}")
    return rates


def say(words: str, end: str = "\n") -> None:
    """To stderr: stdout has the text alone."""
    print(words, end=end, file=sys.stderr, flush=True)


def write(times: list[float], most: int, text: str) -> None:
    """Print a token's text and note the time; on a terminal that does not show it, its number."""
    times.append(time.perf_counter())
    print(text, end="", flush=True)
    if sys.stderr.isatty() and not sys.stdout.isatty():
        say(f"{len(times)} of {most} tokens", end="\r")


def rate(times: list[float]) -> str:
    """Tokens that came at these times, and tokens a second without the prompt's pass."""
    count = len(times)
    took = times[-1] - times[0] if times else 0.0
    words = f"{count} token" if count == 1 else f"{count} tokens"
    return f"{words}, {(count - 1) / took:.2f} tokens/s" if took else words


def shaped_device(rates: str) -> Any:
    """A device of threads with three rates in GB/s, which must be positive."""
    try:
        link, host, accelerator = (float(rate) * 1e9 for rate in rates.split(","))
        return ShapedDevice(link, host, accelerator)
    except ValueError as error:
        raise ValueError(f"--shaped must be three rates as 1,3,20, got {rates!r}") from error
