"""The console script: exit codes, help, messages about bad input, doctor and bench-links."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import SMALL, TWO_HOSTS
from wf_backends.cli import main
from wf_backends.cli.options import Model
from wf_backends.cli.tables import wide_console
from wf_backends.cluster.measure_links import nearest_divisor
from wf_backends.cluster.presets import load
from wf_backends.cluster.topology import from_dict
from wf_backends.kernels import ReferenceKernel
from wf_backends.planner.explanation import milliseconds
from wf_backends.planner.plan import Request
from wf_backends.planner.search import best_plan


def test_doctor_reports_that_the_core_works(wallfacer) -> None:
    code, out, _ = wallfacer("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0
    for name in ("torch", "kernel reference", "gloo"):
        assert findings[name]["works"], findings[name]
    assert all(finding["what"] for finding in findings.values())
    assert wallfacer("doctor")[0] == 0


def test_brackets_of_a_finding_are_not_read_as_markup(wallfacer, monkeypatch) -> None:
    from wf_backends.cli import doctor
    from wf_backends.cluster import Finding

    finding = Finding("x", False, "[/y]", "pip install 'wallfacer[cli]'")
    monkeypatch.setattr(doctor, "check_up", lambda: [finding])
    out = wallfacer("doctor")[1]
    assert "'wallfacer[cli]'" in out and "[/y]" in out


def test_brackets_of_a_topology_s_name_are_not_read_as_markup(
    wallfacer, tmp_path: Path, capfd
) -> None:
    from wf_backends.cli.bench import show

    topology = replace(load(TWO_HOSTS), ranks_per_host=1, name="cl[/x]uster")
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(topology.to_dict()))
    assert "cl[/x]uster: 2 hosts" in wallfacer("plan", *SMALL, "--topology", str(path))[1]
    request = Request(topology, Model(8, 2, 64, 8192).workload())
    show([best_plan(request)], [0.1], request, as_json=False)
    assert "cl[/x]uster: 2 ranks" in capfd.readouterr().out


def test_doctor_exits_with_1_if_a_part_fails(wallfacer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no einsum")

    monkeypatch.setattr(ReferenceKernel, "forward", broken)
    code, out, _ = wallfacer("doctor")
    assert code == 1 and "NO" in out and "RuntimeError: no einsum" in out


def test_only_rank_0_runs_a_command_of_one_process(wallfacer, monkeypatch) -> None:
    for name, value in {"SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert wallfacer("plan", *SMALL) == (0, "", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert "Ring Attention" in wallfacer("plan", *SMALL)[1]
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")  # left from another job
    assert "Ring Attention" in wallfacer("plan", *SMALL)[1]


def test_doctor_lists_on_another_rank_only_what_is_broken(wallfacer, monkeypatch) -> None:
    from wf_backends.cli import doctor
    from wf_backends.cluster import Finding

    findings = [Finding("torch", False, "none", needed=True), Finding("MPI", False, "none")]
    monkeypatch.setattr(doctor, "check_up", lambda: findings)
    for name, value in {"SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert wallfacer("doctor") == (1, "", "rank 1: torch: none\n")
    findings.pop(0)
    assert wallfacer("doctor", "--json") == (0, "", "")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")  # left from another job
    code, out, _ = wallfacer("doctor", "--json")
    assert code == 0 and json.loads(out)[0]["name"] == "MPI"


def test_bench_links_measures_once_and_then_reads_the_cache(wallfacer, tmp_path: Path) -> None:
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
        (["plan", "--topology", "measure"], "wallfacer bench-links --out topology.json"),
        (["plan", "--topology", "a100-4x-100gbe", "--ranks", "6"], "6 ranks do not fill hosts"),
        (["plan", "--memory-gib", "0.001"], "GiB a rank; the closest, "),
        (["plan", "--ulysses-degree", "3"], "no ulysses_degree of 3 divides"),
        (["plan", "--kv-heads", "5"], "--kv-heads must divide --heads 32, got 5"),
        (["plan", "--seqlen", "0"], "--seqlen must be at least 1, got 0"),
        (["plan", "--seqlen", "100"], "too short for the zigzag layout on 64 ranks"),
        (["plan", "--top", "0"], "--top must be at least 1, got 0"),
        (["plan", "--all", "--top", "3"], "--all contradicts --top 3"),
        (["plan", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["plan", "--window", "-3"], "--window must be at least -1, got -3"),
        (["plan", "--exact-up-to", "-3"], "--exact-up-to must be at least 0, got -3"),
        (["plan", "--memory-gib", "nan"], "--memory-gib must be at least 0, got nan"),
        (["plan", "--memory-gib", "-1"], "--memory-gib must be at least 0, got -1"),
        (["plan", "--memory-gib", "inf"], "--memory-gib must be at most 1048576, got inf"),
        (["plan", "--ulysses-degree", "-1"], "--ulysses-degree must be at least 0, got -1"),
        (["plan", "--ranks", "-4"], "--ranks must be at least 0, got -4"),
        (["plan", "--ranks", "65544"], "--ranks must be at most 65536, got 65544"),
        (["plan", "--layers", "-1"], "--layers must be at least 0, got -1"),
        (["plan", "--dtype", "bfloat"], "--dtype must be one of"),
        (["plan", "--layout", "zigzak"], "did you mean 'zigzag'?"),
        (["plan", "--layout", "document_zigzag"], "document_zigzag needs --documents"),
        (["explain", "ring", "--layout", "document_zigzag"], "(of `wallfacer plan`)"),
        (["plan", "--documents", "40000"], "--documents must be 1 to 32768, a quarter of --seqlen"),
        (["plan", "--documents", "-1"], "--documents must be 1 to 32768"),
        (["plan", "--documents", "1", "--seqlen", "3"], "--seqlen must be at least 4, got 3"),
        (
            ["plan", "--kernel", "reference"],
            "has rates for ['sdpa', 'flash'], got kernel 'reference'",
        ),
        (["explain", "concentric:team_size=3"], "team_size must have a square that divides"),
        (["explain", "mesh:rows=two"], "--route must look like"),
        (["explain", "mesh:rows=2,cols=4,order=10"], "order must list every digit"),
        (["explain", "mesh:rows=2,rows=4,cols=2"], "--route gives 'rows' twice"),
        (["explain", "ring:order=yes"], "order=1-0, got 'ring:order=yes'"),
        (["explain", "rong"], "did you mean 'ring'?"),
        (["explain", "all_gather:host_size=9"], "host_size must be at most 8, all ranks"),
        (["explain", "all_gather:host_size=4"], "with --moves 'keys': use 'queries'"),
        (["explain", "ring", "--ranks", "512"], "--ranks must be at most 256, all of which are"),
        (
            ["plan", "--data-parallel-size", "4"],
            "--data-parallel-size 4 needs --model, --memory-gib",
        ),
        (["explain", "ring", "--moves", "both"], "--moves must be one of"),
        (["explain", "ring", "--picture", "a.bmp"], "--picture must end in one of"),
        (["explain", "ring", "--picture", "no/where/a.png"], "there is no folder no/where"),
        (["bench", "--kernel", "flahs"], "--kernel must be one of"),
        (["bench", "--top", "0"], "--top must be at least 1, got 0"),
        (["bench", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["bench", "--trace", "no/where/a.json"], "there is no folder no/where"),
        (["bench-links", "--out", "no/where/a.json"], "there is no folder no/where"),
        (["bench-links", "--out", "links.toml"], "--out must end in .json, got 'links.toml'"),
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
    from wf_backends.cli import options

    monkeypatch.setattr(launch, "init", lambda: pytest.fail("work has begun"))
    folder = tmp_path / f"folder{ending}"
    folder.mkdir()
    code, out, err = wallfacer(*args, str(folder))
    assert (code, out) == (2, "") and f"{args[-1]} {folder} is a folder: name a file" in err
    monkeypatch.setattr(options.os, "access", lambda *_: False)
    code, out, err = wallfacer(*args, str(tmp_path / f"a{ending}"))
    assert (code, out) == (2, "") and "you may not write there" in err


def test_an_error_of_the_disk_is_one_line(wallfacer, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, _, err = wallfacer("bench-links", "--fresh", "--out", str(tmp_path / "a.json"))
    assert code == 2 and "wallfacer: [Errno 28] No space left on device" in err


@pytest.mark.parametrize("command", ["plan", "explain", "bench", "bench-links", "doctor"])
def test_the_help_of_every_command_has_an_example(wallfacer, command: str) -> None:
    code, out, _ = wallfacer(command, "--help")
    assert code == 0 and "Example" in out
    assert f"wallfacer {command}" in out.replace("wf_backends.cli", "wallfacer")


def test_the_help_lists_the_commands(wallfacer) -> None:
    assert "bench-links" in wallfacer("--help")[1]


def test_a_missing_extra_is_named(wallfacer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("wf_backends.cli."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["wallfacer", "plan"])
    with pytest.raises(SystemExit, match=r"needs typer.*pip install 'wallfacer\[cli\]'"):
        main()


@pytest.mark.parametrize(
    ("value", "nics"), [(1.1, 1), (1.9, 2), (3.2, 4), (7.5, 8), (0.0, 1), (100, 8)]
)
def test_a_measured_number_of_nics_becomes_a_divisor(value: float, nics: int) -> None:
    assert nearest_divisor(8, value) == nics


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (2.5e-8, "0.0000"), (1e-5, "0.0100"), (0.0235, "23.50"), (0.9, "900.0")]
    + [(1.2345, "1,234"), (880.0, "880,000")],
)
def test_milliseconds_have_four_digits_and_at_most_four_decimals(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize("columns", [0, 90])
def test_a_rank_of_open_mpi_writes_no_codes_for_a_terminal(columns: int, monkeypatch) -> None:
    """Its pty, which ends in a terminal or in a file, has no size."""
    terminal, pty = os.openpty()
    fcntl.ioctl(pty, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with open(pty, "w") as stdout, open(terminal, "rb", buffering=0):
        monkeypatch.setattr(sys, "stdout", stdout)
        console = wide_console()
        assert console.is_terminal == (columns > 0) == (console.width < 1000)
