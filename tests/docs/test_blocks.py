"""Code blocks of the docs: Python parses, JSON and TOML pass our readers, commands exist.

test_blocks_processes.py runs the Python blocks.
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
UNCHECKED = (".", "apt-get", "cd", "git", "pre-commit", "COMMAND")  # programs of others
WRAPPERS = ("benchmarks/shaped_hosts.sh", "tests/slurm_hosts.sh")  # two arguments, then a command


def each_block(*languages: str) -> Any:
    """Parametrizes a test by the blocks in these languages."""
    return pytest.mark.parametrize("block", blocks(*languages), ids=lambda block: block.name)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language(page: str):
    fences = re.findall(r"^ *```(\w*)$", PAGES[page], re.MULTILINE)
    assert all(language in LANGUAGES for language in fences[::2]), fences
    assert not any(fences[1::2]), "a block is not closed"
    num_blocks = sum(block.page == page for block in blocks(*LANGUAGES))
    assert num_blocks == len(fences) // 2, "a block is indented"


@each_block("python")
def test_python_blocks_parse(block: Block):
    ast.parse(block.text)


@each_block("json")
def test_json_blocks_pass_their_reader(block: Block, tmp_path: Path):
    config = json.loads(block.text)
    if "colossalai" in config:
        _read_colossalai(config, tmp_path)
    elif "parallelism" in config:
        _read_torch(config, tmp_path)
    elif "wallfacer" in config:
        _read_deepspeed(config)
    else:
        SequenceParallelConfig.from_dict(config)


def _read_colossalai(config: dict[str, Any], folder: Path) -> None:
    pytest.importorskip("colossalai", reason="ColossalAI is not installed")
    from wf_colossalai.config import load as load_file
    from wf_colossalai.config import sequence_parallel_config

    path = folder / "config.json"
    path.write_text(json.dumps(config))
    SequenceParallelConfig.from_dict(sequence_parallel_config(load_file(path)))


def _read_torch(config: dict[str, Any], folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from engine_torch import _read_config
    finally:
        sys.path.pop(0)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    SequenceParallelConfig.from_dict(_read_config(str(path))["wallfacer"])


def _read_deepspeed(config: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from wf_deepspeed import read_block

    assert read_block(config) is not None


@each_block("toml")
def test_toml_blocks_are_topologies(block: Block, tmp_path: Path):
    tomllib.loads(block.text)
    path = tmp_path / "topology.toml"
    path.write_text(block.text)
    assert load(str(path)).size


@each_block("sh")
def test_commands_of_blocks_exist(block: Block):
    for line in block.text.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            check_command(shlex.split(command, comments=True))


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page: str):
    programs = ("python", "wallfacer", "pytest", "make", "pip", *LAUNCHERS, *WRAPPERS)
    for code in inline(page):
        if code.split()[0] in programs and " " in code and not code.endswith("..."):
            check_command(shlex.split(code))


def check_command(command: list[str]) -> None:
    """The program, files, extras, targets and options of a command exist."""
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):  # variables
        command = command[1:]
    if not command or command[0] in UNCHECKED:
        return
    if command[0] in WRAPPERS:
        assert (ROOT / command[0]).exists()
        return check_command(command[3:])
    program, args = Path(command[0]).name, command[1:]
    if program in LAUNCHERS:
        return check_command(_rank_command(program, args))
    checks = {
        "make": _check_make,
        "pip": _check_pip,
        "pytest": _check_pytest,
        "python": _check_python,
        "wallfacer": _check_wallfacer,
    }
    program = re.sub(r"3(\.\d+)?$", "", program)  # python3.11
    assert program in checks, f"{command}: an unknown program"
    checks[program](args)


def _rank_command(launcher: str, args: list[str]) -> list[str]:
    """The command of each rank, which follows the options of the launcher."""
    module = False
    while args and args[0].startswith("-"):
        if args[0] in ("-m", "--module"):
            module, args = True, args[1:]
            break
        has_no_value = "=" in args[0] or args[0] in ("--allow-run-as-root", "--oversubscribe")
        args = args[1:] if has_no_value else args[2:]
    if launcher in ("torchrun", "deepspeed"):
        return ["python", "-m", *args] if module else ["python", *args]
    return args


def _check_make(args: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {arg for arg in args if "=" not in arg} <= set(targets), args


def _check_pip(args: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = re.findall(r"\.\[([\w,]+)\]", " ".join(args))
    extras = {name for names in lists for name in names.split(",")}
    assert extras <= {*project["optional-dependencies"], "NAME"}, args


def _check_pytest(args: list[str]) -> None:
    assert all((ROOT / arg).exists() for arg in args if "/" in arg), args


def _check_python(args: list[str]) -> None:
    if args[0] == "-m":
        if args[1] == "wf_backends.cli":
            return _check_wallfacer(args[2:])
        assert args[1] == "venv" or importlib.util.find_spec(args[1].partition(".")[0]), args
        return None
    script = args[0]
    if "/" not in script:  # a script of the reader
        return None
    assert (ROOT / script).exists(), args
    options = {arg.partition("=")[0] for arg in args[1:] if arg.startswith("--")}
    assert options <= _options(script), f"{script} has no {options - _options(script)}"
    files = [arg for arg in args[1:] if arg.startswith(("configs/", "examples/"))]
    assert all((ROOT / arg).exists() for arg in files), args
    return None


@cache
def _options(script: str) -> set[str]:
    """The options in the source of the script and of the modules of its folder."""
    paths = (ROOT / script).parent.glob("*.py")
    return {option for path in paths for option in re.findall(r'"(--[\w-]+)"', path.read_text())}


def _check_wallfacer(args: list[str]) -> None:
    pytest.importorskip("typer", reason="the command line is not installed")
    import typer

    from wf_backends.cli.app import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("wallfacer", [], resilient_parsing=True)
    if not args or args[0].startswith("-"):
        return
    command = group.get_command(context, args[0])
    assert command is not None, f"wallfacer has no command {args[0]}"
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    options = {arg.partition("=")[0] for arg in args[1:] if arg.startswith("-")}
    assert options <= known | {"--help"}, f"wallfacer {args[0]} has no {options - known}"
