"""Our name in the registry of attention backends, and for processors that ask none."""

from __future__ import annotations

from itertools import count
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from wf_backends import SequenceParallel
from wf_transformers import Handle, InPlaceOfTorchAttention

BACKEND = "_attention_backend"  # of a processor that asks the registry


class Attention:
    """sp.attention in the words of diffusers' attention backends."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.calls = 0
        """Since somebody last set this to 0."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Exact attention of this rank's rows over the whole sequence.

        Args:
            query: (b, s, h, d), this rank's rows. key, value: (b, s, g, d), g divides h.

        Returns:
            (b, s, h, d).

        Raises:
            NotImplementedError: for a mask, or dropout inside attention.
        """
        if attn_mask is not None:
            raise NotImplementedError(
                f"an attention mask {tuple(attn_mask.shape)} would be of the whole sequence: "
                "leave it out, and padded text with it"
            )
        self.calls += 1
        return self.sp.attention(
            query, key, value, causal=is_causal, softmax_scale=scale, dropout_p=dropout_p
        )


def register(attention: Attention, handle: Handle) -> AttentionBackendName:
    """A name in the registry for this one `sp`, until the handle is removed.

    The registry's keys are members of an enumeration. Ours is an instance of it that is not among
    its members, so that nothing of diffusers changes but the registry.
    """
    backends = _AttentionBackendRegistry._backends
    name = next(n for n in _names() if n not in {str(key.value) for key in backends})
    key = str.__new__(AttentionBackendName, name)
    key._name_, key._value_ = name.upper(), name
    _AttentionBackendRegistry.register(key)(attention)
    handle.undo.callback(_unregister, key)
    return key


def _names() -> Any:
    return (f"wallfacer_{number}" if number > 1 else "wallfacer" for number in count(1))


def _unregister(key: AttentionBackendName) -> None:
    registry = _AttentionBackendRegistry
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(key, None)


def take_over(module: Any, key: AttentionBackendName, attention: Attention, handle: Handle) -> None:
    """Have an attention module call `attention`, by the registry or by torch's function."""
    processor = module.processor
    if hasattr(processor, BACKEND):
        handle.set(processor, BACKEND, key)
    else:
        handle.undo.callback(module.set_processor, processor)
        module.set_processor(Processor(processor, attention))


class Processor:
    """A processor of diffusers, inside which torch's attention is ours."""

    def __init__(self, processor: Any, attention: Attention) -> None:
        self._processor, self._attention = processor, attention

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        with InPlaceOfTorchAttention(self._attend):
            return self._processor(attn, hidden_states, *args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """(b, h, s, d) each, as torch's attention has them."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._attention(q, k, v, *args, **kwargs).transpose(1, 2)
