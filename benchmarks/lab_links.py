"""What the links of the lab carry, by plain sockets: is the network what was asked for?

    benchmarks/lab_hosts.sh 4 2 rank 40mbit python benchmarks/lab_links.py

Every rank runs it. A line for each pattern of flows, all started at once: Mbit/s of payload of the
slowest and the fastest flow, each over its own time, and of all until the last has ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from wf_backends import launch

Flow = tuple[int, int]  # from rank, to rank
PORT = 21000
WARM_UP = 0.2  # of a flow's bytes, not timed: the shaper's bursts and TCP's start
PIECE = 1 << 16


def main() -> None:
    job = launch.init()
    try:
        measure(job.rank, job.world_size)
    finally:
        job.close()


def measure(rank: int, size: int) -> None:
    hosts, nics = int(os.environ["LAB_HOSTS"]), os.environ["LAB_NICS"]
    rate = os.environ["LAB_RATE"]
    between, inside = int(rate.removesuffix("mbit")) * 125_000 * 2, 1 << 27  # bytes of a flow
    per = size // hosts
    if rank == 0:
        print(f"{hosts} hosts x {per} ranks, one NIC a {nics}, {rate} both ways")
        print(f"{'pattern':44}{'flows':>6}{'slowest':>9}{'fastest':>9}{'all':>9}  Mbit/s")
    for pattern, flows in patterns(hosts, per):
        crossing = any(a // per != b // per for a, b in flows)
        share = per if nics == "host" and len(flows) > 2 else 1
        num_bytes = between // share if crossing else inside
        dist.barrier()
        begin, end, got = run(rank, size, hosts, flows, num_bytes).unbind(1)
        each = got / (end - begin)
        together = got.sum() / (end.max() - begin.min())
        if rank == 0:
            print(f"{pattern:44}{len(flows):6}", end="")
            figures = (each.min(), each.max(), together)
            print("".join(f"{8e-6 * float(rate):9.1f}" for rate in figures))


def patterns(hosts: int, per: int) -> Iterator[tuple[str, list[Flow]]]:
    """Names and flows."""
    size = hosts * per
    yield "rank 0 to the next host", [(0, per)]
    yield "rank 0 and the next host, both ways", [(0, per), (per, 0)]
    yield "every rank to the next host", [(r, (r + per) % size) for r in range(size)]
    yield "the last host and the next one to rank 0", [(size - per, 0), (per, 0)]
    if per > 1:
        yield "rank 0 to rank 1, inside", [(0, 1)]
        yield "ranks 0 and 1, inside, both ways", [(0, 1), (1, 0)]
        around = [(r, r // per * per + (r + 1) % per) for r in range(size)]
        yield "every rank to the next inside", around


def run(rank: int, size: int, hosts: int, flows: list[Flow], num_bytes: int) -> torch.Tensor:
    """(flows, 3): begin, end in seconds of the machine's clock, and bytes, by the receivers."""
    found = torch.zeros(len(flows), 3, dtype=torch.float64)
    with ThreadPoolExecutor(2 * len(flows)) as pool, socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((address(rank, size, hosts), PORT + rank))
        door.listen()
        dist.barrier()
        sends = [
            pool.submit(send, (address(b, size, hosts), PORT + b), num_bytes)
            for a, b in flows
            if a == rank
        ]
        received: dict[int, Future[list[float]]] = {}
        for at, (_, b) in enumerate(flows):
            if b == rank:
                received[at] = pool.submit(receive, door.accept()[0], num_bytes)
        for at, future in received.items():
            found[at] = torch.tensor(future.result(), dtype=torch.float64)
        for future in sends:
            future.result()
    dist.all_reduce(found)
    return found


def address(rank: int, size: int, hosts: int) -> str:
    """The address of a rank in the lab."""
    at = rank if os.environ["LAB_NICS"] == "rank" else rank * hosts // size
    return f"10.78.0.{at + 1}"


def send(target: tuple[str, int], num_bytes: int) -> None:
    piece = bytes(PIECE)
    with socket.create_connection(target) as line:
        for _ in range(num_bytes // PIECE):
            line.sendall(piece)


def receive(line: socket.socket, num_bytes: int) -> list[float]:
    """Begin, end and bytes, without the warm-up."""
    buffer, got, num_bytes = bytearray(PIECE), 0, num_bytes // PIECE * PIECE
    begin, before = 0.0, 0
    with line:
        while got < num_bytes:
            got += line.recv_into(buffer)
            if not before and got > WARM_UP * num_bytes:
                begin, before = time.perf_counter(), got
    return [begin, time.perf_counter(), got - before]


if __name__ == "__main__":
    main()
