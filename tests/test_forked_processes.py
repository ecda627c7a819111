"""Forked ranks behave as new processes: output, exit codes, signals; none outlives its client."""

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


def test_a_fork_has_the_folder_environment_arguments_and_stdin_of_its_client(
    tmp_path: Path,
) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['RANK'], sys.argv, input())"
    environ = os.environ | {"RANK": "7"}
    done = run("-c", code, "argument", cwd=tmp_path, env=environ, input="a line\n")
    assert done.stdout == f"{tmp_path} 7 ['-c', 'argument'] a line\n", done.stderr


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.path[0], sys.argv, __name__)")
    assert run(str(script), "1").stdout == f"{tmp_path} {[str(script), '1']} __main__\n"
    assert run("-m", "json.tool", input="[1]").stdout == "[\n    1\n]\n"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_client_ends_with_the_exit_code_of_its_fork(code: str, returncode: int) -> None:
    done = run("-c", code)
    assert done.returncode == returncode
    assert ("ZeroDivisionError" in done.stderr) == ("/" in code)


def test_forks_have_the_imported_modules_and_different_random_seeds() -> None:
    code = "import sys; print('numpy' in sys.modules); import numpy, random; "
    code += "print(random.random(), numpy.random.rand())"
    outputs = {run("-c", code).stdout for _ in range(3)}
    assert len(outputs) == 3 and all(output.startswith("True\n") for output in outputs)


def test_the_fork_of_a_killed_client_is_killed() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = [*forked.python("numpy"), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        fork = int(client.stdout.readline())
        os.kill(fork, 0)  # it exists
        client.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{fork}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{fork}").exists()
