"""How a transformer of diffusers is split: where its tokens are cut, and which modules attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What wrappers call the module inside: `torch.compile(block)`, `checkpoint_wrapper`, FSDP1."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Arguments of a module of which a rank keeps only its rows, before the module runs."""

    module: str
    """Path of the module in the model; "*" stands for any index, "" for the model itself."""
    streams: tuple[tuple[str, ...], ...]
    """For each stream (text, image): the arguments that hold its rows. Streams are in the order in
    which attention concatenates them. "name.1" is the second item of a tuple. None is skipped."""
    dims: tuple[int, ...] = (-2, -2)
    """The dimension of the rows, for each stream."""
    reuses_layout: bool = False
    """Whether its only stream is the last stream of the previous cut, and gets the same layout."""
    kept: str = ""
    """An argument that only tells how long its stream is: it stays whole."""
    joint_mask: str = ""
    """A mask of text and image in one, (..., tokens of both): it tells how long a stream of text
    before `streams` is. It is true everywhere (`Family.text_masks`), and taken out."""
    ndim: int = 0
    """An argument of fewer dimensions, or of one row, is for all tokens, and stays whole."""


def cut(module: str, *streams: str, **options: Any) -> Cut:
    """A `Cut`; each stream is the names of its arguments, "a b"."""
    return Cut(module, tuple(tuple(names.split()) for names in streams), **options)


@dataclass(frozen=True, slots=True)
class Family:
    """How one class of models is split over ranks."""

    attention: tuple[str, ...]
    """Paths of the self-attention modules, in which every token attends to every token."""
    cuts: tuple[Cut, ...]
    gathered: str = "proj_out"
    """Path of the module whose output is gathered: the rows of the last stream, (b, s, width), from
    which the model makes its sample. Of a tuple it is the first item."""
    gathered_inside: tuple[str, ...] = ()
    """Paths of modules inside the blocks whose output every rank needs whole: gathered too."""
    whole: tuple[str, ...] = ()
    """Paths of modules between the blocks that need all rows: every rank computes all of them, and
    takes its own of the output."""
    refused: tuple[tuple[str, str], ...] = ()
    """(name, description) of arguments of the model that cannot be cut."""
    text_masks: tuple[tuple[str, str], ...] = ()
    """(mask, text) arguments of the model: padding at the end of a text is taken off. Where both
    are the same, rows of zeros are padding."""
    lists: tuple[str, ...] = ()
    """Arguments that are lists with an item for each sample."""
    shared: tuple[str, ...] = ()
    """How the names begin of arguments whose first dimension is not that of samples."""
    masks_are_true: bool = False
    """Whether its blocks make a mask even of texts without padding: it is ignored."""
    refused_config: tuple[str, Any] = ("", None)
    """(name, value) of a setting of the model that is not supported."""
    last_stream_attends_alone: bool = False
    """Whether some modules attend over the last stream alone, or it is cut alone in every block: it
    has a layout of its own length."""
    allows_empty_stream: bool = False
    """Whether its blocks run without tokens of a stream: a rank may get none of a short text."""


def find_modules(model: nn.Module, path: str) -> list[Any]:
    """Return the modules at `path`; "*" stands for any index, "-1" for the last, "" for the model.

    `WRAPPERS` are no parts of a path: a module inside of them is found, not they.
    """
    pattern, found = path.split("."), dict[tuple[str, ...], nn.Module]()
    for name, module in model.named_modules():
        parts = tuple(part for part in name.split(".") if part not in WRAPPERS)
        if len(parts) == len(pattern) and all(
            p in (part, "*", "-1") for p, part in zip(pattern, parts, strict=True)
        ):
            found[parts] = module
    modules = list(found.values())
    return modules[-1:] if "-1" in pattern else modules
