"""How a tile's scores follow from q k^T, and which of their weights are dropped.

Shapes: b batch, i query rows, j key rows, h query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from wf_backends.kernels.dropout import Dropout
from wf_backends.schedule import Range


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What softmax is taken of, beside the mask.

        x = scale q k^T
        x' = softcap tanh(x / softcap)                (softcap 0: x' = x)
        score = x' - slopes |position of row - position of key|

    and what is dropped of the weights softmax(score) before they meet the values.

    Source: soft cap as in Gemma 2 (arXiv 2408.00118, section 2); ALiBi (arXiv 2108.12409),
    symmetric as in flash-attn.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi: (h,), of the heads at hand."""
    dropout: Dropout | None = None
    rows: Tensor | None = None
    """(i,) int64: the global positions of the rows, where slopes or dropout ask for them."""
    keys: Tensor | None = None
    """(j,) int64: those of the keys."""

    def at(self, rows: Tensor, keys: Tensor) -> Scores:
        """Those of a tile whose rows and keys have these positions."""
        return replace(self, rows=rows, keys=keys)

    def part(self, rows: slice, keys: slice) -> Scores:
        """Those of some rows and keys of the tile."""
        if self.rows is None or self.keys is None:
            return self
        return self.at(self.rows[rows], self.keys[keys])

    def of_heads(self, heads: Range) -> Scores:
        """Those of the heads start to stop of the heads at hand."""
        slopes = None if self.slopes is None else self.slopes[slice(*heads)]
        dropout = None if self.dropout is None else self.dropout.of_heads(heads)
        return replace(self, slopes=slopes, dropout=dropout)
