"""What stands in an output where a tensor is not what one device would have.

`ShardedLogits` are those of the whole batch, of which a rank holds the rows of its tokens. What
trainers make of logits per token (log-probabilities, means) is made of a rank's own rows, and only
that is brought together: (b, S) numbers, never (b, S, vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wf_transformers.calls import PARTIAL_STATES

LogSoftmax = Callable[[Tensor, Tensor], Tensor]
PLAIN = {"reduction": "mean", "label_smoothing": 0.0}
"""What cross entropy may be told."""
LACKS = (
    "these logits lie on the ranks of the sequence, a row with its token. What can be made of "
    "them: slices of samples and tokens, a quotient by a number, TRL's selective_log_softmax, "
    "cross entropy with its mean, and the mean of the rows that a mask chooses. For anything else "
    "say model(**batch, whole_logits=True): logits of all ranks, the memory of one device"
)


class Unusable:
    """Any use as a tensor is an error that says what to do.

    Left alone, it is a field of the output as any other, for what walks through outputs.
    """

    WHY: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            self._use()
        raise AttributeError(name)

    @classmethod
    def _use(cls, *_: object) -> NoReturn:
        raise NotImplementedError(cls.WHY)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls._use()

    def __getitem__(self, key: Any) -> Any:
        self._use()

    def __truediv__(self, other: Any) -> Any:
        self._use()

    __len__ = __float__ = __neg__ = __add__ = __sub__ = __mul__ = _use
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _use


class LocalLogits(Unusable):
    """In training beside labels, where nobody asked for logits."""

    WHY = (
        "these logits are of this rank's tokens only, and a mean over them is none of the batch: "
        "say model(**batch, whole_logits=True), or connect(..., whole_logits=True) or "
        "connect_trainer(..., whole_logits=True) once, for those of all ranks; whole_logits=False "
        "gives this rank's"
    )


class LocalStates(Unusable):
    """In place of hidden states that a trainer asks for."""

    WHY = PARTIAL_STATES


@dataclass(frozen=True, eq=False)
class Rows:
    """Which tokens of a batch of samples are this rank's.

    Attributes:
        whole: (b, s) of the ranks -> (b, S), differentiable, on every rank.
        mine: (b, S) -> (b, s).
        starts: (b,) int64, tokens of padding on the left of a sample, which were moved behind it
            before the cut.
        seqlen: S.
    """

    whole: Callable[[Tensor], Tensor]
    mine: Callable[[Tensor], Tensor]
    starts: Tensor
    seqlen: int

    def gather(self, x: Tensor) -> Tensor:
        """(b, s) -> (b, S), in the order of the caller's batch."""
        return rolled(self.whole(x), -self.starts)

    def cut(self, x: Tensor) -> Tensor:
        """(b, S) in the order of the caller's batch -> (b, s)."""
        return self.mine(rolled(x, self.starts))


@dataclass(frozen=True, eq=False)
class ShardedLogits(Unusable):
    """(b, n, V) logits of n of the S tokens. Any use that is not below is an error that says so.

    Attributes:
        local: (b, s, V), the rows of this rank's tokens.
        rows: which these are.
        tokens: which n of the S tokens are meant.
    """

    WHY = LACKS

    local: Tensor
    rows: Rows
    tokens: range

    @property
    def shape(self) -> torch.Size:
        samples, _, vocabulary = self.local.shape
        return torch.Size((samples, len(self.tokens), vocabulary))

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def __truediv__(self, number: float) -> ShardedLogits:
        return replace(self, local=self.local / number)

    def __getitem__(self, key: Any) -> Any:
        """Samples and tokens by slices; by a mask (b, n) of booleans `Chosen`.

        One sample keeps its dimension: logits[0] is (1, n, V).
        """
        if isinstance(key, Tensor):
            return Chosen(self, key)
        samples, tokens, *others = key if isinstance(key, tuple) else (key, slice(None))
        samples = slice(samples, samples + 1) if isinstance(samples, int) else samples
        good = isinstance(samples, slice) and isinstance(tokens, slice)
        if not good or any(other != slice(None) for other in others):
            self._use()
        rows = replace(self.rows, starts=self.rows.starts[samples])
        return replace(self, local=self.local[samples], rows=rows, tokens=self.tokens[tokens])

    def log_probabilities(self, labels: Tensor, log_softmax: LogSoftmax) -> Tensor:
        """(b, n): what `log_softmax(logits, labels)` gives for (b, n) labels, on every rank."""
        samples, chosen, _ = self.shape
        whole = labels.new_zeros(samples, self.rows.seqlen)
        whole[:, _slice(self.tokens)] = labels.view(samples, chosen)
        return self._chosen(log_softmax(self.local, self.rows.cut(whole)))

    def row_means(self) -> Tensor:
        """(b, n): the mean of each token's logits."""
        return self._chosen(self.local.mean(-1))

    def _chosen(self, local: Tensor) -> Tensor:
        return self.rows.gather(local)[:, _slice(self.tokens)].clone()

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if function is torch.flatten and dict(kwargs) == {"end_dim": 1}:
            return Flattened(args[0])
        cls._use()


@dataclass(frozen=True, eq=False)
class Chosen(Unusable):
    """The rows of logits that a mask (b, n) chooses. Of these there is the mean."""

    WHY = LACKS

    logits: ShardedLogits
    mask: Tensor

    def mean(self) -> Tensor:
        means = self.logits.row_means()
        return means[self.mask.view_as(means)].mean()


@dataclass(frozen=True, eq=False)
class Flattened(Unusable):
    """Logits as (b n, V), for plain cross entropy."""

    WHY = LACKS

    logits: ShardedLogits

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        words = {k: v for k, v in kwargs.items() if v is not None and k != "ignore_index"}
        if function is not cross_entropy or not words.items() <= PLAIN.items():
            cls._use()
        flattened, labels = args
        valid = labels != kwargs.get("ignore_index", -100)
        logps = flattened.logits.log_probabilities(labels.masked_fill(~valid, 0), _log_softmax)
        return -logps.flatten()[valid].mean()


def _log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return -cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def log_softmax_of(original: LogSoftmax, logits: Any, index: Tensor) -> Tensor:
    """In place of TRL's `selective_log_softmax`: log-probabilities of `index`, (b, n)."""
    if isinstance(logits, ShardedLogits):
        return logits.log_probabilities(index, original)
    return original(logits, index)


def rolled(x: Tensor, by: Tensor) -> Tensor:
    """(b, S, ...): sample b begins at its element `by[b]`, and its first ones follow the last."""
    seqlen = x.shape[1]
    index = (torch.arange(seqlen, device=x.device) + by[:, None]) % seqlen
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _slice(tokens: range) -> slice:
    return slice(tokens.start, tokens.stop, tokens.step)
