"""Code blocks that need no ranks: JSON and TOML pass the real readers, commands exist.

Python blocks run in test_blocks_processes.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks, inline
from wf_backends import SequenceParallelConfig
from wf_backends.cluster import load

LANGUAGES = ("python", "json", "toml", "sh", "text")
LAUNCHERS = ("mpirun", "torchrun", "srun", "deepspeed")
FREE = (".", "apt-get", "cd", "git", "pre-commit", "COMMAND")  # nothing of ours
SHAPED = ("benchmarks/shaped_hosts.sh", "tests/slurm_hosts.sh")  # two arguments, then a command


def by_name(*languages: str) -> Any:
    return pytest.mark.parametrize("block", blocks(*languages), ids=lambda block: block.name)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page: str):
    fences = re.findall(r"^ *```(\w*)$", PAGES[page], re.MULTILINE)
    assert all(language in LANGUAGES for language in fences[::2]), fences
    assert not any(fences[1::2]), "a block is not closed"
    found = [block for block in blocks(*LANGUAGES) if block.page == page]
    assert len(found) == len(fences) // 2, "a block is indented"


@by_name("python")
def test_python_parses(block: Block):
    ast.parse(block.text)


@by_name("json")
def test_json_is_what_its_reader_takes(block: Block, tmp_path: Path):
    words = json.loads(block.text)
    if "colossalai" in words:
        _read_colossalai(words, tmp_path)
    elif "parallelism" in words:
        _read_torch(words, tmp_path)
    elif "wallfacer" in words:
        _read_deepspeed(words)
    else:
        SequenceParallelConfig.from_dict(words)


def _read_colossalai(words: dict[str, Any], folder: Path) -> None:
    pytest.importorskip("colossalai", reason="ColossalAI is not installed")
    from wf_colossalai.config import load as load_file
    from wf_colossalai.config import sequence_parallel_config

    path = folder / "config.json"
    path.write_text(json.dumps(words))
    SequenceParallelConfig.from_dict(sequence_parallel_config(load_file(path)))


def _read_torch(words: dict[str, Any], folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from engine_torch import _read_config
    finally:
        sys.path.pop(0)
    path = folder / "config.json"
    path.write_text(json.dumps(words))
    SequenceParallelConfig.from_dict(_read_config(str(path))["wallfacer"])


def _read_deepspeed(words: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from wf_deepspeed import read_block

    assert read_block(words) is not None


@by_name("toml")
def test_a_topology_is_read(block: Block, tmp_path: Path):
    tomllib.loads(block.text)
    path = tmp_path / "topology.toml"
    path.write_text(block.text)
    assert load(str(path)).size


@by_name("sh")
def test_commands_are_there(block: Block):
    for line in block.text.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            check_command(shlex.split(command, comments=True))


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_are_there(page: str):
    heads = ("python", "wallfacer", "pytest", "make", "pip", *LAUNCHERS, *SHAPED)
    for code in inline(page):
        if code.split()[0] in heads and " " in code and not code.endswith("..."):
            check_command(shlex.split(code))


def check_command(words: list[str]) -> None:
    """Its program, files, extras, targets and options exist."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words or words[0] in FREE:
        return
    if words[0] in SHAPED:
        assert (ROOT / words[0]).exists()
        return check_command(words[3:])
    head, rest = Path(words[0]).name, words[1:]
    if head in LAUNCHERS:
        return check_command(_launched(head, rest))
    checks = {
        "make": _check_make,
        "pip": _check_pip,
        "pytest": _check_pytest,
        "python": _check_python,
        "wallfacer": _check_wallfacer,
    }
    head = re.sub(r"3(\.\d+)?$", "", head)
    assert head in checks, f"{words}: no command of ours"
    checks[head](rest)


def _launched(launcher: str, words: list[str]) -> list[str]:
    """The command of each rank: what stands behind the launcher's own options."""
    module = False
    while words and words[0].startswith("-"):
        if words[0] in ("-m", "--module"):
            module, words = True, words[1:]
            break
        alone = "=" in words[0] or words[0] in ("--allow-run-as-root", "--oversubscribe")
        words = words[1:] if alone else words[2:]
    if launcher in ("torchrun", "deepspeed"):
        return ["python", "-m", *words] if module else ["python", *words]
    return words


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), words


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
    assert {name for names in named for name in names.split(",")} <= {
        *extras["optional-dependencies"],
        "NAME",
    }, words


def _check_pytest(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if "/" in word), words


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] == "wf_backends.cli":
            return _check_wallfacer(words[2:])
        assert words[1] == "venv" or importlib.util.find_spec(words[1].partition(".")[0]), words
        return None
    script = words[0]
    if "/" not in script:  # the reader's own
        return None
    assert (ROOT / script).exists(), words
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert given <= _options(script), f"{script} has no {given - _options(script)}"
    files = [word for word in words[1:] if word.startswith(("configs/", "examples/"))]
    assert all((ROOT / word).exists() for word in files), words
    return None


@cache
def _options(script: str) -> set[str]:
    """Options that the script, or a module beside it, has an argument for."""
    found: set[str] = set()
    for path in (ROOT / script).parent.glob("*.py"):
        found |= set(re.findall(r'"(--[\w-]+)"', path.read_text()))
    return found


def _check_wallfacer(words: list[str]) -> None:
    pytest.importorskip("typer", reason="the command line is not installed")
    import typer

    from wf_backends.cli.app import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("wallfacer", [], resilient_parsing=True)
    if not words or words[0].startswith("-"):
        return
    command = group.get_command(context, words[0])
    assert command is not None, f"wallfacer has no command {words[0]}"
    options = {
        o for parameter in command.params for o in (*parameter.opts, *parameter.secondary_opts)
    }
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
    assert given <= options | {"--help"}, f"wallfacer {words[0]} has no {given - options}"
