"""The network lab: predicted and measured time of every scheme in every case, and the targets.

    python benchmarks/lab.py                      # all cases, then benchmarks/results/lab.md
    python benchmarks/lab.py --case 4x2-rank-4h   # one case; the report keeps the others

Needs root and iproute2 (see lab_hosts.sh). The figures of every case are saved as JSON in --keep;
the report is made from these files. --phases prints a case's phases, --report runs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_report import phase_lines, report

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "lab.md"


@dataclass(frozen=True, slots=True)
class Case:
    """Hosts x ranks, NICs (one per "host" or per "rank"), and the attention call."""

    hosts: int
    per_host: int
    nics: str
    heads: int
    rate: str = "20mbit"
    seqlen: int = 4096
    documents: int = 0
    """Median tokens of packed documents; 0 = one document."""

    @property
    def name(self) -> str:
        packed = "-packed" if self.documents else ""
        return f"{self.hosts}x{self.per_host}-{self.nics}-{self.heads}h{packed}"

    def command(self, out: Path, options: list[str]) -> list[str]:
        """The command line that runs this case and writes `out`."""
        lab = [str(HERE / "lab_hosts.sh"), str(self.hosts), str(self.per_host), self.nics]
        program = [sys.executable, str(HERE / "lab_rank.py"), "--out", str(out)]
        model = ["--heads", str(self.heads), "--seqlen", str(self.seqlen)]
        model += ["--documents", str(self.documents)]
        return [*lab, self.rate, *program, *model, *options]


SIZES = (4, 2), (2, 4), (4, 4)  # hosts x ranks
CASES = (
    *(Case(*size, "rank", heads=4) for size in SIZES),
    *(Case(*size, "host", heads=4, rate="60mbit") for size in SIZES),
    Case(4, 2, "rank", heads=2),
    Case(4, 4, "rank", heads=2),  # few heads: auto sends a row to a host once
    Case(4, 2, "rank", heads=8, seqlen=2048),  # as many heads as ranks: Ulysses can run
    Case(4, 4, "rank", heads=8, seqlen=2048),  # Ulysses between hosts, routes within hosts
    *(Case(4, 2, nics, heads=4, documents=128) for nics in ("rank", "host")),
)


def main() -> None:
    args = parse()
    args.keep.mkdir(parents=True, exist_ok=True)
    selected = [case for case in CASES if not args.case or case.name in args.case]
    for case in [] if args.report else selected:
        print(f"{case.name}: {case.rate}, {case.seqlen} tokens", file=sys.stderr, flush=True)
        subprocess.run(
            case.command(args.keep.resolve() / f"{case.name}.json", args.rest), check=True
        )
    figures: dict[str, dict[str, Any]] = {}
    for case in CASES:
        saved = read_figures(args.keep, case)
        if saved is not None:
            figures[case.name] = saved
    for case in selected if args.phases else []:
        print(*phase_lines(case.name, figures[case.name]), sep="\n")
    args.out.write_text(report(figures) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="may be given several times")
    parser.add_argument("--keep", type=Path, default=Path("build/lab"), help="folder of figures")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the report")
    parser.add_argument("--report", action="store_true", help="only report what is kept")
    parser.add_argument("--phases", action="store_true", help="print phases, too")
    parser.add_argument("rest", nargs="*", help="options of lab_rank.py, after --")
    return parser.parse_args()


def read_figures(folder: Path, case: Case) -> dict[str, Any] | None:
    """The figures of a case; None if it has not run."""
    path = folder / f"{case.name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    main()
