"""Why a model cannot be captured, or run on fake tensors: in the error, and not in torch's logs."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from torch import nn

NOT_MODELS = {"torch", "sympy", "wf_backends"} | sys.stdlib_module_names  # packages


class CaptureError(ValueError):
    """A model that `torch.export` cannot capture; says why and, where known, in which module."""


@contextmanager
def as_capture_errors(model: nn.Module, what: str) -> Iterator[None]:
    """Inside, every error becomes a `CaptureError` that says why the model cannot do `what`: torch
    raises any kind for what it cannot trace, and modules do where they get only some rows. What
    they print is not shown."""
    try:
        with no_log():
            yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{type(model).__name__} cannot {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of an error, and where in the model's code it arose."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    first = f"{name}: {error}" if isinstance(error, KeyError) else lines[0] if lines else name
    places = [line for line in lines if line.startswith("File ") or "model code" in line]
    where = places[0] if places else _line_of_model(error)
    return f"{first} {where}".rstrip()


def _line_of_model(error: Exception) -> str:
    """The last line of the error's traceback that is in none of the `NOT_MODELS`."""
    frames = traceback.walk_tb(error.__traceback__)
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    places = zip(packages, traceback.extract_tb(error.__traceback__), strict=True)
    for package, place in reversed(list(places)):
        if package not in NOT_MODELS and Path(place.filename).exists():
            return f'File "{place.filename}", line {place.lineno}, in {place.name}: {place.line}'
    return ""


@contextmanager
def no_log() -> Iterator[None]:
    """Keeps torch from printing why a trace or a run on fake tensors fails; the error says it."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled_level)
