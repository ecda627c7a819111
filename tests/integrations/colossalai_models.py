"""Small random models of every family, their batches, and the reference: one process trains."""

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
VOCAB: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**NARROW, **HEADS, **VOCAB, **GROUPED}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
BERT_UNDROPPED = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
CLASSES = {"num_labels": 6, "pad_token_id": 0}
VIDEO = {"frames": 4, "height": 12, "width": 32, "dim": 16, "text_length": 9}
STAGES = ("space", "full", "time", "space")
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 8}  # 17 tokens: WallFacer pads them

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, LLAMA),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, LLAMA),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {**LLAMA, "head_dim": 8}),
    "cohere": (tf.CohereForCausalLM, tf.CohereConfig, {**LLAMA, "num_hidden_layers": 3}),
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
    "gptj_deep": (
        tf.GPTJForCausalLM,
        tf.GPTJConfig,
        {**GPT, **UNDROPPED, "vocab_size": VOCABULARY, "rotary_dim": 4, "n_layer": 4},
    ),
    "opt": (tf.OPTForCausalLM, tf.OPTConfig, {**OPT, **HEADS, **VOCAB, "dropout": 0.0}),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, {**NARROW, **HEADS, **VOCAB, **BERT_UNDROPPED}),
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
        {**OPT, **HEADS, **VOCAB, **CLASSES, "dropout": 0.0},
    ),
    "bert_classes": (
        tf.BertForSequenceClassification,
        tf.BertConfig,
        {**NARROW, **HEADS, **VOCAB, **BERT_UNDROPPED, **CLASSES},
    ),
    "vit": (tf.ViTForImageClassification, tf.ViTConfig, {**NARROW, **HEADS, **IMAGES}),
}
Batch = dict[str, Any]


class VideoFlow(nn.Module):
    """The video transformer with the loss of flow matching, in the output class of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.dit = VideoDiT(VideoDiTConfig(**VIDEO, stages=STAGES))
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)  # also where adaLN-zero has zeros

    def forward(self, video: Tensor, times: Tensor, text: Tensor, target: Tensor) -> Any:
        dtype = self.dit.patch_linear.weight.dtype
        velocity = self.dit(video.to(dtype), times.to(dtype), text)
        loss = (velocity.float() - target).square().mean()
        return tf.utils.ModelOutput(loss=loss)


def build(family: str) -> Any:
    """The model of a family: the same weights in every process, large enough for attention."""
    torch.manual_seed(0)
    if family == "video":
        return VideoFlow().train()
    model_class, config_class, options = FAMILIES[family]
    config = config_class(**options, initializer_range=0.2, use_cache=False)
    if family.startswith(("opt", "gptj")):
        config._attn_implementation = "eager"  # all that ColossalAI takes for these
    return model_class(config).train()


def batch(family: str, variant: str, seed: int) -> Batch:
    """A batch of one sample of 24 tokens, unless the variant or the family says otherwise.

    Args:
        variant: "plain"; "ragged" (23 tokens: not a multiple of the ranks); "padded" (17 valid
            tokens); "unequal" (two samples of 17 and 21 valid tokens); "microbatches" (two
            samples); "unmasked" (without attention_mask); "packed" (one document, three, or
            twelve, by the step); "counted" (of an optimizer step with 40 labels).
        seed: 100 * step + index of the data-parallel rank.
    """
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([seed % 7, (seed + 3) % 7])}
    if family == "video":
        video, target = torch.randn(2, 2, 4, 12, 32, 3, generator=generator)
        text = torch.randint(256, (2, 9), generator=generator)
        times = torch.rand(2, generator=generator)
        return {"video": video, "times": times, "text": text, "target": target}
    samples = {"unequal": 2, "microbatches": 2}.get(variant, 1)
    seqlen = SEQLEN - 1 if variant == "ragged" else SEQLEN
    ids = torch.randint(1, VOCABULARY, (samples, seqlen), generator=generator)
    out = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if family == "bert":
        # equally many in each sample: the loss of microbatches is the mean of their means
        hidden = torch.rand(ids.shape, generator=generator).argsort(dim=1) < seqlen // 2
        out["labels"] = ids.masked_fill(~hidden, -100)
    out |= _inputs_of_other_heads(family, ids, seed)
    if family.endswith("spans"):
        del out["labels"]
    for row, length in {"padded": [(0, 17)], "unequal": [(0, 17), (1, 21)]}.get(variant, []):
        out["attention_mask"][row, length:] = 0
        if out["labels"].shape == ids.shape:
            out["labels"][row, length:] = -100
        out["input_ids"][row, length:] = 0
    if variant in ("unmasked", "packed"):
        del out["attention_mask"]
    if variant == "counted":
        out["num_items_in_batch"] = 40
    if variant == "packed":
        borders = (0, SEQLEN), (0, 5, 14, SEQLEN), tuple(range(0, SEQLEN + 1, 2))
        out["cu_seqlens"] = borders[seed // 100 % 3]
    return out


def _inputs_of_other_heads(family: str, ids: Tensor, seed: int) -> Batch:
    """Inputs of heads other than a language model's: classes, spans or two choices."""
    classes = torch.tensor([seed % 5, (seed + 3) % 5])[: len(ids)]
    if family.endswith("classes"):
        return {"labels": classes}
    if family.endswith("spans"):
        return {"start_positions": classes, "end_positions": classes + 17}
    if family.endswith("double"):
        choices = torch.stack([ids, ids.flip(1)], dim=1)
        return {
            "input_ids": choices,
            "attention_mask": torch.ones_like(choices),
            "labels": choices,
            "mc_token_ids": torch.full(choices.shape[:2], ids.shape[1] - 1),
            "mc_labels": classes % 2,
        }
    return {}


def total_loss(output: Any) -> Tensor:
    """The sum over the heads of the model."""
    return output.loss + output.get("mc_loss", 0.0)


def with_dense_mask(batch: Batch) -> Batch:
    """The batch with a dense attention mask and positions in place of cu_seqlens."""
    borders = batch.get("cu_seqlens")
    if borders is None:
        return batch
    lengths = torch.tensor(borders).diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    seen = (document[:, None] == document).tril()
    labels = batch["labels"].clone()
    labels[:, list(borders[:-1])] = -100  # no document predicts the first token of the next
    return {
        "input_ids": batch["input_ids"],
        "labels": labels,
        "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None],
    }


def train_alone(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    optimizer: Callable[..., Any],
    max_norm: float = 0.0,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses, gradients of the first step, final weights) of one process on all batches.

    Args:
        steps: the batches of each step. Its loss is their mean, as in data parallelism.
        optimizer: makes an optimizer of parameters.
        max_norm: to which gradients are clipped; 0 = they are not.
    """
    optimizer_of_model = optimizer(model.parameters())
    losses, first_gradients = [], {}
    for batches in steps:
        optimizer_of_model.zero_grad()
        loss = torch.stack([total_loss(model(**with_dense_mask(b))) for b in batches]).mean()
        loss.backward()
        first_gradients = first_gradients or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer_of_model.step()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, first_gradients, weights


def train_alone_in_16_bits(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    optimizer: Callable[..., Any],
    dtype: torch.dtype,
) -> list[float]:
    """Losses of one process with weights in `dtype` and master weights in float32, as in ZeRO."""
    master_weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    optimizer_of_masters = optimizer(master_weights)
    losses = []
    for batches in steps:
        model.zero_grad()
        loss = torch.stack([model(**batch).loss.float() for batch in batches]).mean()
        loss.backward()
        for master, p in zip(master_weights, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer_of_masters.step()
        for master, p in zip(master_weights, model.parameters(), strict=True):
            p.data.copy_(master.data)
        losses.append(loss.item())
    return losses
