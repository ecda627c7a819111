"""`wallfacer plan`: the table of plans, the reason for the fastest, and its config to paste."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import SMALL, TWO_HOSTS
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.presets import load
from wf_backends.cluster.topology import from_dict
from wf_backends.comm.protocol import Communicator
from wf_backends.comm.threads import run_threads
from wf_backends.planner.proxy import draw_documents

PUBLISHED = ("Ring Attention", "Ulysses", "USP", "StarTrail", "all-gather")


def rows_of(out: str) -> list[list[str]]:
    """The rows of the printed table, the first line of each: further lines have no figures."""
    lines = [line for line in out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return [row for row in rows if row[1]]


def test_plan_prints_the_reason_and_the_config_of_the_fastest(wallfacer, wallfacer_json) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS)
    code, out, _ = wallfacer(*args)
    result = wallfacer_json(*args)
    assert code == 0
    assert "two hosts: 2 hosts x 4 ranks" in out
    reason = " ".join(out[: out.index("two hosts")].split())
    assert reason == result["reason"] + "."
    assert "of all plans within 2% of the fastest it sends the least" in reason
    assert "x the ring's speed" in reason and "counted message by message" in reason
    printed = json.loads(out[out.index("{") :])
    assert printed == result["plans"][0]["config"]
    config = SequenceParallelConfig.from_dict(printed)
    assert not config.leaves_open and config.to_dict() == printed | {"kernel": "auto"}


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
    code, out, _ = wallfacer("plan", *SMALL, *more, columns=80)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_plan_lists_the_published_schemes_below_the_fastest(wallfacer) -> None:
    fastest, *rows = rows_of(wallfacer("plan", *SMALL, "--topology", TWO_HOSTS)[1])
    schemes = [row[0].split(",")[0].split(":")[0] for row in rows]
    positions = [
        next(i for i, scheme in enumerate(schemes) if scheme.startswith(name)) for name in PUBLISHED
    ]
    assert positions == sorted(positions)
    ring, ulysses = rows[positions[0]], rows[positions[1]]
    assert ring[2] == "1.00" and float(fastest[2]) > 0.98  # x the ring's speed
    assert ulysses[0] == "Ulysses 8"


def test_plan_says_why_a_published_scheme_is_not_listed(wallfacer) -> None:
    out = " ".join(wallfacer("plan", *SMALL, "--topology", "one-host", "--ranks", "6")[1].split())
    assert "Ulysses: not on 6 ranks with 8 heads and 2 key heads" in out
    assert "StarTrail: needs teams whose number squared divides 6" in out


def test_plans_with_equal_figures_share_a_row(wallfacer, wallfacer_json) -> None:
    args = ("plan", *SMALL, "--topology", "one-host", "--ranks", "4", "--top", "40")
    rows = rows_of(wallfacer(*args)[1])[5:]  # below the fastest, which is USP, and 4 published ones
    figures = [tuple(row[1:]) for row in rows]
    assert len(figures) == len(set(figures)) < len(wallfacer_json(*args)["plans"])


def test_all_lists_every_plan_with_all_figures(wallfacer, wallfacer_json) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS, "--all")
    plans = wallfacer_json(*args)["plans"]
    out = wallfacer(*args)[1]
    assert "exposed ms" in out and len(rows_of(out)) == len(plans) + 1 > 20  # and the ring
    assert len({json.dumps(plan["config"]) for plan in plans}) == len(plans)


def attend_twice(comm: Communicator, seqlen: int, mask: dict[str, Any]) -> None:
    """Two equal attention calls of a job: the first is planned."""
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
def test_plan_predicts_the_plan_that_a_job_logs(
    wallfacer_json, caplog, options, mask, seqlen: int
) -> None:
    run_threads(4, attend_twice, seqlen, mask)
    logged = [record.getMessage() for record in caplog.records]
    logged = [message for message in logged if "predicted" in message]
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32"]
    args = ["plan", "--topology", "one-host", "--ranks", "4", *shape, "--seqlen", str(seqlen)]
    reason = wallfacer_json(*args, *options)["reason"]
    assert len(logged) == 1 and logged[0].startswith("attention by ")
    assert reason.startswith(logged[0].removeprefix("attention by ") + ". ")


def test_plan_as_json_gives_configs_that_can_be_read(wallfacer_json) -> None:
    result = wallfacer_json("plan", *SMALL, "--topology", TWO_HOSTS, "--top", "3")
    assert len(result["plans"]) == 3
    times = [plan["predicted_s"] for plan in result["plans"]]
    assert times == pytest.approx(sorted(times), rel=0.01)  # of nearly equal ones, fewest bytes
    assert from_dict(result["topology"]).name == "two hosts"
    for plan in result["plans"]:
        assert SequenceParallelConfig.from_dict(plan["config"]).sequence_parallel_size == 8
        assert plan["predicted_s"] == pytest.approx(plan["compute_s"] + plan["exposed_s"])


@pytest.mark.parametrize("degree", ((), ("--ulysses-degree", "2")))
def test_plan_compares_the_fastest_with_the_ring(wallfacer_json, degree: tuple[str, ...]) -> None:
    result = wallfacer_json("plan", *SMALL, "--topology", TWO_HOSTS, *degree)
    fastest, ring = result["plans"][0], result["ring"]
    assert ring["forward"] == ring["backward"] == "ring"
    assert ring["config"]["ulysses_degree"] == 1
    speedup = ring["predicted_s"] / fastest["predicted_s"]
    assert f"{speedup:.2f} x the ring's speed" in result["reason"]


def test_all_ends_with_the_ring_if_the_options_exclude_it(wallfacer) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS, "--ulysses-degree", "2", "--all")
    last = rows_of(wallfacer(*args)[1])[-1]
    assert (last[0], last[2]) == ("Ring Attention", "1.00")


def test_plan_through_a_pipe_cuts_no_word_off() -> None:
    args = ["plan", *SMALL, "--topology", "one-host", "--ranks", "4", "--all"]
    command = [sys.executable, "-m", "wf_backends.cli", *args]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "exposed ms" in out and "…" not in out


@pytest.mark.parametrize(
    ("options", "recommends"),
    [
        ((), False),
        (("--window", "100"), True),
        (("--window", "100", "--layout", "contiguous"), False),
    ],
)
def test_plan_recommends_the_contiguous_layout_for_a_window(
    wallfacer_json, options: tuple[str, ...], recommends: bool
) -> None:
    reason = wallfacer_json("plan", *SMALL, *options, "--topology", TWO_HOSTS)["reason"]
    assert ("add --layout contiguous" in reason) == recommends


def test_a_file_of_more_ranks_than_a_config_takes_is_refused(wallfacer, tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text(json.dumps(load(TWO_HOSTS).to_dict() | {"hosts": 20_000}))
    code, _, err = wallfacer("plan", "--topology", str(path), "--seqlen", "1000000")
    assert code == 2 and "--ranks must be at most 65536, got 80000" in err


@pytest.mark.parametrize(
    ("topology", "ranks", "hosts", "added"),
    [
        ("one-host", "12", 1, 0),
        ("h100-8x400g", "128", 16, 0),
        (TWO_HOSTS, "4", 1, 0),
        (TWO_HOSTS, "16", 4, 2),
    ],
)
def test_plan_says_how_many_hosts_it_added_to_a_file(
    wallfacer, wallfacer_json, topology, ranks, hosts, added
) -> None:
    """A preset stands for any number of hosts: none are added to it."""
    args = ["plan", *SMALL, "--topology", topology, "--ranks", ranks, "--exact-up-to", "0"]
    result = wallfacer_json(*args)
    assert (result["topology"]["hosts"], result["hosts_added"]) == (hosts, added)
    assert result["topology"]["memory_gib"] < 100  # of a rank
    out = " ".join(wallfacer(*args)[1].split())
    assert (f"hosts added to the file's: {added}" in out) == (added > 0)


@pytest.mark.parametrize(
    ("more", "sends"), [(["--ranks", "1"], False), (["--window", "0"], False), ([], True)]
)
def test_the_reason_mentions_transfer_time_only_if_ranks_send(wallfacer, more, sends: bool) -> None:
    out = wallfacer("plan", *SMALL, "--ranks", "8", *more)[1]
    assert ("of the transfer time" in " ".join(out.split())) == sends


def test_the_config_names_the_kernel_of_the_option(wallfacer, wallfacer_json) -> None:
    args = ["plan", *SMALL, "--topology", TWO_HOSTS, "--kernel", "sdpa"]
    config = wallfacer_json(*args)["plans"][0]["config"]
    out = wallfacer(*args)[1]
    assert config["kernel"] == "sdpa" and json.loads(out[out.index("{") :]) == config


def test_partial_results_in_16_bits_cost_less_and_are_in_the_config(
    wallfacer, wallfacer_json
) -> None:
    args = ("plan", *SMALL, "--topology", TWO_HOSTS)
    default = wallfacer_json(*args)["plans"][0]
    narrow = wallfacer_json(*args, "--partials", "activation")["plans"][0]
    assert narrow["config"]["partials"] == "activation" and "partials" not in default["config"]
    assert narrow["predicted_s"] < default["predicted_s"]
    code, _, err = wallfacer(*args, "--partials", "bfloat16")
    assert code and "--partials must be one of ['float32', 'activation'], got 'bfloat16'" in err


def test_a_ulysses_degree_restricts_all_plans(wallfacer_json) -> None:
    plans = wallfacer_json("plan", *SMALL, "--ulysses-degree", "2")["plans"]
    assert {plan["config"]["ulysses_degree"] for plan in plans} == {2}


@pytest.mark.parametrize("ranks", ["4", "32"])
def test_plan_prices_short_documents(wallfacer_json, ranks: str) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", ranks, "--seqlen", "65536"]
    one_document = wallfacer_json("plan", *cluster)
    packed = wallfacer_json("plan", *cluster, "--documents", "1024", "--layout", "document_zigzag")
    fastest = packed["plans"][0]
    assert fastest["predicted_s"] < one_document["plans"][0]["predicted_s"] / 4
    assert "counted message by message" in packed["reason"]
    assert fastest["config"]["layout"] == "document_zigzag"
    assert not SequenceParallelConfig.from_dict(fastest["config"]).leaves_open


@pytest.mark.parametrize(
    ("option", "counted"), [(["--documents", "512"], 64), (["--window", "512"], 32)]
)
def test_plan_counts_the_messages_of_a_part_of_many_ranks(
    wallfacer, wallfacer_json, option: list[str], counted: int
) -> None:
    args = ["plan", "--topology", "h100-8x400g", "--ranks", "128", "--seqlen", "262144", *option]
    result = wallfacer_json(*args)
    assert result["reason"].split(". ")[2].startswith(f"{counted} ranks stand for all 128")
    assert "counted message by message" in result["reason"]
    assert result["topology"]["hosts"] == 16
    assert all(plan["config"]["sequence_parallel_size"] == 128 for plan in result["plans"])
    code, out, _ = wallfacer(*args)
    assert code == 0 and "16 hosts x 8 ranks" in out
    assert json.loads(out[out.index("{") :]) == result["plans"][0]["config"]


def test_with_a_window_32_ranks_stand_for_64(wallfacer_json) -> None:
    result = wallfacer_json("plan", "--ranks", "64", "--window", "512", "--seqlen", "262144")
    assert "32 ranks stand for all 64" in result["reason"]


def test_plan_refuses_long_documents_on_more_ranks_than_it_counts(wallfacer) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", "128", "--seqlen", "262144"]
    code, _, err = wallfacer("plan", *cluster, "--documents", "32768")
    assert code == 2 and "for 128 ranks" in err and "give shorter --documents" in err
