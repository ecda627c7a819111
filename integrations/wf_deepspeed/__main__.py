"""`python -m wf_deepspeed script.py ...`: run a script that calls deepspeed.initialize itself.

The script is not changed; the "wallfacer" block of its DeepSpeed JSON decides. It may be started
by mpirun, torchrun (`torchrun --nproc-per-node 4 -m wf_deepspeed train.py ...`) or the deepspeed
launcher (`deepspeed --module wf_deepspeed train.py ...`).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from wf_backends import launch
from wf_backends.comm import DEFAULT_TIMEOUT_S
from wf_deepspeed.entry import start
from wf_deepspeed.unmodified import opened


def main(arguments: list[str]) -> None:
    """Run a script: `arguments` are its path and its arguments.

    `--timeout=SECONDS` before the path sets how long ranks wait for each other.

    Raises:
        SystemExit: with a usage line if there is no script.
    """
    timeout, arguments = take_timeout(arguments)
    arguments = script_first(arguments)
    if not arguments or not Path(arguments[0]).is_file():
        named = f"; there is no file {arguments[0]!r}" if arguments else ""
        raise SystemExit(
            f"usage: python -m wf_deepspeed [--timeout=SECONDS] script.py [arguments]{named}"
        )
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    launch.init(timeout=timeout)
    start(timeout=timeout)
    with opened():
        runpy.run_path(arguments[0], run_name="__main__")


def take_timeout(arguments: list[str]) -> tuple[float, list[str]]:
    """(seconds of a `--timeout=` before the script, or the default; the other arguments)."""
    options = [argument for argument in arguments[:2] if argument.startswith("--timeout=")]
    others = [argument for argument in arguments if argument not in options]
    return float(options[0].split("=")[1]) if options else DEFAULT_TIMEOUT_S, others


def script_first(arguments: list[str]) -> list[str]:
    """The script, then its arguments: `deepspeed --module` puts --local_rank before the script."""
    if arguments and arguments[0].startswith("--local_rank="):
        local_rank, *others = arguments
        return [*others[:1], local_rank, *others[1:]]
    return arguments


if __name__ == "__main__":
    main(sys.argv[1:])
