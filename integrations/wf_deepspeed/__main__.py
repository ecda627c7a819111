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
    """Run the script named first, with the rest as its arguments.

    Before it may stand `--timeout=SECONDS`, how long ranks wait for each other.

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
    """The seconds of a `--timeout=` before the script, or the default; and the other arguments."""
    given = [word for word in arguments[:2] if word.startswith("--timeout=")]
    rest = [word for word in arguments if word not in given]
    return float(given[0].split("=")[1]) if given else DEFAULT_TIMEOUT_S, rest


def script_first(arguments: list[str]) -> list[str]:
    """The script, then its arguments: `deepspeed --module` puts its --local_rank before both."""
    given = [word for word in arguments[:1] if word.startswith("--local_rank=")]
    script = len(given)
    return [*arguments[script : script + 1], *given, *arguments[script + 1 :]]


if __name__ == "__main__":
    main(sys.argv[1:])
