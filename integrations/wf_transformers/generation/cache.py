"""transformers' cache of keys and values, on all ranks of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from wf_backends import SequenceParallel
from wf_backends.decode import SLACK, KeyValueCache
from wf_transformers.generation.states import LayerState

OF_PROMPTS = ("causal", "dropout_p", "seqlen")  # options of attention that new tokens do not need
NOT_CACHED = ("kv_up", "position_bias")  # options of attention


class ShardedCache(DynamicCache):
    """transformers' cache of a model over the ranks of `sp`: each layer's `KeyValueCache`, or its
    `LayerState`.

    Args:
        slack: tokens that `crop` can take back, in a model whose layers have windows.

    Attributes:
        length: tokens of all ranks, before the running forward.
        new: tokens of the running forward.
        starts: for each sample the tokens of padding on its left.
        behind: for each sample, by how much positions of new tokens are less than their numbers:
            the padding, and tokens of images, which share positions.
        first_text: the first token that comes after all images.
    """

    def __init__(self, sp: SequenceParallel, slack: int = SLACK) -> None:
        super().__init__()
        self.sp, self.slack, self.length, self.new = sp, slack, 0, 0
        self.starts: list[int] = []
        self.behind: list[int] = []
        self.first_text = 0
        self.by_module: dict[nn.Module, KeyValueCache | LayerState] = {}

    def __bool__(self) -> bool:
        """Whether it has tokens, as transformers' cache: Phi-3 asks before it drops one."""
        return self.length > 0

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(layer.nbytes for layer in self.by_module.values())

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the new keys and values alone: `attention` adds them."""
        return key_states, value_states

    def keep(self, module: nn.Module, k: Tensor, v: Tensor, **options: Any) -> None:
        """Keep this rank's rows of a prompt, for a layer whose call has these options.

        Args:
            k, v: (b, s, g, d).
        """
        name, lacking = type(module).__name__, [name for name in NOT_CACHED if name in options]
        if lacking or not options.get("causal"):
            what = ", ".join(lacking) or "a mask other than a causal one"
            raise NotImplementedError(f"{name} asks for {what}, which generation over ranks lacks")
        window = options.get("window_size", (-1, -1))
        layer = self.by_module[module] = KeyValueCache(self.sp, window, self.slack)
        layer.keep(k, v, self.new)

    def start(self, layer: nn.Module) -> LayerState:
        """The state of a layer with a recurrence, at the beginning of a prompt."""
        state = self.by_module[layer] = LayerState(layer)
        return state

    def padding_mask(self, device: torch.device) -> Tensor | None:
        """(b, S) of a prompt, False at padding on the left; None without any."""
        if not any(self.starts):
            return None
        starts = torch.tensor(self.starts, device=device)
        return torch.arange(self.new, device=device) >= starts[:, None]

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Exact attention of a layer's new tokens over all tokens so far.

        Args:
            q: (b, n, h, d), k, v: (b, n, g, d).
            options: those of `SequenceParallel.attention` in a forward of the model.
        """
        own = {name: x for name, x in options.items() if name not in OF_PROMPTS}
        layer = self.by_module[module]
        assert isinstance(layer, KeyValueCache)
        assert own.pop("window_size", layer.window_size) == layer.window_size
        return layer.attention(q, k, v, **own, starts=self.starts)

    def end_forward(self) -> None:
        """Count the new tokens."""
        expected = self.length + self.new
        lengths = {layer.length for layer in self.by_module.values()}
        if lengths != {expected}:
            raise NotImplementedError(
                f"after {expected} tokens layers have {sorted(lengths)}: a layer that is called "
                "twice or not at all in a forward cannot generate over ranks"
            )
        self.length = expected

    @property
    def is_linear(self) -> list[bool]:
        """transformers 5 asks whether layers are linear attention, by layer: none is."""
        return [False]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        samples = beam_idx.tolist()
        self.starts, self.behind = ([x[i] for i in samples] for x in (self.starts, self.behind))
        for layer in self.by_module.values():
            layer.take_samples(beam_idx)

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens; if it is not positive, drop so many at the end.

        Raises:
            ValueError: if a layer with a window has dropped keys that the next token sees, and
                inside of images.
        """
        max_length = int(max_length)  # a tensor in transformers 5.16's speculative decoding
        length = min(self.length, max_length + (self.length if max_length <= 0 else 0))
        if 0 < length < self.first_text:
            raise ValueError(
                f"crop({length}): images and videos end before token {self.first_text}, and new "
                "tokens have positions after them; keep as many tokens, or none"
            )
        for layer in self.by_module.values():
            layer.check_crop(length)
        for layer in self.by_module.values():
            layer.crop(length)
        self.length = length
