"""Runs layers with a convolution and a recurrence: each rank has some channels of all tokens.

A rank projects its own tokens. Then ranks exchange channels for tokens: a rank gets its channels of
all tokens in sequence order, and runs the layer's code on them, document by document. The results
are sent back to the ranks that own the tokens. A rank's gradient of a parameter is its part of the
sum over the ranks, as in attention.

Shapes: b batch, s rows of this rank, S rows of the whole sequence, c channels of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_backends.dsp import RECEIVER
from wf_backends.parallel import ChannelExchange
from wf_transformers.attention.function import Attention
from wf_transformers.calls import CACHE_NAMES, ON_ONE_PROCESS, Kwargs
from wf_transformers.families.compressors import COMPRESSED
from wf_transformers.families.indexers import CHOICES
from wf_transformers.families.media_table import media_modules
from wf_transformers.families.mixers import MIXERS
from wf_transformers.families.shares import Mixer, Share
from wf_transformers.families.stacks import stacks_of
from wf_transformers.handle import Handle
from wf_transformers.models import refuse_varying_rope, row_of, transformers_class

Borders = Sequence[int] | None  # cu_seqlens as host integers; None is one document
MIXING_SUFFIXES = {
    "Indexer": "an indexer, which chooses the keys of each query by their scores",
    "Compressor": "a compressor, which makes one key of several tokens",
    "LightningAttention": "linear attention, a recurrence over tokens",
    "HyenaFilter": "a Hyena filter, a convolution over all tokens",
    "HyenaCascade": "a Hyena filter, a convolution over all tokens",
}
"""Suffix of a class name -> description: parts of sparse attention (Qwen4),
which `verify` misses, since they have no effect on sequences shorter than the number of chosen
keys; linear attention; and those of StripedHyena, Evo and Evo 2, whose inputs `verify` does not
know."""


def refuse_unspreadable(model: PreTrainedModel) -> None:
    """Refuse a language model that would be wrong with its tokens on several ranks: by rotary
    frequencies that depend on the largest position, or layers besides attention that mix tokens."""
    refuse_varying_rope(model)
    refuse_mixing(model)


def refuse_mixing(model: nn.Module) -> None:
    """Refuse layers of `model` other than attention that mix tokens.

    Not checked: modules that get the SequenceParallel, encoders of images or sounds, and layers in
    the tables of mixers.py, indexers.py and compressors.py.
    """
    for name, module in model.named_modules():
        description = _describe_mixing(module)
        if description is not None and not _is_exempt(model, name):
            raise NotImplementedError(
                f"{type(model).__name__}.{name} is {description}: only attention may mix tokens "
                f"that are on several ranks, or a module that has a method {RECEIVER}(sp)"
            )


def _describe_mixing(module: nn.Module) -> str | None:
    """As text, how a module mixes tokens; None if it does not."""
    class_name = type(module).__name__
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size[0] > 1:
        return f"a convolution over tokens, kernel_size {module.kernel_size[0]}"
    if isinstance(module, nn.RNNBase):
        return f"a recurrence over tokens, {class_name}"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's own attention, over this rank's tokens"
    if isinstance(module, _BatchNorm):
        return f"a mean over all tokens of a batch, {class_name}"
    name = transformers_class(module).__name__
    return next((text for suffix, text in MIXING_SUFFIXES.items() if name.endswith(suffix)), None)


def _is_exempt(model: nn.Module, name: str) -> bool:
    """Whether a module is inside one that cuts what it mixes, or that takes images or sounds or has
    stacks: these are cut after the layers that mix them, and whole before a head that does."""
    parts = name.split(".")
    if not media_modules(model).isdisjoint(parts):
        return True
    ancestors = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
    return any(
        hasattr(ancestor, RECEIVER)
        or row_of({**MIXERS, **CHOICES, **COMPRESSED}, ancestor) is not None
        or isinstance(ancestor, PreTrainedModel)
        and (ancestor.main_input_name != "input_ids" or stacks_of(ancestor))
        for ancestor in ancestors
    )


def spread_mixers(model: nn.Module, handle: Handle) -> None:
    """Make the layers of the table exchange channels for tokens, until `handle.remove()`."""
    exchange = ChannelExchange(handle.sp)
    for name, module, row in mixers_in(model):
        if not is_spread(module):
            path = f"{type(model).__name__}.{name}"
            forward = SpreadMixer(module, row, exchange, handle.attention, path)
            handle.set(module, "forward", forward)


def is_spread(module: nn.Module) -> bool:
    """Whether `spread_mixers` has replaced the forward of a layer."""
    return isinstance(vars(module).get("forward"), SpreadMixer)


def mixers_in(model: nn.Module) -> list[tuple[str, nn.Module, Mixer]]:
    """The layers of the model that are in the table of mixers: name, layer and row."""
    layers = ((name, module, row_of(MIXERS, module)) for name, module in model.named_modules())
    return [(name, module, row) for name, module, row in layers if row is not None]


def refuse_missing_apply(model: nn.Module) -> None:
    """Refuse a model that was built with our name, and has mixers that were not spread."""
    for name, module, _ in mixers_in(model):
        if not is_spread(module):
            raise ValueError(
                f"{type(model).__name__}.{name} mixes tokens by a convolution and a recurrence: "
                "call wf_transformers.apply(model, sp) once, which has the ranks share its channels"
            )


class SpreadMixer:
    """Replaces the forward of one layer; refused are layers whose channels do not divide, and those
    with parameters that the table does not know, such as adapters."""

    def __init__(
        self,
        layer: nn.Module,
        row: Mixer,
        exchange: ChannelExchange,
        attention: Attention,
        layer_path: str,
    ) -> None:
        self.layer, self.row, self.exchange, self.attention = layer, row, exchange, attention
        self._shares = lru_cache(self._make_shares)
        self._feature_orders = lru_cache(self._make_feature_orders)
        try:
            self._layer_of_share = self._make_layer_of_share()
        except NotImplementedError as error:
            raise NotImplementedError(f"{layer_path} ({type(layer).__name__}): {error}") from None

    @eager
    def __call__(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        """(b, s, width) -> (b, s, width), this rank's rows, and the layer's other results if any.

        Masks are not needed: padding is at the end of the sequence.
        """
        name, cache = type(self.layer).__name__, self.attention.cache
        key = next((key for key in CACHE_NAMES if kwargs.get(key) is not None), "")
        if key and kwargs[key] is not cache:
            raise NotImplementedError(f"{name} is called with a cache; {ON_ONE_PROCESS}")
        self.attention.was_called = True
        if cache is not None and cache.length:
            return cache.by_module[self.layer].run(self.layer, hidden_states, key)
        self.attention.documents.check_rows(name, hidden_states.shape[1])
        # in generation documents are those of padding
        borders = None if cache is not None else self.attention.documents.borders(name)
        features, local = self.row.project(self.layer, hidden_states)
        by_rank, by_feature = self._feature_orders(features.device)
        sends = features[..., by_rank].unflatten(-1, (self.exchange.sp.size, -1))
        kept: Kwargs = {}
        if cache is not None:
            mask = cache.padding_mask(features.device)
            self._check_padding(hidden_states, mask)
            kept = {key: cache.start(self.layer).cache, "attention_mask": mask}
        y, others = self._run(self.exchange.gather(sends, borders), borders, kept)
        if cache is not None:
            shares = self._shares(features.device)
            cache.by_module[self.layer].keep(self.exchange.sp, shares, cache.new)
        y = self.exchange.bring_back(y, borders).flatten(2)[..., by_feature]
        result = self.row.finish(self.layer, y, local)
        return (result, *others) if others else result

    def _check_padding(self, hidden_states: Tensor, mask: Tensor | None) -> None:
        """Refuse padding that the layer, which masks hidden states, would give features by a bias:
        here features are masked."""
        padding = hidden_states.new_zeros(1, 1, hidden_states.shape[-1])
        if mask is not None and self.row.project(self.layer, padding)[0].any():
            raise NotImplementedError(
                f"{type(self.layer).__name__} adds a bias to padding on the left: give samples of "
                "one length"
            )

    def _run(self, x: Tensor, borders: Borders, kept: Kwargs) -> tuple[Tensor, tuple[Any, ...]]:
        """Run the layer's code on this rank's channels of all rows: (b, S, c) -> (b, S, c').

        `kept` are the arguments with a cache and for padding, in generation. The second result is
        what else the layer returns, for the last document.
        """
        cuts = self._shares(x.device)[self.exchange.sp.rank].parameters
        values: dict[str, Tensor] = {}
        for name, _ in self._layer_of_share.named_parameters():
            value = attrgetter(name)(self.layer)  # FSDP1 makes them plain tensors in a forward
            values[name] = value.index_select(*cuts[name]) if name in cuts else value
        if borders is None:
            borders = (0, x.shape[1])
        results: list[Any] = []
        for start, stop in pairwise(borders):
            document = x[:, start:stop]
            kwargs = self.row.call_kwargs(self._layer_of_share, document) | kept
            results.append(functional_call(self._layer_of_share, values, (document,), kwargs))
        if isinstance(results[0], Tensor):
            return torch.cat(results, dim=1), ()
        return torch.cat([y for y, *_ in results], dim=1), results[-1][1:]

    def _make_shares(self, device: torch.device) -> list[Share]:
        """The shares of all ranks, with their indices on `device`."""
        size = self.exchange.sp.size
        with device:
            return [self.row.share(self.layer, rank, size) for rank in range(size)]

    def _make_feature_orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices that sort projected features by rank, and results of all ranks by feature."""
        shares = self._shares(device)
        outputs = torch.cat([share.outputs for share in shares])
        return torch.cat([share.inputs for share in shares]), outputs.argsort()

    def _make_layer_of_share(self) -> nn.Module:
        """A copy of the layer with the sizes of a share, and parameters on the meta device.

        In evaluation mode it calls its CUDA kernels one by one, so that dt, B and C can be summed
        in between.
        """
        layer, row = self.layer, self.row
        share = self._shares(torch.device("cpu"))[self.exchange.sp.rank]
        replacements: Mapping[str, nn.Module] = row.replacements(layer, share)
        modules = dict(layer.named_modules())
        memo: dict[int, Any] = {id(modules[n]): m for n, m in replacements.items() if n in modules}
        memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in layer.parameters()}
        memo[id(getattr(layer, "config", None))] = getattr(layer, "config", None)
        attributes = (x for m in layer.modules() for x in vars(m).values())
        memo |= {id(x): None for x in attributes if isinstance(x, Tensor)}  # the last call's state
        layer_of_share = deepcopy(layer, memo).eval()
        for name in replacements.keys() - modules.keys():  # norm of a Falcon-H1 without one
            layer_of_share.add_module(name, replacements[name])
        for path, value in share.attributes.items():
            owner, _, name = path.rpartition(".")
            setattr(layer_of_share.get_submodule(owner), name, value)
        for name in row.summed_modules:
            layer_of_share.get_submodule(name).register_forward_hook(self._sum)
        known = {*share.parameters, *row.whole_parameters}
        if unknown := [name for name, _ in layer_of_share.named_parameters() if name not in known]:
            raise NotImplementedError(f"its parameters {unknown} cannot be cut by channels")
        for name, module in layer_of_share.named_modules():
            if isinstance(module, nn.Conv1d):  # each channel is a group
                module.groups = len(share.parameters[f"{name}.weight"][1])
        return layer_of_share

    def _sum(self, _: nn.Module, __: Any, x: Tensor) -> Tensor:
        return self.exchange.sum(x)
