"""A chunk plan: which parts of a model's forward run slice by slice. Plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from wf_backends._validation import read_json
from wf_backends.graph import Copied

MIB, GIB = 1 << 20, 1 << 30
LEAST = {"peak": 0, "peak_before": 0, "dim": 0, "length": 1, "rows": 1, "operators": 1}


@dataclass(frozen=True)
class ChunkedPart:
    """One region: the operators from `first` to `last` (names in the graph) that are computed in
    slices of `length` rows of dimension `dim` of `last`, which has `rows`.

    `where` names the modules that they belong to. `overwritten` is the input of the region whose
    memory `last` takes (its name in the graph), "" where it has memory of its own.
    """

    first: str
    last: str
    dim: int
    length: int
    rows: int
    operators: int
    where: str
    overwritten: str = ""

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.length)


@dataclass(frozen=True)
class ChunkPlan:
    """The regions of a model for one form of inputs.

    `peak` and `peak_before` are the bytes of live activations with and without the regions, beyond
    parameters and inputs; `slowdown` is the predicted share of time that the slices add.
    `fingerprint` is that of the graph. `walls` are the model's operators that no region may hold,
    with how often they stand in it. `copied`: what is computed anew for each of its readers, see
    `copies`.
    """

    fingerprint: str
    regions: tuple[ChunkedPart, ...]
    peak: int
    peak_before: int
    slowdown: float
    walls: tuple[tuple[str, int], ...] = ()
    copied: Copied = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no search gives."""
        parts = {f"plan.regions[{i}]": part for i, part in enumerate(self.regions)}
        for where, owner in {"plan": self, **parts}.items():
            for name, value in vars(owner).items():
                if name in LEAST and value < LEAST[name]:
                    raise ValueError(f"{where}.{name} must be {LEAST[name]} or more, got {value}")

    @property
    def saved(self) -> float:
        """The share of activation memory that is saved."""
        return 1 - self.peak / self.peak_before if self.peak_before else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> ChunkPlan:
        """The plan that `to_json` wrote. Raises ValueError, naming the key that is wrong."""
        return read_json(ChunkPlan, text, "chunk plan")

    def explain(self) -> str:
        """The plan in words: what runs in slices, and what ended the regions."""
        lines = [
            f"activations: {_size(self.peak_before)} -> {_size(self.peak)} "
            f"({self.saved:.0%} saved), predicted slowdown {self.slowdown:.1%}"
        ]
        for part, places in _folded(self.regions):
            lines.append(
                f"  {part.where}{f' and {places - 1} alike' if places > 1 else ''}: "
                f"{part.operators} operators in {part.chunks} slices of {part.length} of "
                f"{part.rows} (dimension {part.dim} of {part.last}"
                f"{part.overwritten and f', written over {part.overwritten}'})"
            )
        if self.copied:
            norms = ", normed inputs and what else lives anyway" if self.copied == "norms" else ""
            lines.append(
                f"  masks and what else is computed from little{norms}: anew for each reader"
            )
        if not self.regions:
            lines.append("  nothing is sliced")
        if self.walls:
            named = ", ".join(f"{name} ({count} times)" for name, count in self.walls)
            lines.append(f"  never sliced, because there is no rule for it: {named}")
        return "\n".join(lines)


def _folded(regions: tuple[ChunkedPart, ...]) -> list[tuple[ChunkedPart, int]]:
    """Equal regions of different layers as one, with their number."""
    groups: dict[tuple[int, ...], list[ChunkedPart]] = {}
    for part in regions:
        kind = part.dim, part.length, part.rows, part.operators, bool(part.overwritten)
        groups.setdefault(kind, []).append(part)
    return [(group[0], len(group)) for group in groups.values()]


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.2f} MiB"
