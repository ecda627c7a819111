"""Every message that docs/troubleshooting.md quotes is one that the code gives."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.docs.pages import PAGES, ROOT

HOLE = "\0"  # a value, in a message of the code; "..." in the page
MESSAGES = [
    line.removeprefix("> ").strip()
    for line in PAGES["docs/troubleshooting.md"].splitlines()
    if line.startswith("> ")
]


@cache
def templates() -> list[str]:
    """All strings of the code, values left out."""
    paths = [*(ROOT / "wf_backends").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    return [_text(node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or HOLE for part in node.values)
    return ""


def stands_in(message: str, template: str) -> bool:
    """Whether the parts of a message between "..." come one after another in a template."""
    at = 0
    for part in message.split("..."):
        at = template.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def test_there_are_messages():
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_gives_this_message(message: str):
    assert len(message.replace("...", "")) > 15
    assert any(stands_in(message, template) for template in templates())
