"""`wallfacer generate`: text from a model that is larger than the accelerator's memory."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import FileText, Option

from wf_backends._validation import parse_bytes, positive
from wf_backends.cli import options as o
from wf_backends.cli.bench_hetero import known_rates
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.hetegen import Accelerator, Rates, ShapedDevice, dispatch_model

RANGES = {"seed": (-(2**63), 2**64 - 1), "temperature": (0.01, 100), "top_p": (0.001, 1)}
GENERATORS = "wallfacer.generators"  # entry points: a folder -> a model with `generate_text`


def generate(
    model: ModelFolder,
    max_memory: Annotated[str, Option(help="Of the accelerator, such as 20GB.")],
    prompt: Annotated[str, Option(help="The beginning of the text.")] = "",
    prompt_file: Annotated[FileText | None, Option(help="The same in a file; - is stdin.")] = None,
    chat: Annotated[bool, Option("--chat", help="As a question, by the chat template.")] = False,
    max_new_tokens: Annotated[int, Option(help="Tokens to generate.")] = 64,
    cpu_memory: Annotated[str, Option(help="Of the host; empty for all.")] = "",
    sample: Annotated[bool, Option(help="Draw tokens at random; else the likeliest.")] = False,
    temperature: Annotated[float | None, Option(help="Of --sample; default: the folder's.")] = None,
    top_p: Annotated[float | None, Option(help="Of --sample; default: the folder's.")] = None,
    seed: Annotated[int | None, Option(help="Of --sample.", show_default="0")] = None,
    shaped: Annotated[str, Option(help="Simulates GB/s of link, host, accelerator: 1,3,20.")] = "",
    pin_weights: o.PinWeights = False,
    cache_dir: o.CacheDir = None,
) -> None:
    """Generate text with a model's linears split over the accelerator and the host.

    Text goes to stdout token by token, progress and tokens per second to stderr. Weights are read
    from the *.safetensors of the folder. The accelerator's rates are those of `bench-hetero`.

    Example:

        wallfacer generate --model ./llama --max-memory 20GB --prompt "Once upon a time"
    """
    positive("--max-new-tokens", max_new_tokens, o.MAX_SIZES["seqlen"])
    options = sampling(sample, temperature=temperature, top_p=top_p, seed=seed)
    text = read_prompt(prompt, prompt_file)
    memory: dict[int | str, int | str] = {0: parse_bytes("--max-memory", max_memory)}
    if cpu_memory:
        memory["cpu"] = parse_bytes("--cpu-memory", cpu_memory)
    device = shaped_device(shaped) if shaped else Accelerator()  # raises before the model is loaded
    log(f"loading {model}")
    loaded = call_reader(GENERATORS, "generate", model, chat)
    if not shaped:
        device = Accelerator(accelerator_rates(loaded.model, cache_dir, pin_weights))
    pin_memory = "weights" if pin_weights else True
    with dispatch_model(loaded.model, memory, device, pin_memory=pin_memory) as handle:
        plan = handle.plan
        log(
            f"predicted: {1 / plan.decode_seconds:.2f} tokens/s; streaming alone "
            f"{1 / plan.streaming_seconds:.2f}, the CPU alone {1 / plan.host_seconds:.2f}"
        )
        times: list[float] = []
        on_text = partial(write, times, max_new_tokens)
        print(loaded.generate_text(text, max_new_tokens, on_text, bool(shaped), **options))
    log(rate(times))


def sampling(sample: bool, **given: float | None) -> dict[str, Any]:
    """Arguments of `generate_text`: those that were given; refuses them without --sample."""
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        o.check_range(*RANGES[name], **{name: value})
        if not sample:
            raise ValueError(f"--{name.replace('_', '-')} {value} has an effect only with --sample")
    return {"do_sample": sample, **options}


def read_prompt(prompt: str, file: FileText | None) -> str:
    """The prompt, or the text of the file without the end of its last line."""
    if bool(prompt) == bool(file):
        raise ValueError("the prompt must come from --prompt or from --prompt-file: give one")
    try:
        return file.read().removesuffix("\n") if file else prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file must be text: {error}") from error


def accelerator_rates(model: Any, cache_dir: Path | None, pin_weights: bool) -> Rates:
    """The rates that `bench-hetero` keeps for the weights' dtype; measured if it keeps none."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    _, rates, source = known_rates(cache_dir, dtype, pin_weights, fresh=False)
    log(f"rates: {source}")
    return rates


def log(message: str, end: str = "\n") -> None:
    """Print to stderr: stdout has only the generated text."""
    print(message, end=end, file=sys.stderr, flush=True)


def write(times: list[float], max_tokens: int, text: str) -> None:
    """Print a token's text and note the time; count on the terminal if stdout is not on it."""
    times.append(time.perf_counter())
    print(text, end="", flush=True)
    if sys.stderr.isatty() and not sys.stdout.isatty():
        log(f"{len(times)} of {max_tokens} tokens", end="\r")


def rate(times: list[float]) -> str:
    """The number of tokens, and tokens per second after the first one, which takes the prompt."""
    count = len(times)
    seconds = times[-1] - times[0] if times else 0.0
    text = f"{count} token" if count == 1 else f"{count} tokens"
    return f"{text}, {(count - 1) / seconds:.2f} tokens/s" if seconds else text


def shaped_device(rates: str) -> Any:
    """A device of threads; `rates` are those of link, host and accelerator in GB/s, as "1,3,20"."""
    try:
        link, host, accelerator = (float(rate) * 1e9 for rate in rates.split(","))
        return ShapedDevice(link, host, accelerator)
    except ValueError as error:
        raise ValueError(f"--shaped must be three rates as 1,3,20, got {rates!r}") from error
