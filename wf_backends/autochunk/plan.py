"""A chunk plan, as plain data: which parts of a model's forward run slice by slice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from wf_backends._validation import read_json
from wf_backends.autochunk.graph import Copied

MIB, GIB = 1 << 20, 1 << 30
MIN_VALUES = {"peak": 0, "peak_before": 0, "slowdown": 0}
MIN_VALUES |= {"dim": 0, "length": 1, "rows": 1, "operators": 1}


@dataclass(frozen=True)
class ChunkedPart:
    """One region: operators between `first` and `last` that are computed slice by slice.

    `first` and `last` are names of the graph's nodes; `operators` is the number of operators.
    Slices have `length` of the `rows` rows of dimension `dim` of `last`. `where` is the path of the
    innermost module that contains the operators. `overwritten` is the name of the input to whose
    memory the output of `last` is written ("": to memory of its own).
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

    `peak` and `peak_before` are the bytes of live activations with and without the regions, without
    parameters and inputs. `slowdown` is the predicted time that the slices add, as a share of the
    model's time. `fingerprint` identifies the graph. `walls` are the operators that no region may
    contain, each with its number in the graph. `copied` says which values are recomputed for each
    of their readers: see `graph/copies`.
    """

    fingerprint: str
    regions: tuple[ChunkedPart, ...]
    peak: int
    peak_before: int
    slowdown: float
    walls: tuple[tuple[str, int], ...] = ()
    copied: Copied = ""

    def __post_init__(self) -> None:
        """Refuses numbers that no search finds, such as those of an edited JSON."""
        parts = {f"plan.regions[{i}]": part for i, part in enumerate(self.regions)}
        for key, owner in {"plan": self, **parts}.items():
            for name, value in vars(owner).items():
                minimum = MIN_VALUES.get(name)
                if minimum is not None and value < minimum:
                    raise ValueError(f"{key}.{name} must be {minimum} or more, got {value}")

    @property
    def saved(self) -> float:
        """The share of the peak that the regions save."""
        return 1 - self.peak / self.peak_before if self.peak_before else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> ChunkPlan:
        """The plan that `to_json` wrote. Raises ValueError that names a wrong key."""
        return read_json(ChunkPlan, text, "chunk plan")

    def explain(self) -> str:
        """The plan as text: what runs in slices, and which operators never do."""
        lines = [
            f"activations: {_size(self.peak_before)} -> {_size(self.peak)} "
            f"({self.saved:.0%} saved), predicted slowdown {self.slowdown:.1%}"
        ]
        for part, count in _equal_regions(self.regions):
            alike = f" and {count - 1} alike" if count > 1 else ""
            over = f", written over {part.overwritten}" if part.overwritten else ""
            lines.append(
                f"  {part.where}{alike}: {part.operators} operators in {part.chunks} slices of "
                f"{part.length} of {part.rows} (dimension {part.dim} of {part.last}{over})"
            )
        if self.copied:
            norms = " and normed inputs" if self.copied == "norms" else ""
            lines.append(f"  recomputed for each reader: masks and the like{norms}")
        if not self.regions:
            lines.append("  nothing is sliced")
        if self.walls:
            names = ", ".join(f"{name} ({count} times)" for name, count in self.walls)
            lines.append(f"  never sliced, because there is no rule for it: {names}")
        return "\n".join(lines)


def _equal_regions(regions: tuple[ChunkedPart, ...]) -> list[tuple[ChunkedPart, int]]:
    """The first of the regions with equal sizes in different layers, and how many they are."""
    groups: dict[tuple[int, ...], list[ChunkedPart]] = {}
    for part in regions:
        sizes = part.dim, part.length, part.rows, part.operators, bool(part.overwritten)
        groups.setdefault(sizes, []).append(part)
    return [(group[0], len(group)) for group in groups.values()]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"
