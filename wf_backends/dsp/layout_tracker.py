"""Hooks that shard, switch and gather a model's hidden state before and after its stages.

Before a stage that needs the sharded dimension, the hooks shard another dimension instead. It stays
sharded until a stage needs it whole: one switch for each such stage, not two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wf_backends._compile import eager
from wf_backends._validation import nearest
from wf_backends.comm import Shared
from wf_backends.dsp.closeness import named_tensors
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel, Sharded, chunk_sizes

LocalLengths = tuple[int, ...]  # local lengths of the sequence dimensions, in the order of `dims`


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension along which the hidden state is cut, and all lengths before the cut."""

    along: str
    lengths: Mapping[str, int]


Cuts = dict[tuple[str, LocalLengths], list[Cut | None]]
"""The cuts that each stage got in a forward, by its name and local lengths."""


class LayoutTracker(Shared):
    """Hooks that shard, switch and gather a model's hidden state; `remove()` takes them off.

    The model is called as on one device: its inputs are whole and equal on all ranks, and so is its
    output. Average the gradients of its parameters over the ranks (by
    `wf_backends.parallel.GradientMean`, or a data-parallel wrapper over these ranks).

    Works under activation checkpointing: when a stage runs again in the backward, the shape of its
    input tells how that forward sharded it. The graph behind the model's output holds the cuts.

    Args:
        dsp: over the ranks; made with gradients="averaged".
        stages: which dimension each module needs whole.

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
        self.current_cut: Cut | None = None
        """How the hidden state is cut now; None while it is whole."""
        self._in_forward = self._paused = False
        self._cuts: Cuts = {}
        """Those of the forward, or backward, that runs or was the last."""
        modules = dict(model.named_modules())
        needs = _resolve(stages.needs, modules)
        for name in (stages.enters, stages.leaves):
            if name not in modules or not name:
                known = [module for module in modules if module]
                raise ValueError(f"the model has no module {name!r}{nearest(name, known)}")
        self.hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(lambda *_: self._set_in_forward(True)),
            model.register_forward_hook(lambda _, args, out: self._check_left(out)),
            model.register_forward_hook(lambda *_: self._set_in_forward(False), always_call=True),
            modules[stages.leaves].register_forward_hook(lambda _, args, out: self._gather(out)),
        ]
        """What `remove()` takes off."""
        for name in dict.fromkeys((stages.enters, *needs)):
            hook = partial(self._before_stage, name, needs.get(name))
            self.hooks.append(modules[name].register_forward_pre_hook(hook))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model runs as on one device."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def local_part(self, x: Tensor, cut: Cut | None) -> Tensor:
        """This rank's part of the whole hidden state x under `cut`; any other tensor unchanged."""
        if cut is None or self._lengths(x) != cut.lengths:
            return x
        rank, sizes = self.dsp.rank, chunk_sizes(cut.lengths[cut.along], self.dsp.size)
        return x.narrow(self.stages.dims[cut.along], sum(sizes[:rank]), sizes[rank])

    def remove(self) -> None:
        """Remove all hooks; the model is then as it was before."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _lengths(self, x: Tensor) -> dict[str, int]:
        """The lengths of x along the sequence dimensions that it has, by their names."""
        return {name: x.shape[dim] for name, dim in self.stages.dims.items() if dim < x.dim()}

    def _set_in_forward(self, in_forward: bool) -> None:
        """The model's forward begins or ends; outside of it nothing is sharded."""
        self._in_forward, self.current_cut = in_forward, None
        if in_forward:
            self._cuts = {}

    def _before_stage(
        self, name: str, needed_dim: str | None, _: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The arguments of the stage `name`, with its hidden state whole along `needed_dim`."""
        if self._paused:
            return args
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must get the hidden state as its first argument")
        cut = self._cut_of(name, x)
        if cut is None:
            cut, x = self._split(name, x)
        if cut.along == needed_dim:
            other_dims = [dim for dim in self.stages.dims if dim != needed_dim]
            cut, x = self._switch(name, cut, other_dims[0], x)
        if self._in_forward:
            self.current_cut = cut
        return x, *args[1:]

    def _cut_of(self, name: str, x: Tensor) -> Cut | None:
        """How the hidden state x is cut when it gets to `name`, also if the stage runs again."""
        lengths = tuple(self._lengths(x).values())
        cuts = self._cuts.setdefault((name, lengths), [])
        if self._in_forward:
            if self.current_cut not in cuts:
                cuts.append(self.current_cut)
            return self.current_cut
        if len(cuts) == 1 or (cuts and self.dsp.size == 1):  # on one rank all cuts are equal
            return cuts[0]
        raise ValueError(
            f"{name!r} runs outside of the model's forward, with a hidden state of "
            f"{list(lengths)}, which came to it with {len(cuts)} cuts in that forward: such a "
            "backward must begin at the model's output, and a length not be less than the ranks"
        )

    def _split(self, name: str, x: Tensor) -> tuple[Cut, Tensor]:
        if name != self.stages.enters:
            raise ValueError(
                f"the stage {name!r} runs before {self.stages.enters!r}, where the hidden state "
                "is cut: enters must be the first of them"
            )
        start, lengths = self.stages.starts_along, self._lengths(x)
        if len(lengths) < len(self.stages.dims):
            raise ValueError(
                f"dims {dict(self.stages.dims)} do not fit the hidden state {tuple(x.shape)} "
                f"that {name!r} gets"
            )
        return Cut(start, lengths), self.dsp.split(x, self.stages.dims[start], name).tensor

    def _switch(self, name: str, old: Cut, target: str, x: Tensor) -> tuple[Cut, Tensor]:
        dims, shard = self.stages.dims, self._check_shard(name, old, x)
        if self._in_forward:
            self.switches += 1
        new = self.dsp.switch(shard, dims[old.along], dims[target], name)
        return Cut(target, old.lengths), new.tensor

    def _check_shard(self, name: str, cut: Cut, x: Tensor) -> Sharded:
        """x as this rank's shard; refuses an x of another shape."""
        sizes = chunk_sizes(cut.lengths[cut.along], self.dsp.size)
        expected = {**cut.lengths, cut.along: sizes[self.dsp.rank]}
        lengths = self._lengths(x)
        if lengths != expected:
            raise ValueError(
                f"{name!r} got a hidden state with {lengths}, but sharded along {cut.along!r} it "
                f"has {expected} on {self.dsp.comm.me}"
            )
        return Sharded(x, self.stages.dims[cut.along], sizes)

    def _check_left(self, out: Any) -> None:
        if self.current_cut is not None:
            raise ValueError(
                f"the forward ended without {self.stages.leaves!r} behind {self.stages.enters!r}: "
                f"its output is a part, cut along {self.current_cut.along!r}. leaves must name the "
                "module behind which the hidden state is whole again"
            )
        self._mark(out)

    @eager
    def _mark(self, out: Any) -> None:
        """Have a backward through `out` begin with the cuts of the forward that runs now."""
        for _, x in named_tensors(out):
            if x.grad_fn is not None:
                x.register_hook(partial(self._begin_backward, self._cuts))

    def _begin_backward(self, cuts: Cuts, _: Tensor) -> None:
        self._cuts = cuts

    def _gather(self, out: Any) -> Tensor:
        """The whole output of the module `leaves`, from this rank's shard."""
        if self._paused:
            return out
        name = self.stages.leaves
        if not isinstance(out, Tensor):
            raise ValueError(f"{name!r} must return the hidden state, got {type(out).__name__}")
        cut = self._cut_of(name, out)
        if cut is None:
            raise ValueError(f"{name!r} ran before {self.stages.enters!r}: nothing is sharded yet")
        self.current_cut = None
        shard = self._check_shard(name, cut, out)
        whole = self.dsp.gather(shard, self.stages.dims[cut.along], name)
        self._mark(whole)
        return whole


def _resolve(needs: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The dimension that each stage needs, by the name of the module, in the order of `needs`."""
    dims: dict[str, str] = {}
    for pattern, dim in needs.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"needs: {pattern!r} matches no module{nearest(pattern, modules)}")
        for name in _outermost(matching):
            if dims.setdefault(name, dim) != dim:
                raise ValueError(
                    f"needs: the module {name!r} needs {dims[name]!r} and {dim!r}; attention over "
                    "all dimensions at once is SequenceParallel.attention's, and no stage"
                )
    return dims


def _outermost(names: list[str]) -> list[str]:
    """The modules inside none of the others: of "blocks.*" the blocks, not what they consist of."""
    return [x for x in names if not any(x.startswith(f"{other}.") for other in names)]
