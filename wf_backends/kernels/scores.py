"""How a tile's scores follow from q k^T.

Shapes: b batch, i query rows, j key rows, h query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from wf_backends.schedule import Range


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What softmax is taken of, beside the mask.

        x = scale q k^T
        x' = softcap tanh(x / softcap)                (softcap 0: x' = x)
        score = x' - slopes |position of row - position of key|

    Source: soft cap as in Gemma 2 (arXiv 2408.00118, section 2); ALiBi (arXiv 2108.12409),
    symmetric as in flash-attn.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    """ALiBi: (h,), of the heads at hand."""
    rows: Tensor | None = None
    """(i,) int64: the global positions of the rows, where slopes ask for them."""
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
        if self.slopes is None:
            return self
        return replace(self, slopes=self.slopes[slice(*heads)])
