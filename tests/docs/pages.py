"""The README and the pages of docs/, and what they hold: code blocks, inline code, links.

A comment above a code block says how it is tested:

    <!-- test: given model dataset -->   names that the reader has; run_blocks.py makes them
    <!-- test: continues -->             goes on where the block before ended
    <!-- test: file ds.json -->          a file of that name, which other blocks of the page use
    <!-- test: not run: REASON -->       only parsed, and its names looked up
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
}
FENCE = re.compile(r"(?:^<!-- test: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    text: str
    test: str

    @property
    def name(self) -> str:
        """Where it stands: page:line."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it is, for the other blocks of its page."""
        return self.test.removeprefix("file ") if self.test.startswith("file ") else None

    @property
    def given(self) -> list[str]:
        """Names that the reader is taken to have."""
        return self.test.split()[1:] if self.test.startswith("given ") else []

    @property
    def runs(self) -> bool:
        """Whether it can run here."""
        return not self.test.startswith("not run")


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages."""
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[2], found[3], found[1] or "")
        for page, text in PAGES.items()
        for found in FENCE.finditer(text)
        if found[2] in languages
    ]


def without_blocks(text: str) -> str:
    """The prose of a page."""
    return FENCE.sub("", text)


def inline(page: str) -> list[str]:
    """What stands in backticks in the prose of a page."""
    return INLINE.findall(without_blocks(PAGES[page]))
