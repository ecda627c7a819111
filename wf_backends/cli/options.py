"""Options that several commands take, and what their words mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, log2, log10
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from wf_backends._validation import AUTO, nearest, one_of
from wf_backends.cluster import KERNEL_NAMES, PRESETS, Topology, load
from wf_backends.lowering import Shape
from wf_backends.planner import FEWEST, Workload, draw_documents
from wf_backends.schedule import (
    LAYOUTS,
    ORDER,
    REVERSE,
    ROUTES,
    TWO_WAY,
    Placed,
    check_layout_name,
    make_mask,
    read_placed,
)

ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
)

Heads = Annotated[int, typer.Option(help="Query heads of the model.")]
KvHeads = Annotated[int, typer.Option(help="Key and value heads; 0 = as many as heads.")]
HeadDim = Annotated[int, typer.Option(help="Size of one head.")]
Seqlen = Annotated[int, typer.Option(help="Tokens of the whole sequence.")]
Batch = Annotated[int, typer.Option(help="Sequences at once.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(ITEMSIZES)}.")]
Causal = Annotated[bool, typer.Option("--causal/--full", help="Whether no query sees later keys.")]
Window = Annotated[int, typer.Option(help="Tokens that a query sees to its left; -1 = all.")]
Layout = Annotated[str, typer.Option(help="zigzag, contiguous; with documents document_zigzag.")]
Documents = Annotated[
    int,
    typer.Option(
        help="Packed documents of drawn lengths, in the mean so many tokens long as a token sees "
        "them, to the next power of two of the sequence; 0 = one."
    ),
]
Kernel = Annotated[str, typer.Option(help="Whose rate counts; auto = the topology's first.")]
Cluster = Annotated[str, typer.Option(help="A preset's name, or a .json or .toml file.")]
Ranks = Annotated[int, typer.Option(help="Ranks of one sequence; 0 = all of the topology.")]
Layers = Annotated[
    int,
    typer.Option(help="Attention layers; with it, also plans that keep what the forward gathers."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where measured topologies are kept, by host list; ~/.cache/wallfacer."),
]


@dataclass(frozen=True, slots=True)
class Model:
    """What is computed, in the words of the command line."""

    heads: int
    kv_heads: int
    head_dim: int
    seqlen: int
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = True
    window: int = -1
    layout: str = "zigzag"
    kernel: str = "auto"
    documents: int = 0

    def workload(self) -> Workload:
        """The same as the planner takes it.

        Raises:
            ValueError: naming the option, its value and what would be right.
        """
        for name in ("heads", "head_dim", "seqlen", "batch"):
            check_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        check_least("--window", self.window, -1)
        kv_heads = self.kv_heads or self.heads
        if kv_heads < 1 or self.heads % kv_heads:
            raise ValueError(f"--kv-heads must divide --heads {self.heads}, got {kv_heads}")
        if self.dtype not in ITEMSIZES:
            known = list(ITEMSIZES)
            raise ValueError(
                f"--dtype must be one of {known}, got {self.dtype!r}{nearest(self.dtype, known)}"
            )
        one_of("--kernel", self.kernel, (AUTO, *KERNEL_NAMES))
        if LAYOUTS[check_layout_name(self.layout)].needs_documents and not self.documents:
            takes = "which `wallfacer plan` takes"
            raise ValueError(f"--layout {self.layout} needs --documents, {takes}")
        itemsize = ITEMSIZES[self.dtype]
        shape = Shape(self.batch, self.heads, kv_heads, self.head_dim, itemsize, max(4, itemsize))
        mask = make_mask(self.causal, (self.window, -1), self._borders())
        return Workload(shape, self.seqlen, mask.within(self.seqlen), self.layout, self.kernel)

    def _borders(self) -> tuple[int, ...] | None:
        """Of the packed documents."""
        if not self.documents:
            return None
        most = self.seqlen >> FEWEST
        if not 1 <= self.documents <= most:
            raise ValueError(
                f"--documents must be 1 to {most}, a quarter of --seqlen, got {self.documents}: "
                "fewer documents are planned for as one"
            )
        return draw_documents(self.seqlen, round(log2(self.seqlen / self.documents)))


def check_least(option: str, value: float, least: int) -> None:
    """Nothing, if an option's number is at least `least`.

    Raises:
        ValueError: if it is not.
    """
    if not value >= least:  # nor is NaN
        raise ValueError(f"{option} must be at least {least}, got {value:g}")


def check_folder(option: str, path: Path | None) -> None:
    """Nothing, if a file can be written there, or none is wanted.

    Raises:
        ValueError: if not, so that nobody works for nothing first.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file, which may be in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: you may not write there; name another file")


def milliseconds(seconds: float) -> str:
    """Four digits of them, however many there are, and none beyond a tenth of a microsecond."""
    value = 1e3 * seconds
    whole = floor(log10(value)) if value else 3
    return f"{value:,.{min(4, max(0, 3 - whole))}f}"


def console_for(table: Table) -> Console:
    """The terminal; where there is none (a pipe, a file), one that is wide enough for the table."""
    console = Console()
    if console.is_terminal:
        return console
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    return Console(width=max(needed, console.width))


def cluster(name: str, ranks: int) -> Topology:
    """The topology called `name` for `ranks` ranks (0: as it is), with more hosts if need be.

    The preset of one host is one host of any number of ranks.
    """
    check_least("--ranks", ranks, 0)
    topology = load(name)
    if name in PRESETS and topology.hosts == 1 and ranks:
        return replace(topology, ranks_per_host=ranks)
    return topology.with_ranks(ranks) if ranks else topology


def hosts_added(name: str, topology: Topology) -> int:
    """Hosts that a topology has beyond those of its file; a preset is for any number of hosts."""
    return 0 if name in PRESETS else max(0, topology.hosts - load(name).hosts)


def added_words(count: int) -> str:
    """What to say of hosts that nobody measured."""
    return f", hosts added to the file's: {count}" if count else ""


def keeping(layers: int) -> dict[str, Any]:
    """What a Request says of `layers`; 0 = everything is gathered again.

    Raises:
        ValueError: if it is negative.
    """
    check_least("--layers", layers, 0)
    return {"keeps": (False, True), "layers": layers} if layers else {}


def parse_route(text: str, size: int) -> Placed:
    """A route from "ring" or "mesh:rows=2,cols=4,order=1-0,reverse=true", if it fits `size` ranks.

    Raises:
        ValueError: if it is no such text, or the route does not fit.
    """
    name, _, rest = text.partition(":")
    route: dict[str, Any] = {"name": name}
    for pair in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in route:
            raise ValueError(f"--route gives {key!r} twice, got {text!r}")
        if re.fullmatch(r"\d+", value) and key != ORDER:
            route[key] = int(value)
        elif re.fullmatch(r"\d+(-\d+)*", value) and key == ORDER:
            route[key] = [int(digit) for digit in value.split("-")]
        elif value in ("true", "false") and key in (REVERSE, TWO_WAY):
            route[key] = value == "true"
        else:
            raise ValueError(
                f"--route must look like ring, mesh:rows=2,cols=4 or "
                f"mesh:rows=2,cols=4,order=1-0,reverse=true, got {text!r}; routes: {list(ROUTES)}"
            )
    return read_placed(route, size)
