"""Ranks that are forked from a process which has imported torch and the frameworks.

A new interpreter needs 5 to 10 s of CPU time to import torch, transformers and DeepSpeed.
`python forked.py SOCKET script.py arguments` replaces `python script.py arguments` under any
launcher: it sends its environment, folder and open files to the server of the socket
(tests/fork_server.py), whose fork runs the script, and ends with the fork's exit code. If it is
killed, the server kills the fork. It imports only the standard library, and so starts at once.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def python(*modules: str, **environ: str) -> tuple[str, ...]:
    """The start of a command that runs a script in a fork of a process that imported `modules`.

    The server starts at the first call and ends with this process. `environ` is added to the
    server's environment while it imports; a rank has the environment of its launcher.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        return (sys.executable,)
    folder = tempfile.mkdtemp()
    path = str(Path(folder, "socket"))
    paths = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    extra["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # the server may have one thread
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,  # the server ends when it closes
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            cwd=ROOT,
            env=os.environ | extra | environ,
        )

    atexit.register(server.communicate)
    return (sys.executable, "-I", "-S", __file__, path)


def main(path: str, argv: list[str]) -> int:
    """Run `argv` in a fork of the server; its exit code, negative for a signal."""
    job = {"argv": argv, "folder": os.getcwd(), "environ": dict(os.environ)}
    message = json.dumps(job).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(message).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(message)
        exit_code = server.recv(8)
    if not exit_code:
        sys.exit("the fork server has ended: see its stderr")
    return int(exit_code)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
