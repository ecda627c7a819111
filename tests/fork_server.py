"""The server of tests/forked.py: `python -m tests.fork_server LISTENER MODULE...`.

It imports the modules once. Then it forks for every connection: the fork takes over the client's
environment, folder, open files and arguments, and runs its script as `python` would. The server
sends the client the exit code. At the end of its stdin, it kills its forks and ends.
"""

from __future__ import annotations

import atexit
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
import threading
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
    """Forks, waits and kills. It has one thread: a fork would have no other."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        self.children: list[Child] = []

    def next_job(self) -> dict[str, Any]:
        """Serve until stdin ends. Returns only in a fork: the job that it is to run.

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
                    self.finish(key.data)

    def accept(self) -> dict[str, Any] | None:
        """Fork for the next client: the job in the fork, None in the server."""
        client, _ = self.listener.accept()
        header, files, _, _ = socket.recv_fds(client, 8, 3)
        message = client.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
        if not message:  # the client was killed before it sent anything
            client.close()
            return None
        pid = os.fork()
        if not pid:
            self.close_in_fork()
            return json.loads(message) | {"files": files}
        for file in files:
            os.close(file)
        child = Child(pid, os.pidfd_open(pid), client)
        self.children.append(child)
        for source in (child.pidfd, client):
            self.selector.register(source, selectors.EVENT_READ, child)
        return None

    def close_in_fork(self) -> None:
        """Close all files of the server except its stdin, which `take_over` replaces."""
        for child in self.children:
            child.client.close()
            os.close(child.pidfd)
        self.listener.close()
        self.selector.close()

    def finish(self, child: Child) -> None:
        """Kill a child whose client has gone, or send the client the exit code of its child."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            os.kill(child.pid, signal.SIGKILL)  # a client sends nothing more: it has closed
            _, status = os.waitpid(child.pid, 0)
        self.children.remove(child)
        for source in (child.pidfd, child.client):
            self.selector.unregister(source)
        os.close(child.pidfd)
        try:
            child.client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # the client has gone
        child.client.close()

    def end(self) -> None:
        """Kill all forks, remove the folder of the socket, and exit."""
        for child in list(self.children):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        shutil.rmtree(Path(self.listener.getsockname()).parent)
        sys.exit()


def take_over(job: dict[str, Any]) -> None:
    """In a fork: take the client's files, folder and environment, and new random seeds."""
    for number, file in enumerate(job["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environ"])
    random.seed()  # else all forks would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def set_batch_scheduling() -> None:
    """Threads that wake up do not preempt this process or its forks.

    While a preempted thread holds the lock of a gloo connection, gloo polls that connection in a
    loop: a sixth of a job's CPU time, on few cores.
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
    set_batch_scheduling()
    gc.disable()
    for module in modules:
        import_module(module)
    gc.enable()
    gc.freeze()  # a collection in a fork would write to the shared pages, and so copy them
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"importing {modules} started threads ({threads}), which no fork has")
    job = Server(socket.socket(fileno=listener)).next_job()
    take_over(job)
    try:
        run(job["argv"])
    except SystemExit as end:
        if end.code:
            raise
    leave()


def leave() -> None:
    """End a fork that has done its work.

    What `python` does, except that it frees no module: 0.7 s of CPU time, for those of DeepSpeed.
    """
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # as mpi4py does after everything else
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
