"""`wallfacer generate`: text of a model that is larger than the accelerator's memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wf_backends._validation import parse_bytes, positive
from wf_backends.cli.options import MOST
from wf_backends.cli.readers import call_reader, check_folder
from wf_backends.hetegen import ShapedDevice, dispatch_model

LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # that torch takes
GENERATORS = "wallfacer.generators"  # entry points: a folder -> a model with `generate_text`


def generate(
    model: Annotated[Path, typer.Option(help="Folder with config.json and *.safetensors.")],
    max_memory: Annotated[str, typer.Option(help="Of the accelerator, such as 20GB.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    cpu_memory: Annotated[str, typer.Option(help="Of the host; empty for all.")] = "",
    sample: Annotated[bool, typer.Option(help="Draw tokens instead of the likeliest.")] = False,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    shaped: Annotated[
        str,
        typer.Option(help="Without an accelerator: GB/s of link, host, accelerator, as 1,3,20."),
    ] = "",
) -> None:
    """Generate text with a model's linears split over the accelerator and the host.

    The text is written to stdout as it comes, progress and tokens a second to stderr.

    Example:

        wallfacer generate --model ./llama --max-memory 20GB --prompt "Once upon a time"
    """
    check_folder(model)
    positive("--max-new-tokens", max_new_tokens, MOST["seqlen"])
    if not LEAST_SEED <= seed <= MOST_SEED:
        raise ValueError(f"--seed must be from {LEAST_SEED} to {MOST_SEED}, got {seed}")
    memory: dict[int | str, int | str] = {0: parse_bytes("--max-memory", max_memory)}
    if cpu_memory:
        memory["cpu"] = parse_bytes("--cpu-memory", cpu_memory)
    device = shaped_device(shaped) if shaped else None
    told = Console(stderr=True, highlight=False)
    told.print(f"loading {model}")
    loaded = call_reader(GENERATORS, "generate", model)
    with dispatch_model(loaded.model, memory, device) as handle:
        told.print(
            f"predicted: {1 / handle.plan.decode_seconds:.2f} tokens/s; streaming alone "
            f"{1 / handle.plan.streaming_seconds:.2f}, the CPU alone "
            f"{1 / handle.plan.host_seconds:.2f}"
        )
        text = Text(told, max_new_tokens)
        drawn = seed if sample else None
        loaded.generate_text(prompt, max_new_tokens, text.write, drawn, on_host=bool(shaped))
    print()
    told.print(text.rate())


class Text:
    """The generated text on stdout, and when each token's part of it came."""

    def __init__(self, told: Console, most: int) -> None:
        self.told, self.most = told, most
        self.times: list[float] = []

    def write(self, text: str) -> None:
        """Print a token's text; on a terminal that does not show it, how many there are."""
        self.times.append(time.perf_counter())
        print(text, end="", flush=True)
        if self.told.is_terminal and not sys.stdout.isatty():
            self.told.print(f"{len(self.times)} of {self.most} tokens", end="\r")

    def rate(self) -> str:
        """Tokens, and tokens a second without the prompt's pass."""
        count = len(self.times)
        took = self.times[-1] - self.times[0] if self.times else 0.0
        words = f"{count} token" if count == 1 else f"{count} tokens"
        return f"{words}, {(count - 1) / took:.2f} tokens/s" if took else words


def shaped_device(rates: str) -> Any:
    """A device of threads with three rates in GB/s.

    Raises:
        ValueError: if there are not three positive numbers.
    """
    try:
        link, host, accelerator = (float(rate) * 1e9 for rate in rates.split(","))
        return ShapedDevice(link, host, accelerator)
    except ValueError as error:
        raise ValueError(f"--shaped must be three rates as 1,3,20, got {rates!r}") from error
