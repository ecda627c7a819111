"""Which dimension is sharded at which module: modules are named, and hooks switch between them.

A stage is a module whose first argument is the hidden state and which needs one of its sequence
dimensions whole, such as a residual block of temporal attention. Other modules work on any shard.
Before a stage that needs the sharded dimension, another dimension is sharded instead, and stays so
until a stage needs that one: one switch, not two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wf_backends._validation import nearest
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, chunk_sizes


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a model says about its modules, by their names in `named_modules()`.

    `dims` names the sequence dimensions of the hidden state, e.g. {"time": 1, "space": 2};
    `needs` says which of them a stage needs whole, by name or pattern of names, e.g.
    {"blocks.*.temporal": "time"}. The whole hidden state is cut along `starts_along` before the
    module `enters`, and gathered behind the module `leaves`.
    """

    dims: Mapping[str, int]
    enters: str
    starts_along: str
    leaves: str
    needs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> Stages:
        """The stages of a JSON object.

        Raises:
            ValueError: for an unknown, missing or wrong key; names it and what would be right.
        """
        if not isinstance(words, Mapping):
            raise ValueError(f"must be an object with the keys of Stages, got {words!r}")
        known = {f.name: f for f in fields(cls)}
        for key in words:
            if key not in known:
                raise ValueError(
                    f"unknown key {key!r}{nearest(key, known)} (known keys: {list(known)})"
                )
        for key, word in known.items():
            if key not in words and word.default_factory is MISSING:
                raise ValueError(f"{key!r} is missing. Known keys: {list(known)}")
        return cls(**words)

    def __post_init__(self) -> None:
        for key, kind, what in (
            ("dims", int, '{"time": 1, "space": 2}'),
            ("needs", str, '{"blocks.*.temporal": "time"}'),
        ):
            value = getattr(self, key)
            if not isinstance(value, Mapping) or not all(type(v) is kind for v in value.values()):
                raise ValueError(f"{key} must be an object such as {what}, got {value!r}")
        for key in ("enters", "starts_along", "leaves"):
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"{key} must be a name, got {getattr(self, key)!r}")
        if self.needs and len(self.dims) < 2:
            raise ValueError(f"dims must name at least two dimensions to switch, got {self.dims}")
        named = {"starts_along": self.starts_along}
        named |= {f"needs[{pattern!r}]": name for pattern, name in self.needs.items()}
        for key, name in named.items():
            if name not in self.dims:
                raise ValueError(
                    f"{key} must be one of {list(self.dims)}, got {name!r}"
                    f"{nearest(name, self.dims)}"
                )


Lengths = tuple[int, ...]  # of the sequence dimensions on this rank, in the order of `dims`


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which dimension the hidden state is cut, and the length of every whole dimension."""

    along: str
    lengths: Mapping[str, int]


class LayoutTracker:
    """Hooks that shard, switch and gather a model's hidden state; `remove()` takes them off.

    The model is called as on one device: with whole inputs, the same on every rank, and with a
    whole output. Average the gradients of its parameters over the ranks (by
    `wf_backends.parallel.GradientMean`, or a data-parallel wrapper over these ranks).

    Works under activation checkpointing: a stage that is run again in the backward gets its input
    sharded as in the forward, told by its shape. Where several forwards that wait for their
    backward may have given a stage the same shape, sharded otherwise, that is refused.

    Args:
        dsp: the ranks; made with gradients="averaged".
        stages: which module needs what.

    Raises:
        ValueError: if gradients are not averaged, a pattern matches no module, or a module needs
            two dimensions.
    """

    def __init__(self, model: nn.Module, dsp: DynamicSequenceParallel, stages: Stages) -> None:
        if dsp.gradients != "averaged":
            raise ValueError(f'dsp must have gradients="averaged", got {dsp.gradients!r}')
        self.dsp, self.stages = dsp, stages
        self.switches = 0
        """Switches in the forward passes so far."""
        self.now: Cut | None = None
        """How the hidden state is cut now; None where it is whole."""
        self._running = self._ran_again = self._paused = False
        self._arrived: dict[tuple[str, Lengths], list[Cut | None]] = {}
        """How the hidden state was sharded, by stage and by the lengths that the stage got."""
        modules = dict(model.named_modules())
        needs = _resolve(stages.needs, modules)
        for name in (stages.enters, stages.leaves):
            if name not in modules or not name:
                known = [module for module in modules if module]
                raise ValueError(f"the model has no module {name!r}{nearest(name, known)}")
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(lambda *_: self._set_running(True)),
            model.register_forward_hook(lambda *_: self._check_left()),
            model.register_forward_hook(lambda *_: self._set_running(False), always_call=True),
            modules[stages.leaves].register_forward_hook(lambda _, args, out: self._leave(out)),
        ]
        for name in dict.fromkeys((stages.enters, *needs)):
            arrive = partial(self._arrive, name, needs.get(name))
            self._hooks.append(modules[name].register_forward_pre_hook(arrive))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model runs as on one device."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def local_part(self, x: Tensor, now: Cut | None) -> Tensor:
        """This rank's part of a whole hidden state that is cut so; x where it is something else."""
        dims = self.stages.dims
        if now is None or x.dim() <= max(dims.values()) or self._lengths(x) != now.lengths:
            return x
        rank, sizes = self.dsp.rank, chunk_sizes(now.lengths[now.along], self.dsp.size)
        return x.narrow(dims[now.along], sum(sizes[:rank]), sizes[rank])

    def also_remove(self, hook: RemovableHandle) -> None:
        """Take this off with the hooks."""
        self._hooks.append(hook)

    def remove(self) -> None:
        """Take all hooks off: the model is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> LayoutTracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _lengths(self, x: Tensor) -> dict[str, int]:
        """Of the sequence dimensions."""
        return {dim: x.shape[axis] for dim, axis in self.stages.dims.items()}

    def _set_running(self, running: bool) -> None:
        """Before and after the forward of the model nothing is sharded."""
        self._running, self.now = running, None
        if running and self._ran_again:  # a backward went over the forwards before
            self._arrived.clear()
            self._ran_again = False

    def _arrive(
        self, name: str, need: str | None, _: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The arguments of the stage `name`, with the hidden state as it needs it."""
        if self._paused:
            return args
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must get the hidden state as its first argument")
        cut = self._cut_at(name, x)
        if cut is None:
            cut, x = self._split(name, x)
        if cut.along == need:
            target = next(dim for dim in self.stages.dims if dim != need)
            cut, x = self._switch(name, cut, target, x)
        if self._running:
            self.now = cut
        return x, *args[1:]

    def _cut_at(self, name: str, x: Any) -> Cut | None:
        """How the hidden state arrives at `name`; where it is run again, as in its forward."""
        if not isinstance(x, Tensor) or x.dim() <= max(self.stages.dims.values()):
            return self.now  # refused where it is cut, or looked at
        lengths = tuple(self._lengths(x).values())
        found = self._arrived.setdefault((name, lengths), [])
        if self._running:
            if self.now not in found:
                found.append(self.now)
            return self.now
        self._ran_again = True
        if len(found) == 1 or (found and self.dsp.size == 1):  # on one rank all are alike
            return found[0]
        raise ValueError(
            f"{name!r} runs again in a backward, and of the forwards since the last one "
            f"{len(found)} may have given it the hidden state {list(lengths)}: run the backward of "
            "one forward before the next forward"
        )

    def _split(self, name: str, x: Tensor) -> tuple[Cut, Tensor]:
        if name != self.stages.enters:
            raise ValueError(
                f"the stage {name!r} runs before {self.stages.enters!r}, where the hidden state "
                "is cut: enters must be the first of them"
            )
        start = self.stages.starts_along
        if max(self.stages.dims.values()) >= x.dim():
            raise ValueError(
                f"dims {dict(self.stages.dims)} do not fit the hidden state {tuple(x.shape)} "
                f"that {name!r} gets"
            )
        return Cut(start, self._lengths(x)), self.dsp.split(x, self.stages.dims[start]).tensor

    def _switch(self, name: str, old: Cut, target: str, x: Tensor) -> tuple[Cut, Tensor]:
        dims, shard = self.stages.dims, self._check_shard(name, old, x)
        self.switches += self._running
        new = self.dsp.switch(shard, dims[old.along], dims[target])
        return Cut(target, old.lengths), new.tensor

    def _check_shard(self, name: str, cut: Cut, x: Tensor) -> Sharded:
        """x as this rank's shard; refuses one of another shape."""
        sizes = chunk_sizes(cut.lengths[cut.along], self.dsp.size)
        wanted = {**cut.lengths, cut.along: sizes[self.dsp.rank]}
        if (got := self._lengths(x)) != wanted:
            raise ValueError(
                f"{name!r} got a hidden state with {got}, but sharded along {cut.along!r} it "
                f"has {wanted} on {self.dsp.comm.me}"
            )
        return Sharded(x, self.stages.dims[cut.along], sizes)

    def _check_left(self) -> None:
        if self.now is not None:
            raise ValueError(
                f"the forward ended without {self.stages.leaves!r} behind {self.stages.enters!r}: "
                f"its output is a part, cut along {self.now.along!r}. leaves must name the module "
                "behind which the hidden state is whole again"
            )

    def _leave(self, out: Any) -> Tensor:
        """The whole output of the module `leaves`."""
        if self._paused:
            return out
        name = self.stages.leaves
        cut = self._cut_at(name, out)
        if cut is None:
            raise ValueError(f"{name!r} ran before {self.stages.enters!r}: nothing is sharded yet")
        if not isinstance(out, Tensor):
            raise ValueError(f"{name!r} must return the hidden state, got {type(out).__name__}")
        self.now = None
        shard = self._check_shard(name, cut, out)
        return self.dsp.gather(shard, self.stages.dims[cut.along])


def _resolve(needs: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Module name -> dimension, in the order of the model."""
    found: dict[str, str] = {}
    for pattern, dim in needs.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"needs: {pattern!r} matches no module{nearest(pattern, modules)}")
        for name in matching:
            if found.setdefault(name, dim) != dim:
                raise ValueError(
                    f"needs: the module {name!r} needs {found[name]!r} and {dim!r}; attention over "
                    "all dimensions at once is SequenceParallel.attention's, and no stage"
                )
    return found
