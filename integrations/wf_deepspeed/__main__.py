"""`python -m wf_deepspeed script.py ...`: run a script that calls deepspeed.initialize itself.

The script is not changed; the "wallfacer" block of its DeepSpeed JSON decides. `-m module` in place
of the script runs a module, as `python -m module` does. Either may be started by mpirun, torchrun
(`torchrun --nproc-per-node 4 -m wf_deepspeed train.py ...`) or the deepspeed launcher
(`deepspeed --module wf_deepspeed train.py ...`).
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from wf_backends import launch
from wf_backends._validation import seconds
from wf_backends.comm import DEFAULT_TIMEOUT_S
from wf_deepspeed.entry import start
from wf_deepspeed.unmodified import opened

USAGE = "python -m wf_deepspeed [--timeout=SECONDS] (script.py | -m module) [arguments]"
TIMEOUT, LOCAL_RANK = "--timeout=", "--local_rank="


def main(arguments: list[str]) -> None:
    """Run a script or a module: `arguments` are its path, or -m and its name; then its arguments.

    `--timeout=SECONDS` before them sets how long ranks wait for each other.
    """
    try:
        timeout, is_module, arguments = split(arguments)
    except ValueError as error:
        raise SystemExit(f"usage: {USAGE}; {error}") from None
    if not arguments or not exists(arguments[0], is_module):
        kind = "module" if is_module else "file"
        named = f"; there is no {kind} {arguments[0]!r}" if arguments else ""
        raise SystemExit(f"usage: {USAGE}{named}")
    sys.argv = arguments
    launch.init(timeout=timeout)
    start(timeout=timeout)
    with opened():
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")


def exists(name: str, is_module: bool) -> bool:
    """Whether there is a script, or a module, of this name."""
    if not is_module:
        return Path(name).is_file()
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def split(arguments: list[str]) -> tuple[float, bool, list[str]]:
    """(seconds of `--timeout=`, whether `-m` names a module; the script or module, its arguments).

    `deepspeed --module` puts --local_rank before them: it is an argument of the program.

    Raises:
        ValueError: for a `--timeout=` that is no number of seconds.
    """
    options = list(takewhile(lambda x: x.startswith((TIMEOUT, LOCAL_RANK)), arguments))
    program = arguments[len(options) :]
    timeouts = [x.removeprefix(TIMEOUT) for x in options if x.startswith(TIMEOUT)]
    timeout: Any = timeouts[-1] if timeouts else DEFAULT_TIMEOUT_S
    with suppress(ValueError):  # of a word, which the check names
        timeout = float(timeout)
    seconds("--timeout", timeout)
    local_rank = [x for x in options if x.startswith(LOCAL_RANK)]
    is_module = program[:1] == ["-m"]
    program = program[1:] if is_module else program
    return timeout, is_module, [*program[:1], *local_rank, *program[1:]]


if __name__ == "__main__":
    main(sys.argv[1:])
