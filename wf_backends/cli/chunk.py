"""`wallfacer chunk`: the memory of a model's activations, without and with AutoChunk's slices."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from wf_backends._validation import positive
from wf_backends.autochunk import BudgetError, Profiles, Rates, longest, memory_profiles
from wf_backends.autochunk.graph import checked_budget
from wf_backends.cli.draw import Picture, draw_memory
from wf_backends.cli.options import AsJson, check_range
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.cli.tables import print_json, table_of

SKELETONS = "wallfacer.skeletons"  # entry points: a folder -> a model on fake tensors, its inputs
MAX_TOKENS = 2**29  # the elements of a mask, their square, fit in 64 bits
MIB = 1 << 20
MAX_ROWS = 12  # of the table
TOKEN_STEP = 1024  # the longest sequence is a multiple of it


def chunk(
    model: ModelFolder,
    seqlen: Annotated[int, Option(help="Tokens of a sequence.")],
    batch: Annotated[int, Option(help="Sequences.")] = 1,
    max_memory: Annotated[str, Option(help="For activations, such as 8GB.")] = "",
    max_slowdown: Annotated[float, Option(help="Share of time that slices may add.")] = 0.1,
    attention: Annotated[str, Option(help="sdpa or eager.")] = "sdpa",
    layers: Annotated[int, Option(help="Capture at most so many layers; 0: all.")] = 0,
    find_longest: Annotated[bool, Option("--longest", help="Find the longest --seqlen.")] = False,
    measure: Annotated[bool, Option("--measure", help="Measure this machine's rates.")] = False,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Find the parts of a model's forward pass to run slice by slice under a memory budget.

    Nothing is computed and no weights are read: this works for a model of any size on any machine.
    The result is the same on every machine, except with `--measure`. The picture shows the memory
    over the run.

    Example:

        wallfacer chunk --model ./llama --seqlen 65536 --max-memory 8GB
    """
    check_range(1, seqlen=seqlen, batch=batch)
    check_range(0, layers=layers)
    memory = _memory(max_memory)
    budget = checked_budget(memory, max_slowdown)
    if find_longest and not isinstance(budget.memory, int):
        raise ValueError("--longest needs --max-memory as a size, such as 8GB")

    limits: list[str] = []  # why lengths are too long, if it is not the budget; the shortest last

    def make_profiles(tokens: int, num_layers: int | None) -> Profiles:
        positive("--batch times --seqlen", batch * tokens, MAX_TOKENS)
        arguments = model, tokens, batch, attention, num_layers
        skeleton, inputs = call_reader(SKELETONS, "chunk", *arguments)
        return memory_profiles(skeleton, inputs, memory, max_slowdown, None if measure else Rates())

    def fits(tokens: int) -> bool:
        try:
            make_profiles(tokens, layers or None)  # the peak is that of one layer of some kind
            return True
        except ValueError as error:
            if not isinstance(error, BudgetError):
                limits.append(f"not {tokens} tokens: {error}")
            return False

    max_seqlen = longest(fits, TOKEN_STEP) if find_longest else None
    for reason in limits[-1:]:
        print(reason, file=sys.stderr)
    try:
        profiles = make_profiles(seqlen, layers)
    except BudgetError as error:
        if not max_seqlen:
            raise
        print(f"{seqlen} tokens: {error}\n{max_seqlen} tokens are shown instead.", file=sys.stderr)
        seqlen, profiles = max_seqlen, make_profiles(max_seqlen, layers)
    if picture is not None:
        limit = budget.in_bytes(profiles.plan.peak_before).memory
        draw_memory(profiles, limit, picture, f"{model.name}, {seqlen} tokens")
    if as_json:
        data = {"seqlen": seqlen, "longest_sequence": max_seqlen, "plan": asdict(profiles.plan)}
        return print_json(data)
    print(profiles.plan.explain())
    if max_seqlen is not None:
        tokens = max_seqlen or f"less than {TOKEN_STEP}"
        print(f"longest sequence within {max_memory}: {tokens} tokens")
    Console().print(_table(profiles))


def _memory(text: str) -> str | float | None:
    """A number (bytes, or a share of the unchunked peak), a size such as "8GB"; None if empty."""
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text or None


def _table(profiles: Profiles) -> Table:
    """The peak bytes within each module; equal modules of different layers share a row."""
    before, after = map(profiles.by_module, (profiles.before, profiles.after))
    rows = [
        {
            "module": path or "the model",
            "as it is": f"{before[path] / MIB:.1f}",
            "in slices": f"{after[path] / MIB:.1f}" if path in after else "",
        }
        for path in sorted(before, key=before.__getitem__, reverse=True)[:MAX_ROWS]
    ]
    return table_of("live activations, MiB", rows, box=None)
