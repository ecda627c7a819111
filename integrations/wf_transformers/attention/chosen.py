"""Attention of layers that choose what each row sees: keys, or entries that stand for several.

Shapes: b batch, s rows of this rank, h heads, g key heads, d head_dim, T entries of the sequence,
t keys or entries that a row sees.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wf_backends import SequenceParallel
from wf_backends.comm import ConsistencyCheck
from wf_backends.sparse import CompressedAttention, SparseAttention
from wf_transformers.calls import Kwargs

MASK_IS_CHOICE = "mask_is_choice"
"""Keyword argument of layers: of what they pass a choice in place of the mask; KEYS, or ENTRIES,
which follow their keys. None = the mask is a mask."""
KEYS, ENTRIES = "keys", "entries"
RATIO = "entries_ratio"
"""Keyword argument of layers with ENTRIES whose rows see all of them, of groups of so many tokens;
what they pass in place of the mask is empty then."""


class ChosenAttention:
    """Exact attention to what the layers of a model chose.

    Attributes:
        compressed: pools entries for the layers, too.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self._sparse, self.compressed = SparseAttention(sp), CompressedAttention(sp)
        self._consistency = ConsistencyCheck(sp.comm)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor | None,
        name: str,
        causal: bool,
        window_size: tuple[int, int],
        seqlen: int | None,
        dropout_p: float,
        entries: Tensor | None = None,
        ratio: int = 0,
        **options: Any,
    ) -> Tensor:
        """(b, s, h, d), of queries (b, s, h, d) and keys (b, s, g, d) of a layer called `name`.

        Args:
            chosen: (b, s, g or 1, t) keys, all of which a row may see; or (b, 1, s, t) entries;
                None: all entries of groups of `ratio` tokens.
            entries: (b, T, d), beside a window. None: no window.

        Raises:
            NotImplementedError: for dropout, full attention, and keys chosen beside a window.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            if dropout_p or not causal or (entries is None and window_size != (-1, -1)):
                got = f"dropout {dropout_p}, causal {causal}, window_size {window_size}"
                raise NotImplementedError(
                    f"{name} chooses its keys, for which there is no dropout (set "
                    f"attention_dropout to 0), no full attention, and no window beside chosen "
                    f"keys: got {got}"
                )
        options["name"] = name
        if entries is None:
            assert chosen is not None
            return self._sparse(q, k, v, chosen, **options)
        entries, window = entries.to(q.dtype), window_size[0] + 1
        choice = None if chosen is None else chosen.squeeze(1)
        return self.compressed(q, k.squeeze(2), entries, choice, window, ratio, **options)


def take_choice(
    query: Tensor, key: Tensor, value: Tensor, choice: Tensor | None, kwargs: Kwargs
) -> tuple[Tensor, Tensor]:
    """Put what a layer chose into its keyword arguments, and also entries (b, 1, T, d) that follow
    its keys (b, 1, s, d), which are values too; (key, value) of the tokens."""
    kwargs["indices"] = None if kwargs.get(RATIO) else choice
    if kwargs[MASK_IS_CHOICE] != ENTRIES:
        return key, value
    keys, entries = key.split((query.shape[2], key.shape[2] - query.shape[2]), 2)
    kwargs["entries"] = entries.squeeze(1)
    return keys, keys
