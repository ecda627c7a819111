"""`wallfacer generate`: text of a model that is larger than the accelerator's memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wf_backends.cli.readers import call_reader, check_folder

GENERATORS = "wallfacer.generators"  # entry points: a folder -> a model with `generate_text`


def generate(
    model: Annotated[Path, typer.Option(help="Folder with config.json and *.safetensors.")],
    max_memory: Annotated[str, typer.Option(help="Of the accelerator, such as 20GB.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
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
    from wf_backends.hetegen import dispatch_model

    check_folder(model)
    device = shaped_device(shaped) if shaped else None
    told = Console(stderr=True, highlight=False)
    told.print(f"loading {model}")
    loaded = call_reader(GENERATORS, "generate", model)
    memory: dict[int | str, int | str] = {0: max_memory}
    if cpu_memory:
        memory["cpu"] = cpu_memory
    with dispatch_model(loaded.model, memory, device) as handle:
        told.print(
            f"predicted: {1 / handle.plan.decode_seconds:.2f} tokens/s; streaming alone "
            f"{1 / handle.plan.streaming_seconds:.2f}, the CPU alone "
            f"{1 / handle.plan.host_seconds:.2f}"
        )
        times: list[float] = []  # at which the text of a token came

        def write(text: str) -> None:
            times.append(time.perf_counter())
            print(text, end="", flush=True)
            if told.is_terminal and not sys.stdout.isatty():
                told.print(f"{len(times)} of {max_new_tokens} tokens", end="\r")

        drawn = seed if sample else None
        loaded.generate_text(prompt, max_new_tokens, write, drawn, on_host=bool(shaped))
    print()
    took = times[-1] - times[0] if times else 0.0  # without the prompt's pass
    rate = f"{(len(times) - 1) / took:.2f} tokens/s" if took > 0 else "one token"
    told.print(f"{len(times)} tokens, {rate}")


def shaped_device(rates: str) -> Any:
    """A device of threads with three rates in GB/s.

    Raises:
        ValueError: if there are not three positive numbers.
    """
    from wf_backends.hetegen import ShapedDevice

    try:
        link, host, accelerator = (float(rate) * 1e9 for rate in rates.split(","))
    except ValueError as error:
        raise ValueError(f"--shaped must be three rates as 1,3,20, got {rates!r}") from error
    return ShapedDevice(link, host, accelerator)
