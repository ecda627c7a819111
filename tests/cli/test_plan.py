"""`wallfacer plan`: the candidates, the reason, the block to paste."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.command_line import SMALL, TWO_HOSTS
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.topology import from_dict
from wf_backends.comm.protocol import Communicator
from wf_backends.comm.threads import run_threads
from wf_backends.planner.proxy import draw_documents

NAMED = ("Ring Attention", "Ulysses", "USP", "StarTrail", "all-gather")


def rows_of(out: str) -> list[list[str]]:
    """The cells of the table that start a row: further lines of a cell have no figures."""
    lines = [line for line in out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return [row for row in rows if row[1]]


def test_plan_prints_the_choice_the_reason_and_the_block(wallfacer) -> None:
    code, out, _ = wallfacer("plan", *SMALL, "--topology", TWO_HOSTS)
    assert code == 0
    assert "two hosts: 2 hosts x 4 ranks" in out
    told = json.loads(wallfacer("plan", *SMALL, "--topology", TWO_HOSTS, "--json")[1])
    said = " ".join(out[: out.index("two hosts")].split())
    assert said == told["reason"] + "."
    assert "of all plans within 2% of the fastest it sends the least" in said
    assert "x the ring's speed" in said and "counted message by message" in said
    words = json.loads(out[out.index("{") :])
    assert words == told["plans"][0]["config"]
    block = {"wallfacer": words}  # as in a DeepSpeed JSON
    config = SequenceParallelConfig.from_dict(block["wallfacer"])
    assert not config.leaves_open and config.to_dict() == words | {"kernel": "auto"}


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--ranks", "64", "--seqlen", "131072"],
        ["--ranks", "64", "--window", "512", "--seqlen", "262144"],
        ["--ranks", "6", "--topology", "one-host", "--full", "--top", "40"],
        ["--ranks", "4096", "--seqlen", "4194304", "--memory-gib", "40"],
    ],
)
def test_plan_fits_80_columns(wallfacer, more: list[str]) -> None:
    code, told, _ = wallfacer("plan", *SMALL, *more, columns=80)
    assert code == 0
    assert max(map(len, told.splitlines())) <= 80 and "…" not in told


def test_plan_shows_the_schemes_that_papers_name(wallfacer) -> None:
    out = wallfacer("plan", *SMALL, "--topology", TWO_HOSTS)[1]
    choice, *rows = rows_of(out)
    names = [row[0].split(",")[0].split(":")[0] for row in rows]
    shown = [next((i for i, name in enumerate(names) if name.startswith(one)), -1) for one in NAMED]
    assert shown == sorted(shown)
    ring, ulysses = rows[shown[0]], rows[shown[1]]
    assert ring[2] == "1.00" and float(choice[2]) > 0.98
    assert ulysses[0] == "Ulysses 8"
    apart = wallfacer("plan", *SMALL, "--topology", "one-host", "--ranks", "6")[1]
    assert "Ulysses: not on 6 ranks with 8 heads and 2 key heads" in " ".join(apart.split())
    assert "StarTrail: needs teams whose number squared divides 6" in " ".join(apart.split())


def test_rows_with_the_same_figures_are_one(wallfacer) -> None:
    args = ("plan", *SMALL, "--topology", "one-host", "--ranks", "4", "--top", "40")
    figures = [tuple(row[1:]) for row in rows_of(wallfacer(*args)[1])[5:]]
    assert (
        len(figures) == len(set(figures)) < len(json.loads(wallfacer(*args, "--json")[1])["plans"])
    )


def test_all_lists_every_plan_with_all_figures(wallfacer) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS, "--all")
    plans = json.loads(wallfacer(*args, "--json")[1])["plans"]
    out = wallfacer(*args)[1]
    assert "exposed ms" in out and len(rows_of(out)) == len(plans) + 1 > 20  # and the ring
    assert len({json.dumps(plan["config"]) for plan in plans}) == len(plans)


def job(comm: Communicator, seqlen: int, mask: dict[str, Any]) -> None:
    """One attention call, then another of the same kind."""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=comm.size), comm)
    rows = len(sp.positions(seqlen))
    q, k = (torch.zeros(1, rows, heads, 8) for heads in (4, 2))
    for _ in range(2):
        sp.attention(q, k, k, **mask)


@pytest.mark.parametrize(
    ("options", "mask", "seqlen"),
    [
        ([], {"causal": True}, 1024),
        (["--full"], {}, 1000),
        (["--window", "100"], {"causal": True, "window_size": (100, -1)}, 777),
        (["--documents", "128"], {"causal": True, "cu_seqlens": draw_documents(1024, 3)}, 1024),
    ],
)
def test_plan_and_a_job_say_the_same(wallfacer, caplog, options, mask, seqlen: int) -> None:
    run_threads(4, job, seqlen, mask)
    said = [one.getMessage() for one in caplog.records if "predicted" in one.getMessage()]
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32"]
    args = ["plan", "--topology", "one-host", "--ranks", "4", *shape, "--seqlen", str(seqlen)]
    told = json.loads(wallfacer(*args, *options, "--json")[1])["reason"]
    assert len(said) == 1 and said[0].startswith("attention by ")
    assert told.startswith(said[0].removeprefix("attention by ") + ". ")


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
def test_all_ends_with_the_ring_that_it_compares_with(wallfacer, degree: tuple[str, ...]) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS, *degree)
    last = rows_of(wallfacer(*args, "--all")[1])[-1] if degree else None
    assert last is None or [last[0], last[2]] == ["Ring Attention", "1.00"]
    told = json.loads(wallfacer(*args, "--json")[1])
    best, ring = told["plans"][0], told["ring"]
    assert ring["forward"] == ring["backward"] == "ring"
    assert ring["config"]["ulysses_degree"] == 1
    assert f"{ring['predicted_s'] / best['predicted_s']:.2f} x the ring's speed" in told["reason"]


def test_plan_through_a_pipe_cuts_no_word_off() -> None:
    small = [*SMALL, "--topology", "one-host", "--ranks", "4"]
    command = [sys.executable, "-m", "wf_backends.cli", "plan", *small]
    told = subprocess.run([*command, "--all"], capture_output=True, text=True, check=True).stdout
    assert "exposed ms" in told and "…" not in told


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
    title = " ".join(wallfacer(*args)[1].split())
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


def test_plan_prices_partial_results_in_16_bits_and_says_so_in_the_block(wallfacer) -> None:
    command = ("plan", *SMALL, "--topology", TWO_HOSTS, "--json")
    plain, narrow = (
        json.loads(wallfacer(*command, *more)[1])["plans"]
        for more in ((), ("--partials", "activation"))
    )
    assert narrow[0]["config"]["partials"] == "activation" and "partials" not in plain[0]["config"]
    assert narrow[0]["predicted_s"] < plain[0]["predicted_s"]
    code, _, err = wallfacer(*command, "--partials", "bfloat16")
    assert code and "--partials must be one of ['float32', 'activation'], got 'bfloat16'" in err


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
    assert told["reason"].split(". ")[2].startswith(f"{some} ranks stand for all 128")
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
