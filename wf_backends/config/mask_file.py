"""A file with a mask in slices: JSON with the three lists that attention takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from wf_backends._validation import without_duplicates
from wf_backends.schedule import SLICE_ARGUMENTS, make_mask


def read_mask(option: str, path: Path) -> dict[str, Any]:
    """{"q_ranges": [[0, 64], ...], "k_ranges": [...], "attn_mask_types": ["full", ...]} of a file.

    Raises:
        ValueError: naming option and file, if it cannot be read, has other keys or is no mask.
    """
    try:
        content: object = json.loads(path.read_text(), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested too deep
        raise ValueError(f"{option} {path} is not JSON: {error}") from None
    kind = type(content).__name__
    arguments = cast(dict[str, Any], content) if isinstance(content, dict) else None
    if arguments is None or set(arguments) != set(SLICE_ARGUMENTS):
        got = kind if arguments is None else sorted(arguments)
        raise ValueError(
            f"{option} {path} must be an object with the keys {', '.join(SLICE_ARGUMENTS)}, "
            f"got {got}"
        )
    try:
        make_mask(**arguments)
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from None
    return arguments
