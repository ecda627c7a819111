"""Training under a memory budget: finds which modules to tile, and in how many tiles.

The loss comes first: its logits take most memory, and its tiles cost least. Then come modules in
the order of bytes saved for each repeated operation. A choice is kept if a run of the whole step on
fake tensors has a lower peak.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup

from wf_backends._validation import read_json
from wf_backends.autochunk.graph import (
    CaptureError,
    Effects,
    as_capture_errors,
    bind,
    capture,
    checked_budget,
    planning_lock,
    register_containers,
)
from wf_backends.autochunk.tiling.fake_runs import refuse_row_counts, training_peak
from wf_backends.autochunk.tiling.handle import Handle
from wf_backends.autochunk.tiling.tileable import TileCandidate, candidates, head_candidate
from wf_backends.autochunk.tiling.tiled_loss import torch_has_the_loss
from wf_backends.autochunk.tiling.tiles import Tiles, install, tile_modules

MIN_INNER_RATIO = 2
"""A module is worth tiling if inner_bytes / io_bytes is at least this."""
MIN_SAVED_SHARE = 0.01
"""Equal modules are tried if what they compute inside takes at least this share of the peak."""
MIN_ROWS = 128
"""A tile has at least these rows, and where the budget demands it MIN_ROWS_FOR_BUDGET."""
MIN_ROWS_FOR_BUDGET = 16
FORWARDS_PER_STEP = 3
"""Operations of a step / those of its forward: the backward has twice as many."""


@dataclass(frozen=True)
class TrainingPlan:
    """What is tiled in training. Plain data.

    Attributes:
        tiles: the modules, the loss first.
        peak, peak_before: bytes of a step with and without tiles, beyond parameters, their
            gradients and inputs.
        slowdown: the share of a step's operations that is computed again.
        refused: (class, reason) of modules that are worth tiling but may not be tiled.
    """

    tiles: tuple[Tiles, ...]
    peak: int
    peak_before: int
    slowdown: float
    refused: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> TrainingPlan:
        """The plan that `to_json` wrote. Raises ValueError, naming the key that is wrong."""
        return read_json(TrainingPlan, text, "training plan")

    def explain(self) -> str:
        """The plan as text."""
        saved = 1 - self.peak / max(1, self.peak_before)
        before, after = (f"{peak / 2**20:.1f} MiB" for peak in (self.peak_before, self.peak))
        lines = [
            f"training step: {before} -> {after} ({saved:.0%} saved), "
            f"{self.slowdown:.1%} of its operations repeated"
        ]
        for tiles in self.tiles:
            what = "logits and loss" if tiles.loss else f"dimension {tiles.dim}"
            lines.append(f"  {tiles.module}: {tiles.tiles} tiles of its {what}")
        lines += [f"  not tiled: {class_name}, {reason}" for class_name, reason in self.refused]
        return "\n".join(lines)


def plan_training(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
) -> TrainingPlan:
    """Plan the tiles with which a training step of `model` fits `max_memory`.

    Call it before DDP, FSDP2 or DeepSpeed wrap the model. It runs the model on fake tensors only.

    Args:
        args, kwargs: inputs as in training, with "labels" if the model computes its loss; their
            values do not matter.
        max_memory: bytes beyond parameters, gradients and inputs, or a size such as "8GB"; a float
            below 1 is a share of what the step needs without tiles; None: as little as possible
            within `max_slowdown`.
        max_slowdown: the largest share of the step's operations that may be repeated.

    Raises:
        ValueError: if the budget is no valid one, or no plan meets it (with the bytes of the
            closest plan); if the model cannot be captured (with the reason).
    """
    budget = checked_budget(max_memory, max_slowdown)
    with planning_lock(), _no_layer_dropped():
        search = _Search(model, args, dict(kwargs or {}))
        peak_before = search.peak([])
        plan = TrainingPlan((), peak_before, peak_before, 0.0, search.refused)
        target = budget.in_bytes(peak_before).memory
        before = None
        while before is None or plan.tiles != before.tiles:  # what saves nothing now may do so then
            before = plan
            for group in search.groups:
                if target is not None and plan.peak <= target:
                    break
                if sum(c.inner_bytes for c in group) >= MIN_SAVED_SHARE * peak_before:
                    plan = search.extended(plan, group, max_slowdown)
        while target is not None and plan.peak > target:
            finer = search.finer(plan)
            if finer is None:
                raise ValueError(search.budget_error(plan, max_memory, target, max_slowdown))
            plan = finer
        return plan


@contextmanager
def _no_layer_dropped() -> Iterator[None]:
    """`torch.rand([])` is 1 inside: LayerDrop (OPT) branches on it, and so keeps each layer."""
    rand = torch.rand

    def draw(*size: Any, **options: Any) -> Any:
        return 1.0 if size == ([],) else rand(*size, **options)

    with mock.patch.object(torch, "rand", draw):
        yield


def apply_training(
    model: nn.Module, plan: TrainingPlan, group: ProcessGroup | None = None
) -> Handle:
    """Tile `model` as `plan` says; see `tile_modules`."""
    return tile_modules(model, plan.tiles, group)


def tile_training(model: nn.Module, plan: object) -> nn.Module:
    """Tile the model in place; return it with the attributes `plan`, `explain` and `remove`."""
    if not isinstance(plan, TrainingPlan):
        raise ValueError(
            f"plan must be a TrainingPlan for a model in training, got a {type(plan).__name__}: "
            "call model.eval() first"
        )
    handle = apply_training(model, plan)
    handle.set(model, "plan", plan)
    handle.set(model, "explain", plan.explain)
    handle.set(model, "remove", handle.remove)
    return model


class _Search:
    """The candidates of one model and form of inputs, and the cost of tiling them.

    `groups` are the equal modules of all layers together, in the order in which they are tiled.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        register_containers()
        self.args, self.kwargs = bind(model, args, kwargs)
        captured = capture(model, self.args, self.kwargs)
        self._effects = Effects()
        with as_capture_errors(model, "run on fake tensors"):  # experts that look for tokens
            self._step_flops = FORWARDS_PER_STEP * max(1, self._flops(captured.graph.nodes))
        found = candidates(captured, model, self._effects)
        heavy = [c for c in found if c.inner_bytes >= MIN_INNER_RATIO * c.io_bytes]
        self.groups = self._grouped([c for c in heavy if not c.reason])
        refused = [c for c in heavy if c.reason and _is_innermost_refused(c, heavy)]
        head = head_candidate(captured, model)
        if head is not None and head.reason:
            refused.append(head)
        elif head is not None:
            self.groups.insert(0, [head])
        self.refused = tuple({c.class_name: c.reason for c in refused}.items())
        self._compared: set[Tiles] = set()  # tiles that compute what the whole module computes
        self._rows = {c.module: c.rows for group in self.groups for c in group}
        self._costs = dict.fromkeys(self._rows, 0.0)  # of all calls of a module
        for group in self.groups:
            cost = self._slowdown(group[0])
            for c in group:
                self._costs[c.module] += cost

    def peak(self, tiles: Sequence[Tiles]) -> int:
        """The peak bytes of a step with these tiles; a CaptureError if a module cannot be computed
        in them."""
        refuse_row_counts(self.model, set(tiles) - self._compared, self.args, self.kwargs)
        self._compared.update(tiles)
        with install(self.model, tiles):
            return training_peak(self.model, self.args, self.kwargs)

    def extended(
        self, plan: TrainingPlan, group: Sequence[TileCandidate], max_slowdown: float
    ) -> TrainingPlan:
        """The plan with as many of `group` as the slowdown allows; `plan` if that saves nothing."""
        slowdown, added = plan.slowdown, dict[str, Tiles]()
        tiled = {tiles.module for tiles in plan.tiles}
        for c in group:
            longer = slowdown + self._costs[c.module]
            if c.module not in tiled | added.keys() and longer <= max_slowdown + 1e-9:
                added[c.module] = Tiles(c.module, c.dim, _tile_count(c), c.loss)
                slowdown = longer
        if not added:
            return plan
        tiles = (*plan.tiles, *added.values())
        try:
            peak = self.peak(tiles)
        except CaptureError as error:  # e.g. an argument counts the rows
            reason = f"no tiles: {str(error).partition(': ')[2]}"
            refused = dict.fromkeys((*plan.refused, (group[0].class_name, reason)))
            return replace(plan, refused=tuple(refused))
        if peak >= plan.peak:
            return plan
        return replace(plan, tiles=tiles, peak=peak, slowdown=slowdown)

    def finer(self, plan: TrainingPlan) -> TrainingPlan | None:
        """The plan with twice as many tiles; None if that saves less than 1 %, or does not run."""
        tiles: tuple[Tiles, ...] = ()
        for spec in plan.tiles:
            max_tiles = self._rows[spec.module] // MIN_ROWS_FOR_BUDGET
            tiles += (replace(spec, tiles=max(spec.tiles, min(2 * spec.tiles, max_tiles))),)
        if tiles == plan.tiles:
            return None
        try:
            peak = self.peak(tiles)
        except CaptureError:
            return None
        return replace(plan, tiles=tiles, peak=peak) if peak < 0.99 * plan.peak else None

    def budget_error(
        self, plan: TrainingPlan, max_memory: Any, target: float, max_slowdown: float
    ) -> str:
        """The error for a budget that no plan meets."""
        smallest = plan
        for group in self.groups:
            smallest = self.extended(smallest, group, 1.0)
        message = (
            f"max_memory {max_memory!r} ({target} bytes) is too little for a training step: the "
            f"closest plan within max_slowdown {max_slowdown} needs {plan.peak} bytes, without "
            f"tiles it is {plan.peak_before}"
        )
        slowdown, peak = smallest.slowdown, smallest.peak
        if peak < plan.peak:
            message += f"; max_slowdown {slowdown:.2f} would allow one that needs {peak}"
        return message

    def _flops(self, nodes: Iterable[fx.Node]) -> int:
        calls = (node for node in nodes if node.op == "call_function")
        return sum(self._effects.of(node).flops for node in calls)

    def _slowdown(self, candidate: TileCandidate) -> float:
        """The share of a step's operations that the tiles of a module repeat."""
        if candidate.loss and torch_has_the_loss(self.model.get_submodule(candidate.module)):
            return 0.0
        return self._flops(candidate.nodes) / self._step_flops

    def _grouped(self, tileable: Sequence[TileCandidate]) -> list[list[TileCandidate]]:
        """Groups of equal modules; first the one that saves most for what it repeats."""
        groups: dict[Any, list[TileCandidate]] = {}
        for c in tileable:
            groups.setdefault((c.class_name, c.inner_bytes, c.io_bytes, c.dim), []).append(c)

        def saved_for_slowdown(group: list[TileCandidate]) -> float:
            return group[0].inner_bytes / max(self._slowdown(group[0]), 1e-9)

        return sorted(groups.values(), key=saved_for_slowdown, reverse=True)


def _tile_count(candidate: TileCandidate) -> int:
    """So many tiles that inner_bytes of a tile are half of io_bytes, with MIN_ROWS rows or more."""
    count = -(-2 * candidate.inner_bytes // candidate.io_bytes)
    return max(2, min(count, candidate.rows // MIN_ROWS))


def _is_innermost_refused(candidate: TileCandidate, others: Sequence[TileCandidate]) -> bool:
    """Whether no module inside the candidate is refused as well."""
    prefix = f"{candidate.module}."
    return not any(other.reason and other.module.startswith(prefix) for other in others)
