"""Layers with a convolution and a recurrence, run by the ranks on a share of the channels each.

The layer projects its own tokens. Then channels are exchanged for tokens: a rank has all tokens, in
sequence order, of its channels, and runs the layer's own code on them, document by document. The
results go back to the ranks that own the tokens. A gradient of a parameter is this rank's part of
the sum over the ranks, as attention's is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_backends.dsp import RECEIVER
from wf_backends.parallel import ChannelExchange
from wf_backends.schedule import SLICE_WORDS
from wf_transformers.attention import Attention
from wf_transformers.calls import CACHES, ON_ONE_PROCESS
from wf_transformers.families.mixers import MIXERS
from wf_transformers.families.shares import Mixer, Share
from wf_transformers.handle import Handle
from wf_transformers.models import own_class, refuse_varying_rope, row_of

Borders = Sequence[int] | None  # cu_seqlens as host integers; None is one document
MIXING_ENDS = {
    "Indexer": "an indexer, which chooses the keys of each query by their scores",
    "Compressor": "a compressor, which makes one key of several tokens",
}
"""Ends of class names: parts of sparse attention (DeepSeek V3.2 and V4, GLM-5), which shows only
in sequences longer than what it chooses from."""


def refuse_unspreadable(model: PreTrainedModel) -> None:
    """Refuse a model of tokens that would be wrong with its tokens on several ranks.

    Raises:
        NotImplementedError: for rotary frequencies that follow from the longest position, and for
            layers other than attention that mix tokens.
    """
    refuse_varying_rope(type(model).__name__, model.config)
    refuse_mixing(model)


def refuse_mixing(model: nn.Module) -> None:
    """Refuse layers of `model` that mix tokens and are no attention over the ranks.

    Modules that are given the SequenceParallel are left alone, models of images or sounds, and
    layers in the table of mixers.py.

    Raises:
        NotImplementedError: naming the first one.
    """
    for name, module in model.named_modules():
        what = _mixes(module)
        if what is not None and not _is_left_alone(model, name):
            raise NotImplementedError(
                f"{type(model).__name__}.{name} is {what}: only attention may mix tokens that are "
                "on several ranks"
            )


def _mixes(module: nn.Module) -> str | None:
    """What a module is, if it mixes tokens."""
    kind = type(module).__name__
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size[0] > 1:
        return f"a convolution over tokens, kernel_size {module.kernel_size[0]}"
    if isinstance(module, nn.RNNBase):
        return f"a recurrence over tokens, {kind}"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's own attention, over this rank's tokens"
    if isinstance(module, _BatchNorm):
        return f"a mean over all tokens of a batch, {kind}"
    name = own_class(module).__name__
    return next((what for end, what in MIXING_ENDS.items() if name.endswith(end)), None)


def _is_left_alone(model: nn.Module, name: str) -> bool:
    """Whether a module is inside one that cuts what it mixes, or that takes images or sounds, which
    are cut behind layers that mix them."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]
    return any(
        hasattr(one, RECEIVER)
        or row_of(MIXERS, one) is not None
        or (isinstance(one, PreTrainedModel) and one.main_input_name != "input_ids")
        for one in around
    )


def spread_mixers(model: nn.Module, handle: Handle) -> None:
    """Have the layers of the table exchange channels for tokens, until the handle is removed.

    Raises:
        NotImplementedError: for a layer whose channels do not divide, or with parameters that the
            table does not know, such as adapters.
    """
    exchange = ChannelExchange(handle.sp)
    for name, module in model.named_modules():
        row = row_of(MIXERS, module)
        if row is not None and not is_spread(module):
            with handle.removed_on_error():
                where = f"{type(model).__name__}.{name}"
                forward = SpreadMixer(module, row, exchange, handle.attention, where)
                handle.set(module, "forward", forward)


def is_spread(module: nn.Module) -> bool:
    """Whether `spread_mixers` has taken a layer over."""
    return isinstance(vars(module).get("forward"), SpreadMixer)


def has_mixers(model: nn.Module) -> bool:
    """Whether a layer of the model is in the table."""
    return any(row_of(MIXERS, module) is not None for module in model.modules())


def refuse_unspread(model: nn.Module) -> None:
    """Refuse a model that was built with our name and whose other layers nobody took over.

    Raises:
        ValueError: naming the first one.
    """
    for name, module in model.named_modules():
        if row_of(MIXERS, module) is not None and not is_spread(module):
            raise ValueError(
                f"{type(model).__name__}.{name} mixes tokens by a convolution and a recurrence: "
                "call wf_transformers.apply(model, sp) once, which has the ranks share its channels"
            )


class SpreadMixer:
    """The forward of one layer.

    Raises:
        NotImplementedError: as `spread_mixers`, naming the layer `where`.
    """

    def __init__(
        self,
        layer: nn.Module,
        row: Mixer,
        exchange: ChannelExchange,
        attention: Attention,
        where: str,
    ) -> None:
        self.layer, self.row, self.exchange, self.attention = layer, row, exchange, attention
        self._shares = lru_cache(self._make_shares)
        self._orders = lru_cache(self._make_orders)
        try:
            self._small = self._on_a_share()
        except NotImplementedError as error:
            raise NotImplementedError(f"{where} ({type(layer).__name__}): {error}") from None

    @eager
    def __call__(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        """(b, s, width) -> (b, s, width), this rank's rows, and what else the layer returns.

        Masks are left out: padding is last.
        """
        name = type(self.layer).__name__
        if any(kwargs.get(key) is not None for key in (*CACHES, "past_key_value", "cache_params")):
            raise NotImplementedError(f"{name} is called with a cache; {ON_ONE_PROCESS}")
        self.attention.asked = True
        self.attention.documents.check_rows(name, hidden_states.shape[1])
        borders = self._borders()
        features, kept = self.row.project(self.layer, hidden_states)
        there, back = self._orders(features.device)
        sending = features[..., there].unflatten(-1, (self.exchange.sp.size, -1))
        found, rest = self._run(self.exchange.gather(sending, borders), borders)
        result = self.exchange.bring_back(found, borders).flatten(2)[..., back]
        result = self.row.finish(self.layer, result, kept)
        return (result, *rest) if rest else result

    def _borders(self) -> Borders:
        told = self.attention.documents.current({})
        if SLICE_WORDS[0] in told:
            raise NotImplementedError(
                f"{type(self.layer).__name__} mixes tokens in their order, of which slices of a "
                "mask say nothing: take cu_seqlens, or a model of attention alone"
            )
        return told.get("cu_seqlens")

    def _run(self, x: Tensor, borders: Borders) -> tuple[Tensor, tuple[Any, ...]]:
        """The layer's own code on this rank's channels of all rows, (b, S, c) -> (b, S, c').

        Beside it what else the layer returns, of its last document.
        """
        cuts = self._shares(x.device)[self.exchange.sp.rank].parameters
        values: dict[str, Tensor] = {}
        for name, _ in self._small.named_parameters():
            value: Tensor = self.layer.get_parameter(name)
            values[name] = value.index_select(*cuts[name]) if name in cuts else value
        edges: Any = borders if borders is not None else (0, x.shape[1])
        found: list[Any] = []
        for start, stop in pairwise(edges):
            document = x[:, start:stop]
            words = self.row.words(self._small, document)
            found.append(functional_call(self._small, values, (document,), words))
        if isinstance(found[0], Tensor):
            return torch.cat(found, dim=1), ()
        return torch.cat([first for first, *_ in found], dim=1), found[-1][1:]

    def _make_shares(self, device: torch.device) -> list[Share]:
        """Of all ranks, for a layer that computes on `device`."""
        size = self.exchange.sp.size
        with device:
            return [self.row.share(self.layer, rank, size) for rank in range(size)]

    def _make_orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The projected features by rank, and where the results stand in what comes back."""
        shares = self._shares(device)
        outputs = torch.cat([share.outputs for share in shares])
        return torch.cat([share.inputs for share in shares]), outputs.argsort()

    def _on_a_share(self) -> nn.Module:
        """A copy of the layer with the sizes of a share, without parameters of its own.

        It is in evaluation mode, in which the kernels for CUDA are called one by one, and dt, B and
        C can be summed between them.
        """
        layer, row = self.layer, self.row
        share = self._shares(torch.device("cpu"))[self.exchange.sp.rank]
        instead: Mapping[str, nn.Module] = row.instead(layer, share)
        memo: dict[int, Any] = {id(layer.get_submodule(n)): m for n, m in instead.items()}
        memo |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in layer.parameters()}
        memo[id(getattr(layer, "config", None))] = getattr(layer, "config", None)
        memo |= {id(state): None for m in layer.modules() for state in _tensors(m)}
        small = deepcopy(layer, memo).eval()
        for path, value in share.attributes.items():
            owner, _, name = path.rpartition(".")
            setattr(small.get_submodule(owner), name, value)
        for name in row.summed:
            small.get_submodule(name).register_forward_hook(self._sum)
        known = {*share.parameters, *row.whole}
        if unknown := [name for name, _ in small.named_parameters() if name not in known]:
            raise NotImplementedError(f"its parameters {unknown} cannot be cut by channels")
        return small

    def _sum(self, _: nn.Module, __: Any, x: Tensor) -> Tensor:
        return self.exchange.sum(x)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Attributes that are neither parameters nor buffers, such as the last call's state."""
    return [value for value in vars(module).values() if isinstance(value, Tensor)]
