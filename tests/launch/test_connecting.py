"""Ranks that end or hang while a job's ranks connect are named on all others, in time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wf_backends.launch import connecting, rendezvous
from wf_backends.launch.environment import JobProcess


def error_of_connecting(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, make_group: Any = lambda *_: None
) -> str:
    """The error of rank 0 of 3, of which rank 2 has tried."""
    monkeypatch.setattr(connecting, "_make_group", make_group)
    monkeypatch.setattr(connecting, "GRACE_S", 1.0)  # a busy machine may pause a thread
    monkeypatch.setattr(connecting, "LAST_ERRORS_S", 0.1)
    store.set("tried 2", "")
    process = JobProcess("torchrun", 0, 3, 0, 3, "here", 1)
    with pytest.raises(RuntimeError) as error:
        connecting.connect("gloo", store, process, torch.device("cpu"), timeout=0.1)
    return str(error.value)


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch):
    message = error_of_connecting(monkeypatch, dist.HashStore())
    assert "rank 0 of 3 (torchrun) connected" in message and "ranks [1] did not" in message


def fail_to_connect(*_: Any) -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("make_group", (fail_to_connect, lambda *_: time.sleep(60)))
def test_gloos_error_and_its_wait_of_five_timeouts_end_by_the_name_of_the_silent_rank(
    monkeypatch: pytest.MonkeyPatch, make_group: Any
):
    store, start = dist.HashStore(), time.monotonic()
    message = error_of_connecting(monkeypatch, store, make_group)
    assert time.monotonic() - start < 10
    assert "for up to 0.1 s: ranks [1] did not, or have ended" in message
    assert message.endswith(store.get(connecting.END).decode())  # of which the others hear


def test_the_error_of_a_rank_that_could_not_connect_ends_the_wait_of_those_that_could(
    monkeypatch: pytest.MonkeyPatch,
):
    store = dist.HashStore()
    store.set(connecting.END, "Connection closed by peer")
    message = error_of_connecting(monkeypatch, store)
    assert message.endswith("ranks [1] did not, or have ended: Connection closed by peer")


class StoppedStore(dist.HashStore):
    """That of a rank 0 which was stopped: a TCPStore waits for its answers without end."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_a_rank_0_that_was_stopped_with_its_store_is_named(monkeypatch: pytest.MonkeyPatch):
    start = time.monotonic()
    message = error_of_connecting(monkeypatch, StoppedStore(), fail_to_connect)
    assert "ranks [0] did not, or have ended" in message
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.1)
    assert rendezvous._late_ranks(StoppedStore(), ["arrival of 0", "arrival of 1"]) == [0]
    assert time.monotonic() - start < 20
