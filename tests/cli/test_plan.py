"""`wallfacer plan`: the candidates, the reason, the block to paste."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.command_line import SMALL, TWO_HOSTS
from wf_backends import SequenceParallelConfig
from wf_backends.cluster.topology import from_dict


def test_plan_prints_the_candidates_and_the_reason(wallfacer) -> None:
    code, out, _ = wallfacer("plan", *SMALL, "--topology", TWO_HOSTS, "--top", "4")
    assert code == 0
    assert "two hosts: 2 hosts x 4 ranks" in out
    reason = " ".join(out[out.index("Chosen") :].split())
    assert reason.startswith("Chosen: ulysses_degree") and "x the ring's speed" in reason
    assert "busiest NIC" in reason and "counted message by message" in reason
    best = json.loads(wallfacer("plan", *SMALL, "--topology", TWO_HOSTS, "--json")[1])["plans"][0]
    words = json.loads(out[out.index("{") :])
    assert words == best["config"]
    block = {"wallfacer": words}  # as in a DeepSpeed JSON
    config = SequenceParallelConfig.from_dict(block["wallfacer"])
    assert not config.leaves_open and config.to_dict() == words | {"kernel": "auto"}


def test_plan_as_json_gives_configs_that_work(wallfacer) -> None:
    code, out, _ = wallfacer("plan", *SMALL, "--topology", TWO_HOSTS, "--top", "3", "--json")
    told = json.loads(out)
    assert code == 0 and len(told["plans"]) == 3
    times = [plan["predicted_s"] for plan in told["plans"]]
    assert times == pytest.approx(sorted(times), rel=0.01)
    assert from_dict(told["topology"]).name == "two hosts"
    for plan in told["plans"]:
        assert SequenceParallelConfig.from_dict(plan["config"]).sequence_parallel_size == 8
        assert plan["predicted_s"] == pytest.approx(plan["compute_s"] + plan["exposed_s"])


@pytest.mark.parametrize("degree", ((), ("--ulysses-degree", "2")))
def test_plan_ends_with_the_ring_that_it_compares_with(wallfacer, degree: tuple[str, ...]) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS, "--top", "2", *degree)
    rows = [line.split("│") for line in wallfacer(*args)[1].splitlines() if line.startswith("│")]
    assert len(rows) == 3
    assert [cell.strip() for cell in rows[-1][2:9:6]] == ["1.00", "ring"]
    told = json.loads(wallfacer(*args, "--json")[1])
    best, ring = told["plans"][0], told["ring"]
    assert ring["forward"] == ring["backward"] == "ring"
    assert ring["config"]["ulysses_degree"] == 1
    assert f"{ring['predicted_s'] / best['predicted_s']:.2f} x the ring's speed" in told["reason"]


def test_plan_through_a_pipe_cuts_no_word_off() -> None:
    command = [sys.executable, "-m", "wf_backends.cli", "plan", *SMALL, "--topology", TWO_HOSTS]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "backward" in told and "…" not in told


def test_plan_says_when_a_window_wants_another_layout(wallfacer) -> None:
    told = [
        json.loads(wallfacer("plan", *SMALL, *more, "--topology", TWO_HOSTS, "--json")[1])
        for more in ((), ("--window", "100"), ("--window", "100", "--layout", "contiguous"))
    ]
    said = ["add --layout contiguous" in one["reason"] for one in told]
    assert said == [False, True, False]


@pytest.mark.parametrize(
    ("topology", "ranks", "hosts", "added"),
    [
        ("one-host", "12", 1, 0),
        ("h100-8x400g", "128", 16, 0),
        (TWO_HOSTS, "4", 1, 0),
        (TWO_HOSTS, "16", 4, 2),
    ],
)
def test_plan_says_which_hosts_it_made_up(wallfacer, topology, ranks, hosts, added) -> None:
    args = ["plan", *SMALL, "--topology", topology, "--ranks", ranks, "--exact-up-to", "0"]
    told = json.loads(wallfacer(*args, "--json")[1])
    assert (told["topology"]["hosts"], told["hosts_added"]) == (hosts, added)
    assert told["topology"]["memory_gib"] < 100
    title = " ".join(wallfacer(*args)[1].split("Chosen")[0].split())
    assert (f"hosts added to the file's: {added}" in title) == (added > 0)


@pytest.mark.parametrize(
    ("more", "sends"), [(["--ranks", "1"], False), (["--window", "0"], False), ([], True)]
)
def test_plan_speaks_of_transfers_where_there_are_any(wallfacer, more, sends: bool) -> None:
    out = wallfacer("plan", *SMALL, "--ranks", "8", *more)[1]
    assert ("of the transfer time" in " ".join(out.split())) == sends


def test_plan_puts_the_kernel_that_was_asked_for_into_the_block(wallfacer) -> None:
    args = ["plan", *SMALL, "--topology", TWO_HOSTS, "--kernel", "sdpa"]
    words = json.loads(wallfacer(*args, "--json")[1])["plans"][0]["config"]
    out = wallfacer(*args)[1]
    assert words["kernel"] == "sdpa" and json.loads(out[out.index("{") :]) == words


def test_plan_keeps_to_one_head_split(wallfacer) -> None:
    told = json.loads(wallfacer("plan", *SMALL, "--ulysses-degree", "2", "--json")[1])
    assert {plan["config"]["ulysses_degree"] for plan in told["plans"]} == {2}


@pytest.mark.parametrize("ranks", ["8", "32"])
def test_plan_counts_documents(wallfacer, ranks: str) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", ranks, "--seqlen", "65536", "--json"]
    packed = ["--documents", "1024", "--layout", "document_zigzag"]
    one, many = (json.loads(wallfacer("plan", *cluster, *more)[1]) for more in ([], packed))
    times = [plan["predicted_s"] for plan in many["plans"]]
    assert times[0] < one["plans"][0]["predicted_s"] / 4
    assert "counted message by message" in many["reason"]
    words = many["plans"][0]["config"]
    assert words["layout"] == "document_zigzag"
    assert not SequenceParallelConfig.from_dict(words).leaves_open


@pytest.mark.parametrize("near", [["--documents", "512"], ["--window", "512"]])
def test_plan_counts_a_part_of_many_ranks(wallfacer, near: list[str]) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", "128", "--seqlen", "262144"]
    told = json.loads(wallfacer("plan", *cluster, *near, "--json")[1])
    some = 64 if "--documents" in near else 32
    assert told["reason"].split(". ")[1].startswith(f"{some} ranks stand for all 128")
    assert "counted message by message" in told["reason"]
    assert told["topology"]["hosts"] == 16
    assert all(plan["config"]["sequence_parallel_size"] == 128 for plan in told["plans"])
    code, out, _ = wallfacer("plan", *cluster, *near)
    assert code == 0 and "16 hosts x 8 ranks" in out
    assert json.loads(out[out.index("{") :]) == told["plans"][0]["config"]


def test_plan_counts_what_a_call_does(wallfacer) -> None:
    told = wallfacer("plan", "--ranks", "64", "--window", "512", "--seqlen", "262144", "--json")[1]
    assert "32 ranks stand for all 64" in json.loads(told)["reason"]


def test_plan_refuses_long_documents_on_more_ranks_than_it_counts(wallfacer) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", "128", "--seqlen", "262144"]
    code, _, err = wallfacer("plan", *cluster, "--documents", "32768")
    assert code == 2 and "on 128 ranks" in err and "give shorter --documents" in err
