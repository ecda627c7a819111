"""Models that compute something else where each rank calls them with its part of the sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.helpers import run_threads
from tests.integrations.transformers_models import BUILD_LOCK, build, sequence_parallel
from wf_backends import SequenceParallel
from wf_transformers import WholeBatchHooks, attach_pretrained, verify
from wf_transformers.comparison.verify import Mode, Report

DIFFERS = "does not give what it gives on one"
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 8}
PATCHES = {"num_attention_heads": 2, "patch_size": 2, "num_channels": 1}


def verify_on_ranks(
    make_model: Callable[[], Any], size: int = 2, mode: Mode = "strict", whole_batches: bool = False
) -> list[Report | None]:
    """The reports of `verify` on `size` ranks; the model is in float32."""
    original = make_model().float()

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)

        def attach() -> Any:
            return attach_unchecked(model, sp, whole_batches)

        return verify(model, sp, attach, mode, whole_batches=whole_batches)

    return run_threads(size, rank)


def attach_unchecked(model: nn.Module, sp: SequenceParallel, whole_batches: bool) -> Any:
    """Attach by the name of the attention alone: `attach` would refuse some of these models."""
    handle = attach_pretrained(model, sp)
    if whole_batches:
        WholeBatchHooks(model, handle)
    return handle


def llama(model_class: type = tf.LlamaForCausalLM) -> Any:
    """The tests' Llama as `model_class`, under a class of its own that no table knows."""
    model = build("llama", "sdpa", {})
    model.__class__ = type(model_class.__name__, (model_class,), {})
    return model


def vision_model(name: str) -> Any:
    config = getattr(tf, f"{name}Config")(**VISION, **PATCHES)
    config._attn_implementation = "sdpa"
    with BUILD_LOCK:
        torch.manual_seed(1)
        return getattr(tf, f"{name}Model")(config)


class Wrapper(nn.Module):
    """A user's module around a Hugging Face model; returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "sdpa", {})
        self.mix = nn.Identity()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.mix(self.inner(input_ids=input_ids, **inputs).logits)


class Convolution(Wrapper):
    """Mixes neighbouring tokens after the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(61, 61, 3, padding=1)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.conv(super().forward(input_ids, **inputs).mT).mT


class Recurrence(Wrapper):
    """A GRU after the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(61, 61, batch_first=True)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.gru(super().forward(input_ids, **inputs))[0]


class TokenShift(tf.LlamaForCausalLM):
    """Adds to each token's embedding that of the token before it."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=x + x.roll(1, dims=1), **inputs)


class LocalMean(Wrapper):
    """Subtracts the mean over the rank's tokens."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        logits = super().forward(input_ids, **inputs)
        return logits - logits.mean(dim=1, keepdim=True)


class LocalPositions(Wrapper):
    """Counts positions from 0 in the rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, 61)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        positions = torch.arange(input_ids.shape[1])
        return super().forward(input_ids, **inputs) + self.places(positions)


class LocalEntropy(Wrapper):
    """Returns a mean over the logits of the rank's tokens as its loss."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return super().forward(input_ids, **inputs).log_softmax(-1).square().mean()


class BatchNorm(Wrapper):
    """Normalises by the statistics of the rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(61)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return self.norm(super().forward(input_ids, **inputs).mT).mT


class LocalGradient(Wrapper):
    """Exact in the forward; subtracts from the gradient its mean over the rank's tokens."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        logits = super().forward(input_ids, **inputs)
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad - grad.mean(dim=1, keepdim=True))
        return logits


def z_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Cross entropy and a penalty on the logits' normalisers."""
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    entropy = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)
    return entropy + 1e-2 * logits.float().logsumexp(-1).square()[labels != -100].mean()


def llama_with_z_loss() -> Any:
    model = build("llama", "sdpa", {})
    model.loss_function = z_loss
    return model


class DoubledLoss(tf.LlamaForCausalLM):
    """Replaces the loss of its output."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        output = super().forward(*args, **inputs)
        if inputs.get("labels") is not None:
            output.loss = 2 * output.loss
        return output


class UnknownInput(nn.Module):
    """Takes an argument whose meaning no signature tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "sdpa", {})

    def forward(self, dialogue: Tensor) -> Tensor:
        return self.inner(input_ids=dialogue).logits


class OwnModel(nn.Module):
    """Causal attention without a model of transformers, and nothing that takes documents."""

    def __init__(self, counts_positions: bool) -> None:
        super().__init__()
        self.counts_positions = counts_positions
        self.ids, self.places = nn.Embedding(32, 8), nn.Embedding(64, 8)
        self.qkv = nn.Linear(8, 24)

    def set_sequence_parallel(self, sp: SequenceParallel) -> None:
        self.sp = sp

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if position_ids is None or self.counts_positions:
            position_ids = torch.arange(input_ids.shape[1])
        x = self.ids(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return self.sp.attention(q, k, v, causal=True).flatten(2)


class NeedsPositions(OwnModel):
    """Cannot be called without position_ids."""

    def __init__(self) -> None:
        super().__init__(counts_positions=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, position_ids)
