"""A small decoder in the form of transformers', and a batch for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.autochunk.tiling.helpers import ForCausalLMLoss

WIDTH, ROWS, VOCABULARY = 8, 512, 320


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class Decoder(nn.Module):
    """Layers, a head, and a loss as in transformers; `scale` is a factor of the logits."""

    def __init__(
        self, layers: int = 2, dropout: float = 0.0, scale: float = 1.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(layers))
        self.mlp = nn.ModuleList(Mlp(dropout) for _ in range(layers))
        self.head, self.scale = nn.Linear(WIDTH, VOCABULARY, bias), scale
        self.loss_function = ForCausalLMLoss

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, **loss_kwargs: Any
    ) -> dict[str, Tensor]:
        x = self.embed(ids)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        logits = self.head(x)
        logits = logits if self.scale == 1 else logits * self.scale
        if labels is None:
            return {"logits": logits}
        loss_kwargs |= {"logits": logits, "labels": labels, "vocab_size": VOCABULARY}
        return {"loss": self.loss_function(**loss_kwargs), "logits": logits}


def build_decoder(**kwargs: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**kwargs)


def make_batch(rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (1, rows), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.clone()}
