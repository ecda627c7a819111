"""Tiny random models of every family, their batches, and training without sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.dsp.video import VideoDiT, VideoDiTConfig

VOCABULARY, SEQLEN = 256, 24
NARROW: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4}
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**NARROW, **HEADS, **WORDS, **GROUPED}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
BERT_UNDROPPED = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
CLASSES = {"num_labels": 6, "pad_token_id": 0}
VIDEO = {"frames": 4, "height": 12, "width": 32, "dim": 16, "text_length": 9}
STAGES = ("space", "full", "time", "space")
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 8}  # 17 tokens: padded by us

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, LLAMA),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, LLAMA),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {**LLAMA, "sliding_window": 5}),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**GPT, **UNDROPPED, "vocab_size": VOCABULARY}),
    "gpt2_deep": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {**GPT, **UNDROPPED, "vocab_size": VOCABULARY, "n_layer": 4},
    ),
    "gpt2_full": (  # no position left for padding
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {**GPT, **UNDROPPED, "vocab_size": VOCABULARY, "n_positions": SEQLEN - 1},
    ),
    "gptj": (
        tf.GPTJForCausalLM,
        tf.GPTJConfig,
        {**GPT, **UNDROPPED, "vocab_size": VOCABULARY, "rotary_dim": 4},
    ),
    "opt": (tf.OPTForCausalLM, tf.OPTConfig, {**OPT, **HEADS, **WORDS, "dropout": 0.0}),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, {**NARROW, **HEADS, **WORDS, **BERT_UNDROPPED}),
    "llama_classes": (tf.LlamaForSequenceClassification, tf.LlamaConfig, {**LLAMA, **CLASSES}),
    "gpt2_classes": (
        tf.GPT2ForSequenceClassification,
        tf.GPT2Config,
        {**GPT, **UNDROPPED, **CLASSES, "vocab_size": VOCABULARY},
    ),
    "gpt2_spans": (
        tf.GPT2ForQuestionAnswering,
        tf.GPT2Config,
        {**GPT, **UNDROPPED, "vocab_size": VOCABULARY},
    ),
    "gpt2_double": (
        tf.GPT2DoubleHeadsModel,
        tf.GPT2Config,
        {**GPT, **UNDROPPED, "summary_first_dropout": 0.0, "vocab_size": VOCABULARY},
    ),
    "opt_classes": (
        tf.OPTForSequenceClassification,
        tf.OPTConfig,
        {**OPT, **HEADS, **WORDS, **CLASSES, "dropout": 0.0},
    ),
    "bert_classes": (
        tf.BertForSequenceClassification,
        tf.BertConfig,
        {**NARROW, **HEADS, **WORDS, **BERT_UNDROPPED, **CLASSES},
    ),
    "vit": (tf.ViTForImageClassification, tf.ViTConfig, {**NARROW, **HEADS, **IMAGES}),
}
Batch = dict[str, Any]


class VideoFlow(nn.Module):
    """The video transformer with the loss of flow matching, as a Hugging Face model gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.dit = VideoDiT(VideoDiTConfig(**VIDEO, stages=STAGES))
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)  # also where adaLN-zero has zeros

    def forward(self, video: Tensor, times: Tensor, text: Tensor, target: Tensor) -> Any:
        dtype = self.dit.patch_linear.weight.dtype
        found = self.dit(video.to(dtype), times.to(dtype), text)
        loss = (found.float() - target).square().mean()
        return tf.utils.ModelOutput(loss=loss)


def build(family: str) -> Any:
    """The same weights in every process; large enough that attention matters."""
    torch.manual_seed(0)
    if family == "video":
        return VideoFlow().train()
    make, make_config, words = FAMILIES[family]
    config = make_config(**words, initializer_range=0.2, use_cache=False)
    if family.startswith(("opt", "gptj")):
        config._attn_implementation = "eager"  # all that ColossalAI takes for these
    return make(config).train()


def batch(family: str, kind: str, seed: int) -> Batch:
    """One sample. Kinds: plain, ragged (23 tokens), padded, unequal (two samples), unmasked, packed
    (as one document, as three, and as many as the planner has a kind for)."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([seed % 7, (seed + 3) % 7])}
    if family == "video":
        video, target = torch.randn(2, 2, 4, 12, 32, 3, generator=generator)
        text = torch.randint(256, (2, 9), generator=generator)
        times = torch.rand(2, generator=generator)
        return {"video": video, "times": times, "text": text, "target": target}
    samples = {"unequal": 2, "microbatches": 2}.get(kind, 1)
    seqlen = SEQLEN - 1 if kind == "ragged" else SEQLEN
    ids = torch.randint(1, VOCABULARY, (samples, seqlen), generator=generator)
    out = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if family == "bert":
        # as many in each sample: the loss of microbatches is the mean of their means
        hidden = torch.rand(ids.shape, generator=generator).argsort(dim=1) < seqlen // 2
        out["labels"] = ids.masked_fill(~hidden, -100)
    out |= _answers(family, ids, seed)
    if family.endswith("spans"):
        del out["labels"]
    for row, length in {"padded": [(0, 17)], "unequal": [(0, 17), (1, 21)]}.get(kind, []):
        out["attention_mask"][row, length:] = 0
        if out["labels"].shape == ids.shape:
            out["labels"][row, length:] = -100
        out["input_ids"][row, length:] = 0
    if kind in ("unmasked", "packed"):
        del out["attention_mask"]
    if kind == "packed":
        borders = (0, SEQLEN), (0, 5, 14, SEQLEN), tuple(range(0, SEQLEN + 1, 2))
        out["cu_seqlens"] = borders[seed // 100 % 3]
    return out


def _answers(family: str, ids: Tensor, seed: int) -> Batch:
    """What heads that are none of a language model are asked, in place of labels by token."""
    few = torch.tensor([seed % 5, (seed + 3) % 5])[: len(ids)]
    if family.endswith("classes"):
        return {"labels": few}
    if family.endswith("spans"):
        return {"start_positions": few, "end_positions": few + 17}
    if family.endswith("double"):
        both = torch.stack([ids, ids.flip(1)], dim=1)
        ends = torch.full(both.shape[:2], ids.shape[1] - 1)
        asked = {"mc_token_ids": ends, "mc_labels": few % 2}
        return {"input_ids": both, "attention_mask": torch.ones_like(both), "labels": both, **asked}
    return {}


def total(output: Any) -> Tensor:
    """The loss of one head or two."""
    return output.loss + output.get("mc_loss", 0.0)


def dense(one: Batch) -> Batch:
    """The same sample for a model that knows nothing of documents."""
    borders = one.get("cu_seqlens")
    if borders is None:
        return one
    lengths = torch.tensor(borders).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    seen = (document[:, None] == document).tril()
    labels = one["labels"].clone()
    labels[:, list(borders[:-1])] = -100  # no document predicts the next one's first token
    return {
        "input_ids": one["input_ids"],
        "labels": labels,
        "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
    }


def alone(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    optimizer: Callable[..., Any],
    max_norm: float = 0.0,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses, gradients of the first step, final weights) of one process on all batches.

    A step's loss is the mean over its batches, as data parallelism has it. Gradients are clipped to
    max_norm if it is not 0.
    """
    update = optimizer(model.parameters())
    losses, first = [], {}
    for batches in steps:
        update.zero_grad()
        loss = torch.stack([total(model(**dense(one))) for one in batches]).mean()
        loss.backward()
        first = first or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses, first, {name: value.clone() for name, value in model.state_dict().items()}


def alone_in_16_bits(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    optimizer: Callable[..., Any],
    dtype: torch.dtype,
) -> list[float]:
    """Losses with weights of 16 bits and float32 master weights, as ZeRO keeps them."""
    master = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    update = optimizer(master)
    losses = []
    for batches in steps:
        model.zero_grad()
        loss = torch.stack([model(**one).loss.float() for one in batches]).mean()
        loss.backward()
        for wide, narrow in zip(master, model.parameters(), strict=True):
            wide.grad = None if narrow.grad is None else narrow.grad.float()
        update.step()
        for wide, narrow in zip(master, model.parameters(), strict=True):
            narrow.data.copy_(wide.data)
        losses.append(loss.item())
    return losses
