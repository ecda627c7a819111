"""Training under a memory budget: which modules are tiled, in how many tiles, found by itself.

First the loss, whose logits weigh most and whose tiles cost least; then modules in the order of the
bytes that a tile saves for each operation it repeats. Each choice is accepted by a run of the whole
step on fake tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx, nn
from torch.distributed import ProcessGroup

from wf_backends._validation import read_json
from wf_backends.graph import (
    CaptureError,
    Effects,
    bind,
    capture,
    checked_budget,
    register_containers,
)
from wf_backends.tiling.handle import Handle
from wf_backends.tiling.tileable import Candidate, candidates, head_candidate
from wf_backends.tiling.tiled_loss import torch_has_the_loss
from wf_backends.tiling.tiles import Tiles, install, tile_modules
from wf_backends.tiling.training_peak import training_peak

WORTH = 2
"""A module is tiled whose operators make this many times what goes in and out."""
ROWS = 128
"""A tile has at least these rows, and where a budget demands it FEWEST."""
FEWEST = 16
PASSES = 3
"""A step's operations, in those of its forward: the backward has twice as many."""


@dataclass(frozen=True)
class TrainingPlan:
    """What is tiled in training. Plain data.

    Attributes:
        tiles: the modules, the loss first.
        peak, peak_before: bytes of a step with and without, beyond parameters, their gradients and
            inputs.
        slowdown: the share of a step's operations that is computed once more.
        refused: (class, why not) of modules that are worth it and may not be tiled.
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
        """The plan in words."""
        saved = 1 - self.peak / max(1, self.peak_before)
        mib = [f"{count / 2**20:.1f} MiB" for count in (self.peak_before, self.peak)]
        lines = [
            f"training step: {mib[0]} -> {mib[1]} ({saved:.0%} saved), "
            f"{self.slowdown:.1%} of its operations repeated"
        ]
        for one in self.tiles:
            what = "logits and loss" if one.loss else f"dimension {one.dim}"
            lines.append(f"  {one.module}: {one.tiles} tiles of its {what}")
        lines += [f"  not tiled: {kind}, {why}" for kind, why in self.refused]
        return "\n".join(lines)


def plan_training(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
) -> TrainingPlan:
    """What to tile so that a training step of `model` fits `max_memory`.

    Call it before DDP, FSDP2 or DeepSpeed wrap the model. Nothing is run but fake tensors.

    Args:
        args, kwargs: inputs of the form that will be given, with "labels" if the model makes its
            loss; values do not matter.
        max_memory: bytes beyond parameters, gradients and inputs, or a size such as "8GB"; a share
            of what the step needs without tiles (a float below 1); None: the least within
            `max_slowdown`.
        max_slowdown: the largest share of the step's operations that may be repeated.

    Raises:
        ValueError: for a budget that is none, or that nothing meets, with the closest plan and what
            it needs; for a model that cannot be captured, with the reason.
    """
    budget = checked_budget(max_memory, max_slowdown)
    search = _Search(model, args, dict(kwargs or {}))
    before = search.peak([])
    plan = TrainingPlan((), before, before, 0.0, search.refused)
    target = budget.in_bytes(before).memory
    for group in search.groups:
        if target is not None and plan.peak <= target:
            break
        plan = search.extended(plan, group, max_slowdown)
    while target is not None and plan.peak > target:
        finer = search.finer(plan)
        if finer is None:
            raise ValueError(search.too_little(plan, max_memory, target, max_slowdown))
        plan = finer
    return plan


def apply_training(
    model: nn.Module, plan: TrainingPlan, group: ProcessGroup | None = None
) -> Handle:
    """Have `model` run as `plan` says; see `tile_modules`."""
    return tile_modules(model, plan.tiles, group)


def tile_training(model: nn.Module, plan: object) -> nn.Module:
    """The model itself, tiled, with `plan`, `explain()` and `remove()`.

    Raises:
        ValueError: for what is no plan for training.
    """
    if not isinstance(plan, TrainingPlan):
        raise ValueError(
            f"plan must be a TrainingPlan for a model in training, got a {type(plan).__name__}: "
            "call model.eval() first"
        )
    handle = apply_training(model, plan)
    found = {"plan": plan, "explain": plan.explain, "remove": handle.remove}
    for name, value in found.items():
        handle.set(model, name, value)
    return model


class _Search:
    """The candidates of one model and form of inputs, and what each choice costs."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        register_containers()
        self.args, self.kwargs = bind(model, args, kwargs)
        captured = capture(model, self.args, self.kwargs)
        self._effects = Effects()
        self._total = PASSES * max(1, self._flops(captured.graph.nodes))
        head, found = head_candidate(captured, model), candidates(captured, model, self._effects)
        heavy = [one for one in found if one.inside >= WORTH * one.around]
        self.groups = self._grouped([one for one in heavy if not one.reason])
        if head is not None and not head.reason:
            self.groups.insert(0, [head])
        refused = [one for one in heavy if one.reason and _is_innermost(one, heavy)]
        refused += [head] if head is not None and head.reason else []
        self.refused = tuple({one.kind: one.reason for one in refused}.items())
        self._rows = {one.module: one.rows for group in self.groups for one in group}

    def peak(self, tiles: Sequence[Tiles]) -> int:
        with install(self.model, tiles):
            return training_peak(self.model, self.args, self.kwargs)

    def extended(
        self, plan: TrainingPlan, group: Sequence[Candidate], max_slowdown: float
    ) -> TrainingPlan:
        """The plan with as many of `group` as the slowdown allows; as it is if nothing is saved."""
        cost = self._cost(group[0])
        room = max_slowdown - plan.slowdown
        count = len(group) if cost == 0 else min(len(group), int(room / cost + 1e-9))
        more = [Tiles(one.module, one.dim, _count(one), one.loss) for one in group[:count]]
        tiles = (*plan.tiles, *more)
        try:
            peak = self.peak(tiles) if more else plan.peak
        except (CaptureError, NotImplementedError) as error:  # it is told its rows by a number, say
            why = str(error).partition(": ")[2]
            return replace(plan, refused=(*plan.refused, (group[0].kind, f"no tiles: {why}")))
        if peak >= plan.peak:
            return plan
        return replace(plan, tiles=tiles, peak=peak, slowdown=plan.slowdown + count * cost)

    def finer(self, plan: TrainingPlan) -> TrainingPlan | None:
        """The plan with twice as many tiles; None where it saves nothing more, or does not run."""
        tiles = tuple(
            replace(one, tiles=max(one.tiles, min(2 * one.tiles, self._rows[one.module] // FEWEST)))
            for one in plan.tiles
        )
        if tiles == plan.tiles:
            return None
        try:
            peak = self.peak(tiles)
        except (CaptureError, NotImplementedError):
            return None
        return replace(plan, tiles=tiles, peak=peak) if peak < 0.99 * plan.peak else None

    def too_little(self, plan: TrainingPlan, given: Any, target: float, max_slowdown: float) -> str:
        """The error for a budget that nothing meets."""
        most = plan
        for group in self.groups:
            rest = [one for one in group if one.module not in {t.module for t in plan.tiles}]
            most = self.extended(most, rest, 1.0) if rest else most
        told = (
            f"max_memory {given!r} ({target} bytes) is too little for a training step: the closest "
            f"plan within max_slowdown {max_slowdown} needs {plan.peak} bytes, without tiles it is "
            f"{plan.peak_before}"
        )
        if most.peak < plan.peak:
            told += f"; max_slowdown {most.slowdown:.2f} would allow one that needs {most.peak}"
        return told

    def _flops(self, nodes: Iterable[fx.Node]) -> int:
        calls = (node for node in nodes if node.op == "call_function")
        return sum(self._effects.of(node).flops for node in calls)

    def _cost(self, one: Candidate) -> float:
        """The share of a step's operations that its tiles repeat."""
        if one.loss and torch_has_the_loss(self.model.get_submodule(one.module)):
            return 0.0
        return self._flops(one.nodes) / self._total

    def _grouped(self, found: Sequence[Candidate]) -> list[list[Candidate]]:
        """Equal modules of all layers together; first what saves most for what it repeats."""
        groups: dict[Any, list[Candidate]] = {}
        for one in found:
            groups.setdefault((one.kind, one.inside, one.around, one.dim), []).append(one)

        def worth(group: list[Candidate]) -> float:
            return group[0].inside / max(self._cost(group[0]), 1e-9)

        return sorted(groups.values(), key=worth, reverse=True)


def _count(one: Candidate) -> int:
    """So many tiles that one makes half of what goes in and out, of ROWS rows or more."""
    return max(2, min(-(-2 * one.inside // one.around), one.rows // ROWS))


def _is_innermost(one: Candidate, all_of_them: Sequence[Candidate]) -> bool:
    inside = f"{one.module}."
    return not any(other.reason and other.module.startswith(inside) for other in all_of_them)
