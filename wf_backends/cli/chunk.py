"""`wallfacer chunk`: the memory of a model's activations, and what slices make of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from wf_backends._validation import positive
from wf_backends.autochunk import BudgetError, Profiles, Rates, longest, memory_profiles
from wf_backends.cli.draw import Picture, draw_memory
from wf_backends.cli.options import AsJson, check_range
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.cli.tables import print_json, table_of
from wf_backends.graph import checked_budget

SKELETONS = "wallfacer.skeletons"  # entry points: a folder -> a model on fake tensors, its inputs
MOST_TOKENS = 2**29  # a mask of their square is still counted in 64 bits
MIB = 1 << 20
ROWS = 12  # of the table
FEW = 2  # layers that are laid out to find the longest sequence: the peak is that of one layer
STEP = 1024  # tokens: the longest sequence is a multiple of it


def chunk(
    model: ModelFolder,
    seqlen: Annotated[int, Option(help="Tokens of a sequence.")],
    batch: Annotated[int, Option(help="Sequences.")] = 1,
    max_memory: Annotated[str, Option(help="Of activations, such as 8GB.")] = "",
    max_slowdown: Annotated[float, Option(help="Share of time that slices may add.")] = 0.1,
    attention: Annotated[str, Option(help="sdpa or eager.")] = "sdpa",
    layers: Annotated[int, Option(help="Lay out at most so many; 0: all.")] = 0,
    longest_sequence: Annotated[
        bool, Option("--longest", help="Also find the longest sequence that fits.")
    ] = False,
    measure: Annotated[bool, Option("--measure", help="Take this machine's rates.")] = False,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Find the parts of a model's forward pass to run slice by slice under a memory budget.

    Nothing is computed and no weights are read: a model of any size is looked at on any machine,
    with the same result on each, unless it is to `--measure` itself. The picture is of the memory
    over the run.

    Example:

        wallfacer chunk --model ./llama --seqlen 65536 --max-memory 8GB
    """
    check_range(1, seqlen=seqlen, batch=batch)
    positive("--batch times --seqlen", batch * seqlen, MOST_TOKENS)
    check_range(0, layers=layers)
    memory = _memory(max_memory)
    budget = checked_budget(memory, max_slowdown)
    if longest_sequence and not isinstance(budget.memory, int):
        raise ValueError("--longest needs --max-memory as a size, such as 8GB")

    def profiles_of(tokens: int, some: int) -> Profiles:
        made, inputs = call_reader(SKELETONS, "chunk", model, tokens, batch, attention, some)
        return memory_profiles(made, inputs, memory, max_slowdown, None if measure else Rates())

    def fits(tokens: int) -> bool:
        with suppress(BudgetError):
            profiles_of(tokens, layers or FEW)
            return True
        return False

    found = profiles_of(seqlen, layers)
    reach = longest(fits, STEP) if longest_sequence else None
    if picture is not None:
        limit = budget.in_bytes(found.plan.peak_before).memory
        draw_memory(found, limit, picture, f"{model.name}, {seqlen} tokens")
    if as_json:
        print_json({**asdict(found.plan), "longest_sequence": reach})
        return
    print(found.plan.explain())
    if reach is not None:
        print(f"longest sequence within {max_memory}: {reach} tokens")
    Console().print(_table(found))


def _memory(text: str) -> str | float | None:
    """A size as it is, bytes or a share of the unchunked peak as a number, None for nothing."""
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text or None


def _table(found: Profiles) -> Table:
    """The most bytes within each kind of module; layers that are alike in one row."""
    before, after = _by_module(found.before), _by_module(found.after)
    rows = [
        {
            "module": path or "the model",
            "as it is": f"{before[path] / MIB:.1f}",
            "in slices": f"{after[path] / MIB:.1f}" if path in after else "",
        }
        for path in sorted(before, key=before.__getitem__, reverse=True)[:ROWS]
    ]
    return table_of("live activations, MiB", rows, box=None)


def _by_module(profile: Sequence[tuple[str, int]]) -> dict[str, int]:
    most: dict[str, int] = {}
    for path, count in profile:
        kind = ".".join("*" if part.isdigit() else part for part in path.split("."))
        most[kind] = max(count, most.get(kind, 0))
    return most
