"""The file of `--mask`: a mask in slices, as JSON with the three lists that attention takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wf_backends.planner import Workload
from wf_backends.schedule import SLICE_WORDS, make_layout, make_mask, slices_load

SHOWN = 12  # slices of a mask that are listed


def read_mask(path: Path) -> dict[str, Any]:
    """{"q_ranges": [[0, 64], ...], "k_ranges": [...], "attn_mask_types": ["full", ...]} of a file.

    Raises:
        ValueError: naming the file, if it cannot be read, holds other keys, or no mask.
    """
    try:
        words = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--mask {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested too deep
        raise ValueError(f"--mask {path} is not JSON: {error}") from None
    if not isinstance(words, dict) or set(words) != set(SLICE_WORDS):
        found = sorted(words) if isinstance(words, dict) else type(words).__name__
        raise ValueError(
            f"--mask {path} must be an object with the keys {', '.join(SLICE_WORDS)}, got {found}"
        )
    try:
        make_mask(**words)
    except ValueError as error:
        raise ValueError(f"--mask {path}: {error}") from None
    return words


def mask_lines(work: Workload, size: int) -> list[str]:
    """What `explain` says of a mask in slices, and of its cut for so many ranks."""
    slices = work.mask.slices or ()
    share = f"{work.scores / work.seqlen**2:.1%} of all pairs of {work.seqlen:,} tokens"
    more = [f"  and {len(slices) - SHOWN} more"] if len(slices) > SHOWN else []
    layout = make_layout(work.layout, size, work.seqlen, None, slices)
    excess = slices_load(slices, work.seqlen).unevenness(layout)
    return [
        f"mask: {len(slices)} slices, {share}",
        *(f"  {one}" for one in slices[:SHOWN]),
        *more,
        f"layout {work.layout}: the busiest rank has {excess:.1%} more than the mean, of the "
        "scores or of the tokens",
    ]
