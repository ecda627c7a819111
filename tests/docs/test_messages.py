"""Every message that docs/troubleshooting.md quotes is in the code."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.docs.pages import PAGES, ROOT

VALUE = "\0"  # stands for a value in a message of the code; "..." does so in the page
MESSAGES = [
    line.removeprefix("> ").strip()
    for line in PAGES["docs/troubleshooting.md"].splitlines()
    if line.startswith("> ")
]


@cache
def templates() -> set[str]:
    """All strings of the code, with VALUE in place of each value of an f-string."""
    paths = [*(ROOT / "wf_backends").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    return {_text(node) for path in paths for node in ast.walk(ast.parse(path.read_text()))}


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or VALUE for part in node.values)
    return ""


def matches(message: str, template: str) -> bool:
    """Whether the parts of a message between "..." come one after another in a template."""
    position = 0
    for part in message.split("..."):
        position = template.find(part.strip(), position)
        if position < 0:
            return False
        position += len(part.strip())
    return True


def test_the_page_quotes_messages():
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_code(message: str):
    assert len(message.replace("...", "")) > 15, "too short to identify a message"
    assert any(matches(message, template) for template in templates())
