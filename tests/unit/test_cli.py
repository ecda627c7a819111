"""The console script: what it prints, its exit codes, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallelConfig
from wf_backends.bench_links import nearest_divisor
from wf_backends.cli import main
from wf_backends.comm import Communicator
from wf_backends.cost import FORWARD, Job, pass_cost
from wf_backends.placement import place, read_placed
from wf_backends.planner import all_plans
from wf_backends.plans import Request
from wf_backends.presets import load
from wf_backends.schedule import concentric, render, ring
from wf_backends.topology import KernelRate, from_dict

pytest.importorskip("typer", reason="the cli extra is not installed")
from wf_backends.commands.options import Model  # noqa: E402

SMALL = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--seqlen", "8192"]
TWO_HOSTS = str(Path(__file__).parents[2] / "configs/topologies/two_hosts.toml")


def run(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `wallfacer ARGS`."""
    monkeypatch.setattr(sys, "argv", ["wallfacer", *args])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture(name="wallfacer")
def _wallfacer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    return lambda *args: run(list(args), monkeypatch, capfd)


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
    some = 64 if "--documents" in near else 16
    assert told["reason"].split(". ")[1].startswith(f"{some} ranks stand for all 128")
    assert "counted message by message" in told["reason"]
    assert told["topology"]["hosts"] == 16
    assert all(plan["config"]["sequence_parallel_size"] == 128 for plan in told["plans"])
    code, out, _ = wallfacer("plan", *cluster, *near)
    assert code == 0 and "16 hosts x 8 ranks" in out
    assert json.loads(out[out.index("{") :]) == told["plans"][0]["config"]


def test_plan_counts_what_a_call_does(wallfacer) -> None:
    told = wallfacer("plan", "--ranks", "32", "--window", "512", "--seqlen", "262144", "--json")[1]
    assert "16 ranks stand for all 32" in json.loads(told)["reason"]


def test_plan_refuses_long_documents_on_more_ranks_than_it_counts(wallfacer) -> None:
    cluster = ["--topology", "h100-8x400g", "--ranks", "128", "--seqlen", "262144"]
    code, _, err = wallfacer("plan", *cluster, "--documents", "32768")
    assert code == 2 and "on 128 ranks" in err and "give shorter --documents" in err


def test_explain_prints_the_grid_and_the_timeline(wallfacer) -> None:
    code, out, _ = wallfacer("explain", "concentric:team_size=2", *SMALL, "--ranks", "8")
    assert code == 0
    assert render(concentric(8, 2)) in out
    assert "forward step 1" in out and "backward home" in out


def test_explain_takes_a_placement(wallfacer) -> None:
    route = "mesh:rows=2,cols=4,order=1-0,reverse=true"
    code, out, _ = wallfacer("explain", route, *SMALL, "--ranks", "8")
    words = {"name": "mesh", "rows": 2, "cols": 4, "order": [1, 0], "reverse": True}
    assert code == 0 and "mesh cols=4 rows=2, digits 1-0, reversed on 8 ranks" in out
    assert render(place(read_placed(words, 8), 8)) in out


def test_explain_counts_both_ways(wallfacer) -> None:
    args = [*SMALL, "--topology", TWO_HOSTS, "--ranks", "16", "--dtype", "float32"]
    out = wallfacer("explain", "ring:two_way=true", *args)[1]
    assert "ring, two ways on 16 ranks, hosts added to the file's: 2" in out
    job = Job(Model(8, 2, 64, 8192, dtype="float32").workload(), load(TWO_HOSTS).with_ranks(16))
    one, two = (pass_cost(job, ring(16), FORWARD, way).seconds for way in (False, True))
    assert f"forward: {1e3 * two:.4g} ms" in out and f"{1e3 * one:.4g} ms" not in out


@pytest.mark.parametrize(("args", "size"), [([], 8), (["--ranks", "0"], 64), (["--ranks", "4"], 4)])
def test_explain_takes_all_ranks_of_a_file(wallfacer, tmp_path: Path, args, size: int) -> None:
    assert f"ring on {size} ranks" in wallfacer("explain", "ring", *SMALL, *args)[1]
    path = tmp_path / "four.json"
    path.write_text(json.dumps(load("a100-4x-100gbe", 4).to_dict()))
    assert "ring on 4 ranks" in wallfacer("explain", "ring", *SMALL, "--topology", str(path))[1]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_explain_draws(wallfacer, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    code, out, _ = wallfacer(
        "explain", "mesh:rows=2,cols=4", "--topology", TWO_HOSTS, "--picture", str(path)
    )
    assert code == 0 and "drawn" in out
    magic = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(magic)


def test_doctor_finds_the_core_working(wallfacer) -> None:
    code, out, _ = wallfacer("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0
    for name in ("torch", "kernel reference", "threads", "gloo"):
        assert findings[name]["works"], findings[name]
    assert all(f["what"] for f in findings.values())
    assert wallfacer("doctor")[0] == 0


def test_what_others_wrote_is_no_markup(wallfacer, tmp_path: Path, capfd) -> None:
    from rich.console import Console

    from wf_backends.commands.bench import show
    from wf_backends.commands.doctor import Finding, table

    Console(width=200).print(table([Finding("x", False, "[/y]", "pip install 'wallfacer[cli]'")]))
    told = capfd.readouterr().out
    assert "'wallfacer[cli]'" in told and "[/y]" in told
    topology = replace(load(TWO_HOSTS), name="cl[/x]uster")
    (path := tmp_path / "odd.json").write_text(json.dumps(topology.to_dict()))
    assert "cl[/x]uster: 2 hosts" in wallfacer("plan", *SMALL, "--topology", str(path))[1]
    request = Request(topology, Model(8, 2, 64, 8192).workload())
    show(all_plans(request)[:1], [0.1], request, as_json=False)
    assert "cl[/x]uster: 8 ranks" in capfd.readouterr().out


def test_doctor_says_no_with_its_exit_code(wallfacer, monkeypatch: pytest.MonkeyPatch) -> None:
    from wf_backends.commands import doctor

    def broken() -> str:
        raise RuntimeError("no threads today")

    monkeypatch.setattr(doctor, "_threads", broken)
    code, out, _ = wallfacer("doctor")
    assert code == 1 and "NO" in out and "RuntimeError: no threads today" in out


def test_bench_runs_candidates_and_keeps_the_topology(wallfacer, tmp_path: Path) -> None:
    """One process alone: no links, but kernels, the cache and the table."""
    args = ["--cache-dir", str(tmp_path), "--seqlen", "512", "--repeats", "1", "--json"]
    code, out, _ = wallfacer("bench", *args)
    told = json.loads(out)
    assert code == 0
    assert [plan["config"]["sequence_parallel_size"] for plan in told["plans"]] == [1]
    assert all(plan["measured_s"] > 0 for plan in told["plans"])
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == told["topology"]
    assert json.loads(wallfacer("bench", *args)[1])["topology"] == told["topology"]


def test_bench_cuts_a_preset_to_the_job_and_predicts_by_a_known_rate(wallfacer) -> None:
    args = ["bench", "--seqlen", "256", "--repeats", "1", "--topology"]
    told = json.loads(wallfacer(*args, "one-host", "--kernel", "reference", "--json")[1])
    assert told["topology"]["ranks_per_host"] == 1 and told["topology"]["memory_gib"] == 8
    assert (told["rate_of"], told["fastest"]["kernel"]) == ("sdpa", "reference")
    code, out, _ = wallfacer(*args, "h100-8x400g", "--kernel", "reference")
    said = " ".join(out.split())
    assert code == 0 and "by the rate of flash: the topology has none of reference" in said


def test_bench_predicts_by_the_rate_of_the_kernel_named() -> None:
    from wf_backends.commands.bench import heading, priced

    topology = load(TWO_HOSTS)
    both = replace(topology, kernels=(*topology.kernels, ("reference", KernelRate(1e6, 1e6))))
    slow = Request(both, Model(8, 2, 64, 8192, kernel="reference").workload())
    assert priced(slow) == slow and "rate" not in heading(slow)
    assert priced(replace(slow, topology=topology)).workload.kernel == "sdpa"


def test_bench_writes_a_trace(wallfacer, tmp_path: Path) -> None:
    args = ["--cache-dir", str(tmp_path), "--seqlen", "256", "--repeats", "1"]
    path = tmp_path / "trace.json"
    code, _, _ = wallfacer("bench", *args, "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert code == 0 and {event["ph"] for event in events} == {"M", "X"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names and all("keys walk" in name or "queries walk" in name for name in names)
    code, _, said = wallfacer("bench", *args, "--trace", str(tmp_path / "trace.txt"))
    assert code == 2 and "--trace must end in .json" in said


def test_bench_compares_with_the_ring() -> None:
    from wf_backends.commands.bench import with_ring

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)
    chosen = with_ring(plans, request, 2)
    assert chosen[:2] == plans[:2] and len(chosen) == 3
    assert (chosen[2].degree, str(chosen[2].forward.placed)) == (1, "ring")
    assert str(chosen[2].backward.placed) == "ring" and chosen[2].moves == "keys"
    assert with_ring(chosen[2:], request, 1) == chosen[2:]


@pytest.mark.parametrize("share", [0.999, 1.0])
def test_bench_runs_nothing_over_the_memory(share: float) -> None:
    """Not even the ring, however few candidates are left."""
    from wf_backends.commands.bench import with_ring

    asked = Request(load("one-host", 4), Model(2, 2, 64, 8192).workload())
    ring = with_ring(all_plans(asked), asked, 2)[-1]
    request = replace(asked, memory_bytes=share * ring.cost.memory_bytes)
    chosen = with_ring(all_plans(request), request, 1000)
    assert all(plan.cost.memory_bytes <= request.memory_limit for plan in chosen)
    assert (ring.choice in [plan.choice for plan in chosen]) == (share == 1.0)
    assert 0 < len(chosen) < len(all_plans(request))
    none = replace(asked, memory_bytes=1.0)
    with pytest.raises(ValueError, match="no plan fits the memory limit"):
        with_ring(all_plans(none), none, 2)


def run_on(comm: Communicator, topology: dict) -> list[frozenset[str]]:
    """What the plans of `bench` send to trade heads for tokens, on ranks as threads."""
    from wf_backends.commands.bench import prepare

    model, found = Model(8, 8, 8, 256, dtype="float32"), []
    request = Request(from_dict(topology), model.workload())
    for plan in [p for p in all_plans(request) if not p.in_rank_order or p.degree > 1][:6]:
        comm.sent.clear()
        prepare(plan, model, comm, torch.device("cpu"))()
        found.append(frozenset(label for label in comm.sent if "ulysses" in label))
        assert bool(found[-1]) == (plan.degree > 1)
    return found


def test_bench_runs_placements_and_degrees_through_the_config() -> None:
    topology = load("a100-4x-100gbe", 4).to_dict()
    for results in run_threads(4, run_on, topology):
        assert len(results) == 6


def test_bench_says_what_was_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    from wf_backends.commands.bench import show

    request = Request(load(TWO_HOSTS), Model(8, 2, 64, 8192).workload())
    plans = all_plans(request)[:3]
    show(plans, [0.3, 0.1, 0.2], request, as_json=False)
    said = capsys.readouterr().out
    words = json.loads(said[said.index("{") :])
    assert words == plans[1].to_config(8, "zigzag")
    assert not SequenceParallelConfig.from_dict(words).leaves_open
    show(plans, [0.3, 0.1, 0.2], request, as_json=True)
    assert json.loads(capsys.readouterr().out)["fastest"] == words


def test_bench_links_says_where_its_answer_is_from(wallfacer, tmp_path: Path) -> None:
    args = ["bench-links", "--cache-dir", str(tmp_path / "cache")]
    code, out, err = wallfacer(*args)
    assert code == 0 and from_dict(json.loads(out)).size == 1 and "measured in" in err
    code, _, err = wallfacer(*args, "--out", str(tmp_path / "mine.json"))
    assert code == 0 and "from" in err
    assert json.loads((tmp_path / "mine.json").read_text()) == json.loads(out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "--topology", "h100-8x400"], "did you mean 'h100-8x400g'?"),
        (["plan", "--topology", "a100-4x-100gbe", "--ranks", "6"], "6 ranks do not fill hosts"),
        (["plan", "--memory-gib", "0.001"], "the closest, ulysses_degree"),
        (["plan", "--ulysses-degree", "3"], "no ulysses_degree of (3,)"),
        (["plan", "--kv-heads", "5"], "--kv-heads must divide --heads 32, got 5"),
        (["plan", "--seqlen", "0"], "--seqlen must be at least 1, got 0"),
        (["plan", "--seqlen", "100"], "too short for the zigzag layout on 64 ranks"),
        (["plan", "--top", "0"], "--top must be at least 1, got 0"),
        (["plan", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["plan", "--window", "-3"], "--window must be at least -1, got -3"),
        (["plan", "--exact-up-to", "-3"], "--exact-up-to must be at least 0, got -3"),
        (["plan", "--memory-gib", "nan"], "--memory-gib must be at least 0, got nan"),
        (["plan", "--memory-gib", "-1"], "--memory-gib must be at least 0, got -1"),
        (["plan", "--ranks", "-4"], "--ranks must be at least 0, got -4"),
        (["plan", "--layers", "-1"], "--layers must be at least 0, got -1"),
        (["plan", "--dtype", "bfloat"], "--dtype must be one of"),
        (["plan", "--layout", "zigzak"], "did you mean 'zigzag'?"),
        (["plan", "--layout", "document_zigzag"], "document_zigzag needs --documents"),
        (["explain", "ring", "--layout", "document_zigzag"], "which `wallfacer plan` takes"),
        (["plan", "--documents", "20000"], "--documents must be 1 to 16384, an eighth of --seqlen"),
        (["plan", "--documents", "-1"], "--documents must be 1 to 16384"),
        (["plan", "--kernel", "sdpa"], "has rates for ['flash'], got kernel 'sdpa'"),
        (["explain", "concentric:team_size=3"], "team_size must have a square that divides"),
        (["explain", "mesh:rows=two"], "--route must look like"),
        (["explain", "mesh:rows=2,cols=4,order=10"], "order must list every digit"),
        (["explain", "mesh:rows=2,rows=4,cols=2"], "--route gives 'rows' twice"),
        (["explain", "ring:reverse=yes"], "order=1-0,reverse=true, got 'ring:reverse=yes'"),
        (["explain", "rong"], "did you mean 'ring'?"),
        (["explain", "ring", "--moves", "both"], "--moves must be one of"),
        (["explain", "ring", "--picture", "a.bmp"], "--picture must end in one of"),
        (["explain", "ring", "--picture", "no/where/a.png"], "there is no folder no/where"),
        (["bench", "--kernel", "flahs"], "--kernel must be one of"),
        (["bench", "--top", "0"], "--top must be at least 1, got 0"),
        (["bench", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["bench", "--trace", "no/where/a.json"], "there is no folder no/where"),
        (["bench-links", "--out", "no/where/a.json"], "there is no folder no/where"),
        (
            ["bench", "--seqlen", "2000000", "--topology", "one-host"],
            "no plan fits the memory limit",
        ),
        (["bench", "--topology", TWO_HOSTS], "contradicts the job: it has 2 hosts x 4 ranks"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(wallfacer, args: list[str], message: str) -> None:
    code, _, err = wallfacer(*args)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    ("args", "ending"),
    [
        (["explain", "ring", "--picture"], ".svg"),
        (["bench", "--trace"], ".json"),
        (["bench-links", "--out"], ".json"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_any_work(
    wallfacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], ending: str
) -> None:
    from wf_backends import launch
    from wf_backends.commands import options

    monkeypatch.setattr(launch, "init", lambda: pytest.fail("work has begun"))
    (folder := tmp_path / f"folder{ending}").mkdir()
    code, out, err = wallfacer(*args, str(folder))
    assert (code, out) == (2, "") and f"{args[-1]} {folder} is a folder: name a file" in err
    monkeypatch.setattr(options.os, "access", lambda *_: False)
    code, out, err = wallfacer(*args, str(tmp_path / f"a{ending}"))
    assert (code, out) == (2, "") and "you may not write there" in err


def test_a_failing_disk_is_said_in_a_line(wallfacer, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = wallfacer("bench-links", "--fresh", "--out", str(tmp_path / "a.json"))
    assert code == 2 and "wallfacer: [Errno 28] No space left on device" in err


@pytest.mark.parametrize("command", ["plan", "explain", "bench", "bench-links", "doctor"])
def test_every_command_helps_with_an_example(wallfacer, command: str) -> None:
    code, out, _ = wallfacer(command, "--help")
    assert (
        code == 0
        and "Example" in out
        and f"wallfacer {command}" in out.replace("wf_backends.cli", "wallfacer")
    )


def test_no_command_shows_the_help(wallfacer) -> None:
    assert "bench-links" in wallfacer("--help")[1]


def test_a_missing_extra_is_named(wallfacer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("wf_backends.commands")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["wallfacer", "plan"])
    with pytest.raises(SystemExit, match=r"needs typer.*pip install 'wallfacer\[cli\]'"):
        main()


@pytest.mark.parametrize(
    ("value", "nics"), [(1.1, 1), (1.9, 2), (3.2, 4), (7.5, 8), (0.0, 1), (100, 8)]
)
def test_the_number_of_nics_is_a_divisor(value: float, nics: int) -> None:
    assert nearest_divisor(8, value) == nics
