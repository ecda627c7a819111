"""Bytes that the layers of a model take in training, counted in a step on fake tensors.

The model runs as after `wf_transformers.attach`, but attention computes nothing: it saves what ours
saves. Of layers that are alike one is run.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from functools import cache, partial
from textwrap import shorten
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.autochunk.graph import StorageTracker, fake_run, no_log
from wf_backends.budget import Layer
from wf_backends.comm import World
from wf_transformers.entry import attach_model

MAX_REASON = 80  # characters
SEQLEN, BATCHES = 256, (512, 1024)  # gradients of weights are small beside so many tokens


def count_layers(model: Any) -> dict[str, Any]:
    """`kinds` and `last_norm` of a `Decoder`, for a model on the device meta.

    `uncounted` if the model cannot run so: experts of transformers 4 look at values, and models of
    other layers cannot be attached. The model has one layer of each kind afterwards, on fake
    tensors.
    """
    try:
        with no_log(), catch_warnings(action="ignore"):
            return _count_layers(model, FakeTensorMode(allow_non_fake_inputs=True))
    except Exception as error:  # it may raise any error
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {"uncounted": shorten(first_line, MAX_REASON, placeholder=" ...")}


def _count_layers(model: Any, mode: FakeTensorMode) -> dict[str, Any]:
    stacks = (
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
    )
    parent, name, stack = next(stacks, (None, "", None))
    if stack is None:
        raise ValueError("no list of its num_hidden_layers layers")
    counts = Counter(map(repr, stack))
    kinds = nn.ModuleList(next(x for x in stack if repr(x) == kind) for kind in counts)
    setattr(parent, name, kinds)
    model.config.num_hidden_layers = len(kinds)
    to_fake_tensors(model, mode)
    model.config.attention_chunk_size = None  # Llama 4's, which our attention refuses
    model.requires_grad_(True).eval()  # in training OPT leaves layers out, by a tensor's value
    kinds.train()
    short, long = (_Step(model, kinds, mode, batch) for batch in BATCHES)
    tokens, layers = SEQLEN * (BATCHES[1] - BATCHES[0]), list[Layer]()
    for index, count in enumerate(counts.values()):
        less, more = short.layer(index), long.layer(index)
        sizes = {key: max(0.0, (more[key] - less[key]) / tokens) for key in more}
        weights = short.weights[index]
        layers.append(Layer(count, sum(weights), max(weights, default=0), **sizes))
    longer, shorter = (step.peaks[-1, "norm"] - step.base(len(kinds)) for step in (long, short))
    gradient = model.config.hidden_size * model.dtype.itemsize  # that of a sum takes no memory
    return {"kinds": tuple(layers), "last_norm": (longer - shorter) / tokens + gradient}


def to_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Have a model on the device meta weights of `mode` on the CPU; tensors that are one stay one.

    Tensors that are plain attributes of modules, such as CTRL's positions, become buffers:
    torch.export would keep them as constants, which must not be fake tensors. torch's `to_empty`
    converts no module that is in two places, such as T5's embedding.
    """

    @cache
    def fake(tensor: Tensor) -> Any:
        with mode:
            empty = torch.empty_like(tensor, device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty

    weights = {id(weight) for weight in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and id(value) not in weights:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
        for tensors in (vars(module), module._parameters, module._buffers):
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = fake(value)


class _Attention(torch.autograd.Function):
    """Saves q, k, v (b, s, h, d), out and lse, and reports its backward to a `_Step`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, step: _Step) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.step = step
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step: _Step = ctx.step
        step.begin("attention")
        step.live[step.part] -= grads[0].nbytes  # counted with the buffers of the route
        results = [torch.empty_like(x) for x in ctx.saved_tensors[:3]]
        step.begin("rest")
        return *results, None


class _Step(SequenceParallel):
    """A forward and a backward on fake tensors, as the only rank.

    Attributes:
        live, peaks: bytes when a part of a layer's backward began, and in it.
        saved: bytes of a part between forward and backward, without its input.
        inputs: of each layer the bytes of its input, and whether it lives until the backward.
        weights: elements of each weight of a layer's MLP.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, mode: FakeTensorMode, batch: int) -> None:
        super().__init__(SequenceParallelConfig(), World(1).comm(0))
        self.tracker, self.calls, self.part = StorageTracker(), 0, (-1, "")
        self.live, self.peaks, self.saved = (defaultdict[Any, float](float) for _ in range(3))
        self.inputs = list[tuple[int, bool]]()
        self.weights = defaultdict[int, list[int]](list)
        self._alive = list[tuple[int, weakref.ref[Any]]]()  # bytes and storages of the inputs
        self._entered = list[tuple[int, int]]()
        with mode:
            ids = torch.zeros(batch, SEQLEN, dtype=torch.long)
        with attach_model(model, self) as handle, torch.enable_grad():
            for index, layer in enumerate(layers):
                for module in (layer, *filter(_has_weights, layer.children())):
                    leave = partial(self._leave, index, module is layer)
                    handle.before(module, self._enter)
                    hook = module.register_forward_hook(leave, with_kwargs=True)
                    handle.undo.callback(hook.remove)
            with fake_run(model, mode, [ids]) as self.tracker:
                loss = model.base_model(input_ids=ids, use_cache=False)[0].sum()
                self.inputs = [(nbytes, storage() is not None) for nbytes, storage in self._alive]
                self.begin("norm")
                loss.backward()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore
        self.calls += 1
        return _Attention.apply(q, k, v, self)

    def begin(self, part: str, index: int | None = None) -> None:
        """A part of the backward begins, of the layer that runs or of that with the index."""
        self.peaks[self.part] = max(self.peaks[self.part], self.tracker.peak)
        self.part = self.part[0] if index is None else index, part
        self.live[self.part] = self.tracker.peak = self.tracker.live

    def base(self, index: int) -> float:
        """Bytes before a layer; its input counts if this is saved by the layer before."""
        saved = [self.saved[i, "before"] + n * kept for i, (n, kept) in enumerate(self.inputs)]
        # In the end there is the gradient of the first input.
        return self.live[-1, "end"] - self.inputs[0][0] + sum(saved[:index])

    def layer(self, index: int) -> dict[str, float]:
        """The sizes of a `Layer`, bytes."""
        base, (nbytes, kept) = self.base(index), self.inputs[index]
        peaks = {part: self.peaks[index, part] - base for part in ("before", "mlp", "rest")}
        return {
            "saved": self.base(index + 1) - base,
            "mlp_saved": self.saved[index, "mlp"],
            "attention": self.live[index, "attention"] - base,
            "mlp_begin": self.live[index, "mlp"] - base,
            "recomputed": nbytes * (not kept),
            **peaks,
        }

    def _enter(self, *_: Any) -> None:
        self._entered.append((self.tracker.live, self.calls))

    def _leave(
        self, index: int, is_layer: bool, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Measure a layer, or a part of it without attention: its MLP."""
        live, calls = self._entered.pop()
        if not is_layer and calls < self.calls:
            return
        x, out = (next(filter(torch.is_tensor, tree_leaves(y))) for y in ((args, kwargs), output))
        part = "before" if is_layer else "mlp"
        self.saved[index, part] += self.tracker.live - live - out.nbytes
        out.register_hook(lambda _: self.begin(part, index))
        if not is_layer:
            self.weights[index] += (p.numel() for p in module.parameters())
            x.register_hook(lambda _: self.begin("rest"))
            return
        if index == 0:
            x.register_hook(lambda _: self.begin("end", -1))
        self._alive.append((x.nbytes, weakref.ref(x.untyped_storage())))


def _has_weights(module: nn.Module) -> bool:
    """Whether several modules in it have parameters."""
    return sum(any(True for _ in child.parameters()) for child in module.children()) > 1
