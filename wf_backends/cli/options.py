"""Options that several commands share, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
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
from wf_backends.launch import detect
from wf_backends.lowering import ACTIVATION, FLOAT32, PARTIALS, Shape
from wf_backends.planner import MIN_HALVINGS, Workload, draw_documents
from wf_backends.schedule import LAYOUTS, make_mask

ITEMSIZES = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8})
MAX_SIZES = MappingProxyType({"heads": 2**16, "head_dim": 2**16, "seqlen": 2**40, "batch": 2**31})
KEYWORD = Parameter.KEYWORD_ONLY

TopologyName = Annotated[str, Option(help="A preset's name, or a .json or .toml file.")]
Layers = Annotated[int, Option(help="Attention layers that may keep what the forward gathers.")]
CacheDir = Annotated[Path | None, Option(help="Folder of measurements; ~/.cache/wallfacer.")]
Fresh = Annotated[bool, Option(help="Measure again, and keep nothing.")]
PinWeights = Annotated[bool, Option(help="Pin the weights that are copied, not buffers.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def take_shape(ctx: typer.Context, name: str) -> str:
    """Make the shape of the model `name` the options' defaults; given options override it."""
    if name:
        ctx.default_map = {**(ctx.default_map or {}), **read_model(name)}
    return name


@dataclass(frozen=True, slots=True)
class Model:
    """The options that describe the attention call of a model."""

    heads: Annotated[int, Option(help="Query heads of the model.")] = 32
    kv_heads: Annotated[int, Option(help="Key and value heads; 0 = as many as heads.")] = 0
    head_dim: Annotated[int, Option(help="Size of one head.")] = 128
    seqlen: Annotated[int, Option(help="Tokens of the whole sequence.")] = 131072
    batch: Annotated[int, Option(help="Sequences at once.")] = 1
    dtype: Annotated[str, Option(help=f"One of {', '.join(ITEMSIZES)}.")] = "bfloat16"
    causal: Annotated[bool, Option("--causal/--full", help="Whether later keys are hidden.")] = True
    window: Annotated[int, Option(help="Tokens that a query sees to its left; -1 = all.")] = -1
    layout: Annotated[str, Option(help=f"One of {', '.join(LAYOUTS)}.")] = "zigzag"
    kernel: Annotated[str, Option(help="Its rate is used; auto = the topology's first.")] = "auto"
    partials: Annotated[str, Option(help="Partial results: float32 or activation.")] = FLOAT32
    value_dim: Annotated[int, Option(help="Size of one head's values; 0 = head_dim.")] = 0
    documents: Annotated[
        int, Option(help="Tokens of packed documents, on average over tokens; 0 = one document.")
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
            help="A Hugging Face model: folder, config.json or name. Its heads are the defaults.",
        ),
    ] = ""

    def workload(self) -> Workload:
        """The planner's workload; a ValueError names the option that is wrong."""
        for name, maximum in MAX_SIZES.items():
            check_range(1, maximum, **{name: getattr(self, name)})
        check_range(-1, window=self.window)
        check_range(0, MAX_SIZES["head_dim"], value_dim=self.value_dim)
        kv_heads = self.kv_heads or self.heads
        if kv_heads < 1 or self.heads % kv_heads:
            raise ValueError(f"--kv-heads must divide --heads {self.heads}, got {kv_heads}")
        one_of("--dtype", self.dtype, tuple(ITEMSIZES))
        one_of("--kernel", self.kernel, (AUTO, *KERNEL_NAMES))
        self._check_layout()
        one_of("--partials", self.partials, PARTIALS)
        itemsize = ITEMSIZES[self.dtype]
        partial_size = itemsize if self.partials == ACTIVATION else None
        sizes = itemsize, max(4, itemsize), self.value_dim or None, partial_size
        shape = Shape(self.batch, self.heads, kv_heads, self.head_dim, *sizes)
        mask = make_mask(**self.mask_arguments(), cu_seqlens=self._borders())
        mask.check_lengths(self.seqlen, self.seqlen)
        return Workload(shape, self.seqlen, mask.within(self.seqlen), self.layout, self.kernel)

    def mask_arguments(self) -> dict[str, Any]:
        """The mask without its documents, as arguments of sp.attention."""
        if self.mask is None:
            return {"causal": self.causal, "window_size": (self.window, -1)}
        others = [f"--window {self.window}"] if self.window != -1 else []
        others += [f"--documents {self.documents}"] if self.documents else []
        others += [] if self.causal else ["--full"]
        if others:
            raise ValueError(f"--mask already gives the whole mask: leave {others[0]} out")
        return read_mask("--mask", self.mask)

    def _check_layout(self) -> None:
        one_of("--layout", self.layout, tuple(LAYOUTS))
        layout = LAYOUTS[self.layout]
        if layout.needs_documents and not self.documents:
            raise ValueError(f"--layout {self.layout} needs --documents (of `wallfacer plan`)")
        if layout.needs_slices and self.mask is None:
            raise ValueError(f"--layout {self.layout} needs --mask, a file with the mask's slices")

    def _borders(self) -> tuple[int, ...] | None:
        """cu_seqlens (documents + 1,) of random documents; None without --documents."""
        if not self.documents:
            return None
        max_tokens = self.seqlen >> MIN_HALVINGS
        check_range(2**MIN_HALVINGS, seqlen=self.seqlen)  # of which a document is a quarter
        if not 1 <= self.documents <= max_tokens:
            raise ValueError(
                f"--documents must be 1 to {max_tokens}, a quarter of --seqlen, got "
                f"{self.documents}: longer documents are planned for like one document"
            )
        return draw_documents(self.seqlen, round(log2(self.seqlen / self.documents)))


def describes_model(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Model`, which it takes together as its argument `model`.

    `defaults` override those of `Model`; `documents` is an option only if it is among them.
    """
    *options, name_option = (
        parameter.replace(kind=KEYWORD, default=defaults.get(parameter.name, parameter.default))
        for parameter in signature(Model, eval_str=True).parameters.values()
        if parameter.name in defaults or parameter.name != "documents"
    )
    options.insert(0, name_option)  # --model is listed first

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**arguments: Any) -> None:
            sizes = {option.name: arguments.pop(option.name) for option in options}
            command(model=Model(**sizes), **arguments)

        parameters = signature(command, eval_str=True).parameters.values()
        others = [p.replace(kind=KEYWORD) for p in parameters if p.name != "model"]
        call.__signature__ = Signature(options + others)  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


def check_range(minimum: int, maximum: float = inf, **options: float) -> None:
    """Refuse a number out of range; keywords are the options' names, with _ for -."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if not value >= minimum:  # also true for NaN
            raise ValueError(f"{option} must be at least {minimum}, got {value}")
        if value > maximum:
            raise ValueError(f"{option} must be at most {maximum}, got {value}")


def check_file(option: str, path: Path | None, endings: tuple[str, ...]) -> None:
    """Refuse, before any work, a path that has none of the endings or cannot be written."""
    if path is None:
        return
    if path.suffix not in endings:
        expected = f"one of {list(endings)}" if len(endings) > 1 else "".join(endings)
        raise ValueError(f"{option} must end in {expected}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file, which may be in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: you may not write there; name another file")


def cache_folder_of(cache_dir: Path | None) -> Path:
    """That of --cache-dir, or the usual one."""
    return cache_dir or cache_folder(os.environ)


def launched_rank() -> int:
    """The rank that a launcher gave this process; 0 if none did, or if its variables are wrong."""
    with suppress(ValueError):
        process = detect(os.environ)
        return process.rank if process.launcher != "environment" else 0
    return 0


def added_hosts_note(count: int) -> str:
    """The end of a title if hosts were added to those of the topology's file."""
    return f", hosts added to the file's: {count}" if count else ""


def layer_arguments(layers: int) -> dict[str, Any]:
    """The arguments of a Request for --layers; 0: the backward gathers everything again."""
    check_range(0, layers=layers)
    return {"keeps": (False, True), "layers": layers} if layers else {}
