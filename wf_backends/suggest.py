"""What the user may have meant.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    close = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
