"""What tests of tiled training share: two models, transformers' loss, and comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wf_backends.autochunk.tiling import Tiles

WIDTH, ROWS = 6, 11  # 11 rows: the last of 3 or 4 tiles is shorter


class GatedMlp(nn.Module):
    """As in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TwoLayers(nn.Module):
    """Two residual MLPs, each under an activation checkpoint unless `use_reentrant` is None."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GatedMlp(), GatedMlp()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


BOTH_LAYERS = [Tiles("layers.0", 1, 3), Tiles("layers.1", 1, 4)]  # of TwoLayers


def ForCausalLMLoss(  # noqa: N802 - transformers' name
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """What transformers' function of this name computes, in the logits' dtype."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = F.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def assert_close(
    actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float = 1e-12
) -> None:
    """Tensor by tensor; a missing gradient (None) must be missing in both."""
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (tensor is None) == (expected_tensor is None)
        if tensor is not None:
            torch.testing.assert_close(tensor, expected_tensor, rtol=tolerance, atol=tolerance)


def tiled_modules(model: nn.Module) -> list[str]:
    """Names of the modules whose `forward` is replaced by a tiled one."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def error_message(function: Callable[[], object]) -> str:
    """The message of the error that a call raises; "" if it raises none."""
    try:
        function()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""
