"""Cases for what ColossalAI's own ring_attn gets wrong, and for what a user may get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from torch import Tensor, nn
from torch.nn import functional as F

import wf_colossalai
from tests.dense import dense_attention
from tests.integrations.colossalai_models import VOCABULARY, batch, build
from wf_backends.schedule.mask import make_mask
from wf_colossalai import AttentionModule, WallFacerPlugin, WallFacerPolicy

Case = dict[str, Any]


def boosted(model: nn.Module, plugin: Any) -> tuple[Any, Any, Any]:
    """(booster, model, SGD optimizer)."""
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def gradients(model: Any) -> dict[str, Tensor]:
    named = (
        model.unwrap().named_parameters() if hasattr(model, "unwrap") else model.named_parameters()
    )
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def once(model: nn.Module, plugin: Any, one: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one batch, under the plugin and without sequence parallelism."""
    alone = copy.deepcopy(model)
    booster, model, optimizer = boosted(model, plugin)
    loss = model(**copy.deepcopy(one)).loss
    booster.backward(loss, optimizer)
    expected = alone(**one).loss
    expected.backward()
    return {
        "losses": [loss.item()],
        "gradients": gradients(model),
        "expected": {"losses": [expected.item()], "gradients": gradients(alone)},
    }


def large_logits(case: Case, folder: Path) -> dict[str, Any]:
    """Scores far beyond 88, where exp overflows in float32."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(40)
    return once(model, WallFacerPlugin(**case["words"]), batch("llama", "plain", 0))


def same_size(case: Case, folder: Path) -> dict[str, Any]:
    """Two batches of as many elements, but other shapes and paddings, one after the other."""
    _, model, _ = boosted(build("llama"), WallFacerPlugin(**case["words"]))
    alone, ids = build("llama"), torch.arange(1, 49)
    losses, expected = [], []
    for shape, length in (((2, 24), 17), ((4, 12), 9), ((1, 48), 31), ((2, 24), 20)):
        valid = torch.arange(shape[1]).expand(shape) < length
        one = {"input_ids": ids.view(shape), "attention_mask": valid.long()}
        one["labels"] = one["input_ids"].masked_fill(~valid, -100)
        losses.append(model(**copy.deepcopy(one)).loss.item())
        expected.append(alone(**one).loss.item())
    return {"losses": losses, "expected": {"losses": expected}}


def key_bytes(case: Case, folder: Path) -> dict[str, Any]:
    """Bytes sent in the forward with 2 and with 4 key heads."""
    sent = {}
    for heads in (2, 4):
        plugin = WallFacerPlugin(**case["words"])
        config = build("llama").config
        config.num_key_value_heads = heads
        _, model, _ = boosted(type(build("llama"))(config), plugin)
        with torch.no_grad():
            model(**batch("llama", "plain", 0))
        mine = torch.tensor(sum(plugin.sp.report().values()))
        dist.all_reduce(mine)
        sent[heads] = int(mine)
    return sent


def half_precision_loss(case: Case, folder: Path) -> dict[str, Any]:
    """The loss of a bfloat16 model, and the cross entropy of its own logits in float32."""
    plugin = WallFacerPlugin(**case["words"], precision="bf16")
    _, model, _ = boosted(build("llama"), plugin)
    one = batch("llama", "ragged", 0)
    model.eval()
    with torch.no_grad():
        out = model(**copy.deepcopy(one))
    logits = out.logits[:, :-1].float().flatten(0, 1)
    expected = F.cross_entropy(logits, one["labels"][:, 1:].flatten())
    return {
        "losses": [out.loss.item()],
        "dtypes": [str(out.loss.dtype), str(out.logits.dtype)],
        "expected": {"losses": [expected.item()]},
    }


def padded_labels(case: Case, folder: Path) -> dict[str, Any]:
    """Labels of all ranks' shards of a padded, ragged batch."""
    plugin = WallFacerPlugin(**case["words"])
    local = plugin.sp.shard_batch(batch("llama", "ragged", 0))
    whole = plugin.sp.unshard(local["labels"], 1, local["cu_seqlens"])
    return {"labels": whole, "given": batch("llama", "ragged", 0)["labels"]}


def attention_alone(case: Case, folder: Path) -> dict[str, Any]:
    """In the form of test_ring_attn.py: gradients of attention alone, on the plugin's group."""
    sp = WallFacerPlugin(**case["words"]).sp
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(2, 48, 4, 8, generator=generator).requires_grad_() for _ in range(3)]
    out = sp.attention(*(sp.shard(x) for x in full), causal=True)
    sp.unshard(out).sum().backward()
    dense = [x.detach().clone().requires_grad_() for x in full]
    expected = dense_attention(*dense, make_mask(causal=True), 8**-0.5)
    expected.sum().backward()
    return {
        "gradients": {name: x.grad for name, x in zip("qkv", full, strict=True)},
        "expected": {"gradients": {name: x.grad for name, x in zip("qkv", dense, strict=True)}},
    }


def hybrid(mode: str, tensor: int, policy: WallFacerPolicy) -> HybridParallelPlugin:
    """ColossalAI's own plugin, sequence parallel size 2."""
    return HybridParallelPlugin(
        tp_size=tensor,
        pp_size=1,
        sp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode=mode,
        precision="fp32",
        custom_policy=policy,  # type: ignore[arg-type]
    )


def their_form(case: Case, folder: Path) -> dict[str, Any]:
    """In the form of test_shard_llama.py: HybridParallelPlugin, with custom_policy= added."""
    plugin = hybrid(case["mode"], case["tp_size"], WallFacerPolicy(case["words"]))
    return once(build("llama"), plugin, batch("llama", "plain", 0))


class OwnAttention(nn.Module):
    """Somebody's own attention: nothing of transformers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class OwnModel(nn.Module):
    """Somebody's own language model: it returns logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.attention, self.head = OwnAttention(), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embedding(input_ids) + self.positions(position_ids)
        return self.head(x + self.attention(x))


def attend(self: Any, x: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
    attended, _ = self.wallfacer(self, q, k, v, attention_mask=None, is_causal=True)
    return self.out(attended.flatten(2))


class OwnPolicy(WallFacerPolicy):
    table = {"OwnAttention": AttentionModule(methods={"forward": attend})}


def own_model(case: Case, folder: Path) -> dict[str, Any]:
    """A policy for one's own model, as docs/colossalai.md has it."""
    one = batch("llama", "ragged", 0)
    del one["attention_mask"]
    alone = OwnModel()
    logits = alone(one["input_ids"])[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, one["labels"][:, 1:].flatten())
    expected.backward()
    plugin = WallFacerPlugin(**case["words"], custom_policy=OwnPolicy())
    booster, model, optimizer = boosted(OwnModel(), plugin)
    loss = model(**one).loss
    booster.backward(loss, optimizer)
    return {
        "losses": [loss.item()],
        "gradients": gradients(model),
        "expected": {"losses": [expected.item()], "gradients": gradients(alone)},
    }


def message(do: Callable[[], Any]) -> str:
    """What the ValueError or NotImplementedError of `do` says, with its notes."""
    try:
        do()
    except (ValueError, NotImplementedError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


def refused(case: Case, folder: Path) -> dict[str, Any]:
    """What a user may get wrong, by name; messages of rank 0."""
    words = {"sequence_parallel_size": 2, "route": "ring"}
    _, model, _ = boosted(build("llama"), WallFacerPlugin(**words))
    mine = batch("llama", "plain", dist.get_rank())
    image = build("vit")
    wf_colossalai.apply(image, words)
    _, image, _ = boosted(image, TorchDDPPlugin())
    stages = {"pp_size": 2, "num_microbatches": 1}
    own_stages = WallFacerPlugin(**words, **stages, custom_policy=OwnPolicy())
    bubble = {"pp_style": "zbv", "num_model_chunks": 2, "scheduler_nodes": []}
    zero_bubble = WallFacerPlugin(**words, **stages, **bubble)
    scores = batch("llama", "plain", 0)
    ring = hybrid("split_gather", 2, WallFacerPolicy())
    other_size = hybrid("ring_attn", 1, WallFacerPolicy({"sequence_parallel_size": 4}))
    return {
        "other size": message(lambda: boosted(build("llama"), other_size)),
        "other batches": message(lambda: model(**mine)),
        "other images": message(lambda: image(**batch("vit", "plain", dist.get_rank()))),
        "world": message(lambda: WallFacerPlugin(sequence_parallel_size=3)),
        "group": message(
            lambda: wf_colossalai.apply(build("llama"), {"sequence_parallel_size": 3})
        ),
        "pipeline": message(lambda: boosted(OwnModel(), own_stages)),
        "zero bubble": message(lambda: boosted(build("gpt2"), zero_bubble)),
        "cache": message(lambda: model(**scores, past_key_values=((),))),
        "tuple": message(lambda: model(**scores, return_dict=False)),
        "carrier": message(lambda: boosted(build("llama"), ring)),
    }


def loaders(case: Case, folder: Path) -> dict[str, Any]:
    """Which samples every rank reads, from both helpers, with and without shuffling."""
    words = {"sequence_parallel_size": 2, "route": "ring"}
    plugin, applied = WallFacerPlugin(**words), wf_colossalai.apply(build("llama"), words)
    read: dict[str, Any] = {}
    for name, source in (("plugin", plugin), ("apply", applied)):
        for shuffle in (False, True):
            loader = source.prepare_dataloader(list(range(8)), batch_size=2, shuffle=shuffle)
            mine = torch.cat([part for part in loader])
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            read[f"{name} {shuffle}"] = [part.tolist() for part in everyone]
    return read


def whole_logits(case: Case, folder: Path) -> dict[str, Any]:
    """After model.eval(), logits of all tokens on every rank."""
    _, model, _ = boosted(build("llama"), WallFacerPlugin(**case["words"]))
    one, alone = batch("llama", "ragged", 0), build("llama").eval()
    model.eval()
    with torch.no_grad():
        return {
            "gradients": {"logits": model(**copy.deepcopy(one)).logits},
            "expected": {"gradients": {"logits": alone(**one).logits}},
        }


KINDS = {
    function.__name__: function
    for function in (
        large_logits,
        same_size,
        key_bytes,
        half_precision_loss,
        padded_labels,
        attention_alone,
        their_form,
        own_model,
        refused,
        loaders,
        whole_logits,
    )
}
