"""`wallfacer explain ROUTE`: the schedule as a grid, its timeline and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.command_line import SMALL, TWO_HOSTS
from wf_backends.cluster.presets import load
from wf_backends.planner import Span
from wf_backends.schedule.placement import place, read_placed
from wf_backends.schedule.routes import concentric
from wf_backends.schedule.schedule import render


def test_explain_prints_the_grid_and_the_timeline(wallfacer) -> None:
    code, out, _ = wallfacer("explain", "concentric:team_size=2", *SMALL, "--ranks", "8")
    assert code == 0
    assert render(concentric(8, 2)) in out
    assert "forward step 1" in out and "backward reduce" in out


def test_no_figure_of_explain_is_cut_off_at_80_columns(wallfacer) -> None:
    """2,345,684 ms of computing on CPU cores."""
    args = ("--topology", "one-host", "--ranks", "3")
    code, out, _ = wallfacer("explain", "all_gather", *args, columns=80)
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80


def test_a_short_transfer_is_on_the_time_axis() -> None:
    """As beside a long computation: 1 ms of 100 is less than half a mark."""
    from wf_backends.cli.explain import AXIS_WIDTH, bar

    compute, transfer = Span("step", "compute", 0.0, 0.5), Span("step", "transfer", 0.0, 0.001)
    at_the_end = Span("step", "transfer", 0.099, 0.1)
    assert bar([compute, transfer], 1.0) == "+" + "#" * (AXIS_WIDTH // 2 - 1)
    assert bar([at_the_end], 0.1) == " " * (AXIS_WIDTH - 1) + "-"


def test_explain_takes_a_placement(wallfacer) -> None:
    route = "mesh:rows=2,cols=4,order=1-0"
    code, out, _ = wallfacer("explain", route, *SMALL, "--ranks", "8")
    placed = {"name": "mesh", "rows": 2, "cols": 4, "order": [1, 0]}
    assert code == 0 and "mesh cols=4 rows=2, digits 1-0 on 8 ranks" in out
    assert render(place(read_placed(placed, 8), 8)) in out


def test_explain_takes_a_host_size(wallfacer) -> None:
    args = ("--topology", "a100-4x-100gbe", *SMALL, "--moves", "queries")
    code, out, _ = wallfacer("explain", "all_gather:host_size=4", *args)
    assert code == 0 and "all_gather, once to hosts of 4 on 8 ranks" in out


@pytest.mark.parametrize(("args", "size"), [([], 8), (["--ranks", "0"], 64), (["--ranks", "4"], 4)])
def test_explain_shows_the_ranks_of_the_option_or_the_file(
    wallfacer, tmp_path: Path, args, size: int
) -> None:
    assert f"ring on {size} ranks" in wallfacer("explain", "ring", *SMALL, *args)[1]
    path = tmp_path / "four.json"
    path.write_text(json.dumps(load("a100-4x-100gbe", 4).to_dict()))
    assert "ring on 4 ranks" in wallfacer("explain", "ring", *SMALL, "--topology", str(path))[1]


def test_a_picture_without_matplotlib_is_refused(wallfacer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = wallfacer("explain", "ring", "--picture", "a.png")
    assert (code, out) == (2, "") and "--picture needs matplotlib, which is missing" in err


def test_a_picture_that_cannot_be_written_is_refused_before_the_table(
    wallfacer, tmp_path: Path, monkeypatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def savefig(_: object, path: Path, dpi: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    code, out, err = wallfacer("explain", "ring", "--picture", str(tmp_path / "a.png"))
    assert (code, out) == (2, "") and f"No space left on device: '{tmp_path}/a.png'" in err


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_explain_draws_a_picture(wallfacer, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    code, out, _ = wallfacer(
        "explain", "mesh:rows=2,cols=4", "--topology", TWO_HOSTS, "--picture", str(path)
    )
    assert code == 0 and "drawn" in out
    magic = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(magic)
