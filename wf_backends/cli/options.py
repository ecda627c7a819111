"""Options that several commands take, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import inf, log2
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer import Option

from wf_backends._validation import AUTO, one_of
from wf_backends.cli.readers import read_model
from wf_backends.cluster import KERNEL_NAMES, cache_folder
from wf_backends.config import read_mask
from wf_backends.lowering import ACTIVATION, FLOAT32, PARTIALS, Shape
from wf_backends.planner import MIN_HALVINGS, Workload, draw_documents
from wf_backends.schedule import LAYOUTS, make_mask

ITEMSIZES = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8})
MOST = MappingProxyType({"heads": 2**16, "head_dim": 2**16, "seqlen": 2**40, "batch": 2**31})
KEYWORD = Parameter.KEYWORD_ONLY

TopologyName = Annotated[str, Option(help="A preset's name, or a .json or .toml file.")]
Layers = Annotated[
    int, Option(help="Attention layers; with it, also plans that keep what the forward gathers.")
]
CacheDir = Annotated[
    Path | None, Option(help="Where what was measured is kept, by hosts; ~/.cache/wallfacer.")
]
Fresh = Annotated[bool, Option(help="Measure again, and keep nothing.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def take_shape(ctx: typer.Context, name: str) -> str:
    """Put the shape of the model `name` in the place of the defaults; what is said counts more."""
    if name:
        ctx.default_map = {**(ctx.default_map or {}), **read_model(name)}
    return name


@dataclass(frozen=True, slots=True)
class Model:
    """What is computed: the options that describe it."""

    heads: Annotated[int, Option(help="Query heads of the model.")] = 32
    kv_heads: Annotated[int, Option(help="Key and value heads; 0 = as many as heads.")] = 0
    head_dim: Annotated[int, Option(help="Size of one head.")] = 128
    seqlen: Annotated[int, Option(help="Tokens of the whole sequence.")] = 131072
    batch: Annotated[int, Option(help="Sequences at once.")] = 1
    dtype: Annotated[str, Option(help=f"One of {', '.join(ITEMSIZES)}.")] = "bfloat16"
    causal: Annotated[bool, Option("--causal/--full", help="Whether later keys are hidden.")] = True
    window: Annotated[int, Option(help="Tokens that a query sees to its left; -1 = all.")] = -1
    layout: Annotated[
        str, Option(help="zigzag, contiguous; document_zigzag of documents, balanced of --mask.")
    ] = "zigzag"
    kernel: Annotated[str, Option(help="Whose rate counts; auto = the topology's first.")] = "auto"
    partials: Annotated[str, Option(help="Partial results: float32 or activation.")] = FLOAT32
    value_dim: Annotated[int, Option(help="Size of one head's values; 0 = head_dim.")] = 0
    documents: Annotated[
        int, Option(help="Tokens of a packed document, in the mean as a token sees it; 0 = one.")
    ] = 0
    mask: Annotated[
        Path | None, Option(help="JSON of a mask in slices, in place of --causal and --window.")
    ] = None
    name: Annotated[
        str,
        Option(
            "--model",
            callback=take_shape,
            is_eager=True,
            help="A Hugging Face model, by folder, config.json or name, whose heads count if none "
            "are given.",
        ),
    ] = ""

    def workload(self) -> Workload:
        """The same as the planner takes it; ValueError names the option that is wrong."""
        for name, most in MOST.items():
            check_range(1, most, **{name: getattr(self, name)})
        check_range(-1, window=self.window)
        check_range(0, MOST["head_dim"], value_dim=self.value_dim)
        kv_heads = self.kv_heads or self.heads
        if kv_heads < 1 or self.heads % kv_heads:
            raise ValueError(f"--kv-heads must divide --heads {self.heads}, got {kv_heads}")
        one_of("--dtype", self.dtype, tuple(ITEMSIZES))
        one_of("--kernel", self.kernel, (AUTO, *KERNEL_NAMES))
        self._check_layout()
        one_of("--partials", self.partials, PARTIALS)
        itemsize = ITEMSIZES[self.dtype]
        partial = itemsize if self.partials == ACTIVATION else None
        sizes = itemsize, max(4, itemsize), self.value_dim or None, partial
        shape = Shape(self.batch, self.heads, kv_heads, self.head_dim, *sizes)
        mask = make_mask(**self.mask_words(), cu_seqlens=self._borders())
        mask.check_lengths(self.seqlen, self.seqlen)
        return Workload(shape, self.seqlen, mask.within(self.seqlen), self.layout, self.kernel)

    def mask_words(self) -> dict[str, Any]:
        """The mask but for its documents, as arguments of sp.attention."""
        if self.mask is None:
            return {"causal": self.causal, "window_size": (self.window, -1)}
        beside = [f"--window {self.window}"] if self.window != -1 else []
        beside += [f"--documents {self.documents}"] if self.documents else []
        beside += [] if self.causal else ["--full"]
        if beside:
            raise ValueError(f"--mask says all of the mask: leave {beside[0]} out")
        return read_mask("--mask", self.mask)

    def _check_layout(self) -> None:
        one_of("layout", self.layout, tuple(LAYOUTS))
        kind = LAYOUTS[self.layout]
        if kind.needs_documents and not self.documents:
            raise ValueError(
                f"--layout {self.layout} needs --documents, which `wallfacer plan` takes"
            )
        if kind.needs_slices and self.mask is None:
            raise ValueError(f"--layout {self.layout} needs --mask, a file with the mask's slices")

    def _borders(self) -> tuple[int, ...] | None:
        """cu_seqlens of the packed documents; None without documents."""
        if not self.documents:
            return None
        most = self.seqlen >> MIN_HALVINGS
        if not 1 <= self.documents <= most:
            raise ValueError(
                f"--documents must be 1 to {most}, a quarter of --seqlen, got {self.documents}: "
                "fewer documents are planned for as one"
            )
        return draw_documents(self.seqlen, round(log2(self.seqlen / self.documents)))


def describes_model(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, in place of its argument `model`, the options of `Model`.

    With other defaults where they are given; `documents` is an option only if it is among them.
    """
    *options, named = (
        one.replace(kind=KEYWORD, default=defaults.get(one.name, one.default))
        for one in signature(Model, eval_str=True).parameters.values()
        if one.name in defaults or one.name != "documents"
    )
    options.insert(0, named)  # --model is the first

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            command(model=Model(**{one.name: given.pop(one.name) for one in options}), **given)

        own = signature(command, eval_str=True).parameters.values()
        taken = options + [one.replace(kind=KEYWORD) for one in own if one.name != "model"]
        call.__signature__ = Signature(taken)  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


def check_range(least: int, most: float = inf, **options: float) -> None:
    """Refuse a number below `least` or above `most`; options by the names of their arguments."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if not value >= least:  # so NaN is refused too
            raise ValueError(f"{option} must be at least {least}, got {value:g}")
        if value > most:
            raise ValueError(f"{option} must be at most {most}, got {value}")


def check_file(option: str, path: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Refuse, before any work, a file with none of the endings or that cannot be written."""
    if path is None:
        return
    if endings and path.suffix not in endings:
        known = f"one of {list(endings)}" if len(endings) > 1 else "".join(endings)
        raise ValueError(f"{option} must end in {known}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file, which may be in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: you may not write there; name another file")


def folder_of(cache_dir: Path | None) -> Path:
    """That of --cache-dir, or the usual one."""
    return cache_dir or cache_folder(os.environ)


def added_words(count: int) -> str:
    """What a title says of hosts that the topology's file does not have."""
    return f", hosts added to the file's: {count}" if count else ""


def keeping(layers: int) -> dict[str, Any]:
    """The arguments of a Request for --layers; 0 = the backward gathers everything again."""
    check_range(0, layers=layers)
    return {"keeps": (False, True), "layers": layers} if layers else {}
