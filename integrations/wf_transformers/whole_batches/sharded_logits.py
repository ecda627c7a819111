"""Stand-ins in model outputs for tensors of which a rank only has its own rows.

`ShardedLogits` are logits of the whole batch, of which each rank has the rows of its tokens. What
trainers compute from logits per token (log-probabilities, means) is computed on a rank's rows, and
only the results are gathered: (b, S) numbers, never (b, S, V).

Shapes: b batch, s tokens of this rank, S tokens of the whole sequence, n selected tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wf_transformers.calls import PARTIAL_STATES

LogSoftmax = Callable[[Tensor, Tensor], Tensor]
DEFAULT_OPTIONS = {"reduction": "mean", "label_smoothing": 0.0}
"""Options of cross entropy that are supported."""
UNSUPPORTED_USE = (
    "these logits lie on the ranks of the sequence, a row with its token. What can be made of "
    "them: slices of samples and tokens, a quotient by a number, the argmax of each row, TRL's "
    "selective_log_softmax and entropy_from_logits, cross entropy with its mean, and the mean of "
    "the rows that a mask chooses. For anything else ask for logits of all ranks, the memory of "
    "one device: model(**batch, whole_logits=True) (in a subclass of a Trainer: "
    'super().compute_loss(model, {**inputs, "whole_logits": True}, *args, **kwargs)), or, without '
    "DeepSpeed, connect(..., whole_logits=True) or connect_trainer(..., whole_logits=True) once; "
    "whole_logits=False gives this rank's"
)


class Unusable:
    """Any use as a tensor raises an error that says what to do.

    Code that only walks through the fields of an output can do so.
    """

    REASON: ClassVar[str] = UNSUPPORTED_USE
    FUNCTIONS: ClassVar[Mapping[Any, Callable[..., Any]]] = MappingProxyType({})
    """Functions of torch that take it all the same, and what they call."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            self._refuse_use()
        raise AttributeError(name)

    @classmethod
    def _refuse_use(cls, *_: object) -> NoReturn:
        raise NotImplementedError(cls.REASON)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in cls.FUNCTIONS:
            cls._refuse_use()
        return cls.FUNCTIONS[function](*args, **(kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        self._refuse_use()

    def __truediv__(self, other: Any) -> Any:
        self._refuse_use()

    __len__ = __float__ = __neg__ = __add__ = __sub__ = __mul__ = _refuse_use
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _refuse_use


class LocalStates(Unusable):
    """Hidden states that a trainer asks for."""

    REASON = PARTIAL_STATES


@dataclass(frozen=True, eq=False)
class ShardedLogits(Unusable):
    """(b, n, V) logits of n of the S tokens. Uses that are not defined here raise an error.

    Attributes:
        local: (b, s, V), the rows of this rank's tokens.
        tokens: the n selected tokens of the S.
        seqlen: S.
        starts: (b,) int64, tokens of padding on the left of each sample, which were moved to its
            right before the cut.
        gather_rows: (b, s) of all ranks, as cut -> (b, S), differentiable, on every rank.
        cut_rows: (b, S), with padding on the right -> (b, s).
    """

    local: Tensor
    tokens: range
    seqlen: int
    starts: Tensor
    gather_rows: Callable[[Tensor], Tensor]
    cut_rows: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> torch.Size:
        samples, _, vocabulary = self.local.shape
        return torch.Size((samples, len(self.tokens), vocabulary))

    def size(self, dim: int) -> int:
        return self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def __truediv__(self, number: float) -> ShardedLogits:
        return replace(self, local=self.local / number)

    def div_(self, number: float) -> ShardedLogits:
        self.local.div_(number)
        return self

    def __getitem__(self, key: Any) -> Any:
        """Slices of samples and tokens, or a list of samples; for a boolean mask (b, n)
        `SelectedLogits`.

        One sample keeps its dimension: logits[0] is (1, n, V).
        """
        if isinstance(key, Tensor):
            return SelectedLogits(self, key)
        samples, tokens, *others = _with_all_dims(key if isinstance(key, tuple) else (key,))
        samples = slice(samples, samples + 1) if isinstance(samples, int) else samples
        are_slices = isinstance(samples, slice | list) and isinstance(tokens, slice)
        if not are_slices or any(other != slice(None) for other in others):
            self._refuse_use()
        local, starts = self.local[samples], self.starts[samples]
        return replace(self, local=local, starts=starts, tokens=self.tokens[tokens])

    def contiguous(self) -> ShardedLogits:
        return self

    def view(self, *shape: int) -> SelectedLogits:
        """As (b n, V), and no other shape."""
        if shape != (-1, self.shape[-1]):
            self._refuse_use()
        return SelectedLogits(
            self, torch.ones(self.shape[:2], dtype=torch.bool, device=self.device)
        )

    def detach(self) -> ShardedLogits:
        return replace(self, local=self.local.detach())

    def chunk(self, chunks: int, dim: int) -> tuple[ShardedLogits, ...]:
        """Parts of the samples."""
        if dim != 0:
            self._refuse_use()
        parts = torch.arange(len(self.local)).chunk(chunks)
        return tuple(self[int(part[0]) : int(part[-1]) + 1] for part in parts)

    def index_select(self, dim: int, index: Tensor) -> ShardedLogits:
        """Some samples."""
        if dim != 0:
            self._refuse_use()
        return self[index.tolist()]

    def mean(self) -> Tensor:
        """For a log: it covers padding, too, whose logits are not those of one device."""
        if self.local.requires_grad:  # a loss of it would be wrong
            self._refuse_use()
        return self.row_means().mean()

    def nansum(self) -> Tensor:
        """For a log: without gradients, and as `mean` of padding, too."""
        return self._gather_tokens(self.local.detach().nansum(-1)).nansum()

    def log_probabilities(self, labels: Tensor, log_softmax: LogSoftmax) -> Tensor:
        """(b, n): `log_softmax(logits, labels)` for labels (b, n), on every rank."""
        samples, num_tokens, _ = self.shape
        whole = labels.new_zeros(samples, self.seqlen)
        whole[:, _slice(self.tokens)] = labels.view(samples, num_tokens)
        return self._gather_tokens(
            log_softmax(self.local, self.cut_rows(rolled(whole, self.starts)))
        )

    def argmax(self, dim: int) -> Tensor:
        """(b, n) int64: the most likely token of each row."""
        if dim not in (-1, 2):
            self._refuse_use()
        return self._gather_tokens(self.local.argmax(-1))

    def entropies(self, entropy: Callable[..., Tensor]) -> Tensor:
        """(b, n): `entropy(logits)` of each row."""
        return self._gather_tokens(entropy(self.local))

    def row_means(self) -> Tensor:
        """(b, n): the mean of each token's logits."""
        return self._gather_tokens(self.local.mean(-1))

    def _gather_tokens(self, local: Tensor) -> Tensor:
        """(b, s) -> (b, n): the selected tokens of all ranks."""
        whole = rolled(self.gather_rows(local), -self.starts)
        return whole[:, _slice(self.tokens)].clone()

    def _flattened(self, **options: int) -> SelectedLogits:
        if options != {"end_dim": 1}:
            self._refuse_use()
        return self.view(-1, self.shape[-1])

    FUNCTIONS = MappingProxyType({torch.flatten: _flattened})


@dataclass(frozen=True, eq=False)
class SelectedLogits(Unusable):
    """The rows of logits that a mask (b, n) selects: for means and plain cross entropy."""

    logits: ShardedLogits
    mask: Tensor

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def mean(self, dim: int | None = None) -> Tensor:
        """Of all elements, or with dim=-1 of each row."""
        if dim not in (None, -1):
            self._refuse_use()
        means = self.logits.row_means()
        selected = means[self.mask.view_as(means)]
        return selected.mean() if dim is None else selected

    def _cross_entropy(self, labels: Tensor, ignore_index: int = -100, **options: Any) -> Tensor:
        given = {key: x for key, x in options.items() if x is not None}
        if not given.items() <= DEFAULT_OPTIONS.items():
            self._refuse_use()
        whole = labels.new_full(self.logits.shape[:2], ignore_index)
        whole[self.mask.view_as(whole)] = labels
        valid = whole != ignore_index
        log_probs = self.logits.log_probabilities(whole.masked_fill(~valid, 0), _log_softmax)
        return -log_probs[valid].mean()

    FUNCTIONS = MappingProxyType({cross_entropy: _cross_entropy})


def _log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return -cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def log_softmax_of(original: LogSoftmax, logits: Any, index: Tensor) -> Tensor:
    """Replaces TRL's `selective_log_softmax`: log-probabilities of `index`, (b, n)."""
    if isinstance(logits, ShardedLogits):
        return logits.log_probabilities(index, original)
    return original(logits, index)


def entropies_of(original: Callable[..., Tensor], logits: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces TRL's `entropy_from_logits`: the entropy of each row, (b, n)."""
    if isinstance(logits, ShardedLogits):
        return logits.entropies(original)
    return original(logits, *args, **kwargs)


def _with_all_dims(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index of three dimensions, with slices for its Ellipsis and for those that it lacks."""
    position = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    before, after = key[:position], key[position + 1 :]
    return *before, *[slice(None)] * (3 - len(before) - len(after)), *after


def rolled(x: Tensor, shift: Tensor) -> Tensor:
    """(b, S, ...) rotated: sample i begins with its element shift[i], the ones before come last."""
    seqlen = x.shape[1]
    index = (torch.arange(seqlen, device=x.device) + shift[:, None]) % seqlen
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _slice(tokens: range) -> slice:
    return slice(tokens.start, tokens.stop, tokens.step)
