"""Forked ranks are processes as any: output, exit codes, signals, and none outlives its client."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import forked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks need Linux"),
]


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*forked.python("numpy"), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_a_fork_has_its_client_s_surroundings(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['RANK'], sys.argv, input())"
    surroundings = {"cwd": tmp_path, "env": os.environ | {"RANK": "7"}, "input": "said\n"}
    done = run("-c", code, "more", **surroundings)
    assert done.stdout == f"{tmp_path} 7 ['-c', 'more'] said\n", done.stderr


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.path[0], sys.argv, __name__)")
    assert run(str(script), "1").stdout == f"{tmp_path} {[str(script), '1']} __main__\n"
    assert run("-m", "json.tool", input="[1]").stdout == "[\n    1\n]\n"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_client_ends_as_its_fork_does(code: str, end: int) -> None:
    done = run("-c", code)
    assert done.returncode == end
    assert ("ZeroDivisionError" in done.stderr) == ("/" in code)


def test_forks_import_nothing_twice_and_draw_different_numbers() -> None:
    code = "import sys; print('numpy' in sys.modules); import numpy, random; "
    code += "print(random.random(), numpy.random.rand())"
    told = {run("-c", code).stdout for _ in range(3)}
    assert len(told) == 3 and all(text.startswith("True\n") for text in told)


def test_a_killed_client_takes_its_fork_with_it() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = [*forked.python("numpy"), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        fork = int(client.stdout.readline())
        os.kill(fork, 0)
        client.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{fork}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{fork}").exists()
