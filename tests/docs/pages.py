"""The README, CONTRIBUTING and the pages of docs/: their code blocks, inline code and links.

A comment above a code block says how it is tested:

    <!-- test: given model dataset -->   variables that the block uses; run_blocks.py defines them
    <!-- test: continues -->             runs after the previous block, with its variables
    <!-- test: file ds.json -->          is a file of that name, which other blocks of the page read
    <!-- test: not run: REASON -->       is parsed, and its names are looked up, but it does not run
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
        """page:line"""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        return self.test.removeprefix("file ") if self.test.startswith("file ") else None

    @property
    def given(self) -> list[str]:
        """The variables that the block uses and does not define."""
        return self.test.split()[1:] if self.test.startswith("given ") else []

    @property
    def runs(self) -> bool:
        return not self.test.startswith("not run")


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages."""
    return [
        Block(page, text[: match.start()].count("\n") + 1, match[2], match[3], match[1] or "")
        for page, text in PAGES.items()
        for match in FENCE.finditer(text)
        if match[2] in languages
    ]


def without_blocks(text: str) -> str:
    """The prose of a page."""
    return FENCE.sub("", text)


def inline(page: str) -> list[str]:
    """The inline code of a page, in backticks."""
    return INLINE.findall(without_blocks(PAGES[page]))
