"""The server of tests/forked.py: `python -m tests.fork_server LISTENER MODULE...`.

It imports the modules once. Then every connection is a process to fork: the fork takes over the
client's environment, folder, files and arguments, and runs its script as `python` would. The server
tells the client how it ended. It ends itself, with all that it forked, at the end of its stdin.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass
class Child:
    """A fork, and the connection to the client that it runs for."""

    pid: int
    pidfd: int
    client: socket.socket


class Server:
    """Forks, waits and kills; one thread, and none of the modules may have started another."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        self.children: list[Child] = []

    def next_job(self) -> dict[str, Any]:
        """Serve until the tests end; returns only in a fork, with what it is to run.

        Raises:
            SystemExit: in the server, once its stdin has ended.
        """
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    self.end()
                elif key.fileobj is self.listener:
                    job = self.accept()
                    if job is not None:
                        return job
                elif key.data in self.children:
                    self.look_after(key.data)

    def accept(self) -> dict[str, Any] | None:
        """Fork for the next client: the job in the fork, None in the server."""
        client, _ = self.listener.accept()
        header, files, _, _ = socket.recv_fds(client, 8, 3)
        message = client.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
        if not message:  # killed before it said anything
            client.close()
            return None
        pid = os.fork()
        if not pid:
            self.forget()
            return json.loads(message) | {"files": files}
        for file in files:
            os.close(file)
        child = Child(pid, os.pidfd_open(pid), client)
        self.children.append(child)
        for source in (child.pidfd, client):
            self.selector.register(source, selectors.EVENT_READ, child)
        return None

    def forget(self) -> None:
        """In a fork: nothing of the server stays open (but its stdin, which is taken over)."""
        for child in self.children:
            child.client.close()
            os.close(child.pidfd)
        self.listener.close()
        self.selector.close()

    def look_after(self, child: Child) -> None:
        """Kill a child whose client has gone; tell the client of one that has ended."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            os.kill(child.pid, signal.SIGKILL)  # the client never speaks: its connection is closed
            _, status = os.waitpid(child.pid, 0)
        self.children.remove(child)
        for source in (child.pidfd, child.client):
            self.selector.unregister(source)
        os.close(child.pidfd)
        try:
            child.client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # it has gone
        child.client.close()

    def end(self) -> None:
        """Nobody needs it any more: no fork stays, and no socket's folder."""
        for child in list(self.children):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        shutil.rmtree(Path(self.listener.getsockname()).parent)
        sys.exit()


def take_over(job: dict[str, Any]) -> None:
    """Become the process that the client stands for."""
    for number, file in enumerate(job["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environ"])
    random.seed()  # else all forks would draw the same
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def let_run_on() -> None:
    """Nobody who is woken takes the core from this process or a fork of it in the middle of a call.

    While a thread that lost its core holds the lock of one of gloo's connections, gloo asks the
    kernel for that connection's events in a loop: a sixth of a job's CPU time, on few cores.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run(argv: list[str]) -> None:
    """As `python *argv`: a script, -m module or -c code, and its arguments."""
    match argv:
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


def main(listener: int, modules: list[str]) -> None:
    let_run_on()
    gc.disable()
    for module in modules:
        import_module(module)
    gc.enable()
    gc.freeze()  # a fork copies a page that it writes to: no collector goes over what is here
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"importing {modules} started threads ({threads}), which no fork has")
    job = Server(socket.socket(fileno=listener)).next_job()
    take_over(job)
    run(job["argv"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
