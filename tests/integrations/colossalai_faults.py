"""Runs of colossalai_worker.py for test_colossalai_faults.py.

What ColossalAI's own ring_attn gets wrong, computed with WallFacer, and errors of users.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import CAME
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

import wf_colossalai
from tests.dense import dense_attention
from tests.integrations.colossalai_models import VOCABULARY, batch, build, total_loss
from wf_backends.schedule.mask import make_mask
from wf_colossalai import AttentionModule, WallFacerPlugin, WallFacerPolicy

Case = dict[str, Any]


def boost(model: nn.Module, plugin: Any) -> tuple[Any, Any, Any]:
    """(booster, boosted model, SGD optimizer)."""
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def gradients_of(model: Any) -> dict[str, Tensor]:
    model = model.unwrap() if hasattr(model, "unwrap") else model
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare_one_step(model: nn.Module, plugin: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one batch, with the plugin and of the model alone ("expected")."""
    reference = copy.deepcopy(model)
    booster, model, optimizer = boost(model, plugin)
    loss = model(**copy.deepcopy(batch)).loss
    booster.backward(loss, optimizer)
    expected = reference(**batch).loss
    expected.backward()
    return {
        "losses": [loss.item()],
        "gradients": gradients_of(model),
        "expected": {"losses": [expected.item()], "gradients": gradients_of(reference)},
    }


def large_logits(case: Case, folder: Path) -> dict[str, Any]:
    """Scores far above 88, from where on exp overflows in float32."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(40)
    return compare_one_step(model, WallFacerPlugin(**case["wallfacer"]), batch("llama", "plain", 0))


def same_size(case: Case, folder: Path) -> dict[str, Any]:
    """Losses of batches with 48 tokens each, of other shapes and valid lengths."""
    _, model, _ = boost(build("llama"), WallFacerPlugin(**case["wallfacer"]))
    reference, ids = build("llama"), torch.arange(1, 49)
    losses, expected = [], []
    for shape, length in (((2, 24), 17), ((4, 12), 9), ((1, 48), 31), ((2, 24), 20)):
        valid = torch.arange(shape[1]).expand(shape) < length
        inputs = {"input_ids": ids.view(shape), "attention_mask": valid.long()}
        inputs["labels"] = inputs["input_ids"].masked_fill(~valid, -100)
        losses.append(model(**copy.deepcopy(inputs)).loss.item())
        expected.append(reference(**inputs).loss.item())
    return {"losses": losses, "expected": {"losses": expected}}


def key_bytes(case: Case, folder: Path) -> dict[int, int]:
    """Bytes that all ranks send in a forward, by the number of key heads."""
    sent = {}
    for heads in (2, 4):
        plugin = WallFacerPlugin(**case["wallfacer"])
        config = build("llama").config
        config.num_key_value_heads = heads
        _, model, _ = boost(type(build("llama"))(config), plugin)
        with torch.no_grad():
            model(**batch("llama", "plain", 0))
        sent_by_all = torch.tensor(sum(plugin.sp.report().values()))
        dist.all_reduce(sent_by_all)
        sent[heads] = int(sent_by_all)
    return sent


def half_precision_loss(case: Case, folder: Path) -> dict[str, Any]:
    """The loss of a bfloat16 model; expected is the cross entropy of its logits in float32."""
    plugin = WallFacerPlugin(**case["wallfacer"], precision="bf16")
    _, model, _ = boost(build("llama"), plugin)
    inputs = batch("llama", "ragged", 0)
    model.eval()
    with torch.no_grad():
        out = model(**copy.deepcopy(inputs))
    logits = out.logits[:, :-1].float().flatten(0, 1)
    expected = F.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
    return {
        "losses": [out.loss.item()],
        "dtypes": [str(out.loss.dtype), str(out.logits.dtype)],
        "expected": {"losses": [expected.item()]},
    }


def padded_labels(case: Case, folder: Path) -> dict[str, Any]:
    """Labels of a batch of 23 tokens, sharded, padded and gathered again."""
    plugin = WallFacerPlugin(**case["wallfacer"])
    local = plugin.sp.shard_batch(batch("llama", "ragged", 0))
    gathered = plugin.sp.unshard(local["labels"], 1, local["cu_seqlens"])
    return {"gathered": gathered, "original": batch("llama", "ragged", 0)["labels"]}


def attention_alone(case: Case, folder: Path) -> dict[str, Any]:
    """Gradients of attention without a model, as in ColossalAI's test_ring_attn.py."""
    sp = WallFacerPlugin(**case["wallfacer"]).sp
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 48, 4, 8, generator=generator).requires_grad_() for _ in range(3)]
    out = sp.attention(*(sp.shard(x) for x in qkv), causal=True)
    sp.unshard(out).sum().backward()
    q, k, v = reference = [x.detach().clone().requires_grad_() for x in qkv]
    expected = dense_attention(q, k, v, make_mask(causal=True), 8**-0.5)
    expected.sum().backward()
    return {
        "gradients": {name: x.grad for name, x in zip("qkv", qkv, strict=True)},
        "expected": {"gradients": {name: x.grad for name, x in zip("qkv", reference, strict=True)}},
    }


def colossalai_plugin(mode: str, tp_size: int, policy: WallFacerPolicy) -> HybridParallelPlugin:
    """ColossalAI's HybridParallelPlugin, with sp_size 2 and WallFacer's policy."""
    return HybridParallelPlugin(
        tp_size=tp_size,
        pp_size=1,
        sp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode=mode,
        precision="fp32",
        custom_policy=policy,  # type: ignore[arg-type]
    )


def colossalai_model_test(case: Case, folder: Path) -> dict[str, Any]:
    """ColossalAI's test_shard_llama.py, with custom_policy= added to its plugin."""
    policy = WallFacerPolicy(case["wallfacer"])
    plugin = colossalai_plugin(case["mode"], case["tp_size"], policy)
    return compare_one_step(build("llama"), plugin, batch("llama", "plain", 0))


class OwnAttention(nn.Module):
    """An attention module of a user, not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class OwnModel(nn.Module):
    """A language model of a user, which returns logits."""

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


def wallfacer_forward(self: Any, x: Tensor) -> Tensor:
    """OwnAttention.forward with WallFacer's attention."""
    q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
    attended, _ = self.wallfacer(self, q, k, v, attention_mask=None, is_causal=True)
    return self.out(attended.flatten(2))


class OwnPolicy(WallFacerPolicy):
    table = {"OwnAttention": AttentionModule(methods={"forward": wallfacer_forward})}


def own_model(case: Case, folder: Path) -> dict[str, Any]:
    """A policy for a model of a user, as docs/colossalai.md shows it."""
    inputs = batch("llama", "ragged", 0)
    del inputs["attention_mask"]
    reference = OwnModel()
    logits = reference(inputs["input_ids"])[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
    expected.backward()
    plugin = WallFacerPlugin(**case["wallfacer"], custom_policy=OwnPolicy())
    booster, model, optimizer = boost(OwnModel(), plugin)
    loss = model(**inputs).loss
    booster.backward(loss, optimizer)
    return {
        "losses": [loss.item()],
        "gradients": gradients_of(model),
        "expected": {"losses": [expected.item()], "gradients": gradients_of(reference)},
    }


def refusal_of(call: Callable[[], Any]) -> str:
    """The message and the notes of the ValueError or NotImplementedError that `call` raises."""
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


def accumulating_pipeline(plugin: WallFacerPlugin) -> Callable[[], Any]:
    """A call of a pipeline of GPT-2, whose embeddings are tied, after two right steps."""
    booster, model, optimizer = boost(build("gpt2"), plugin)

    def run() -> None:
        batches = iter([batch("gpt2", "microbatches", 0)])
        booster.execute_pipeline(batches, model, lambda out, _: total_loss(out), optimizer)

    with booster.no_sync(model, optimizer):
        run()
    run()
    optimizer.zero_grad()
    run()
    return run


def refused(case: Case, folder: Path) -> dict[str, str]:
    """Messages of rank 0 for errors of a user, by test_colossalai_faults.py's names of them."""
    config = {"sequence_parallel_size": 2, "route": "ring"}
    _, model, _ = boost(build("llama"), WallFacerPlugin(**config))
    inputs, inputs_of_rank = batch("llama", "plain", 0), batch("llama", "plain", dist.get_rank())
    image_model = build("vit")
    wf_colossalai.apply(image_model, config)
    _, image_model, _ = boost(image_model, TorchDDPPlugin())
    images_of_rank = batch("vit", "plain", dist.get_rank())
    stages = {"pp_size": 2, "num_microbatches": 2}
    own_stages = WallFacerPlugin(**config, **stages, custom_policy=OwnPolicy())
    bubble = {"pp_style": "zbv", "num_model_chunks": 2, "scheduler_nodes": []}
    zero_bubble = WallFacerPlugin(**config, **stages, **bubble)
    split_gather = colossalai_plugin("split_gather", 2, WallFacerPolicy())
    policy_of_4 = WallFacerPolicy({"sequence_parallel_size": 4})
    size_of_rank = {"sequence_parallel_size": 4 if dist.get_rank() == 3 else 2}
    other_size = colossalai_plugin("ring_attn", 1, policy_of_4)
    hybrid = HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
    applied = build("llama")
    wf_colossalai.apply(applied, config)
    _, hybrid_model, _ = boost(applied, hybrid)
    calls: dict[str, Callable[[], Any]] = {
        "summed twice": accumulating_pipeline(WallFacerPlugin(**config, **stages)),
        "other size": lambda: boost(build("llama"), other_size),
        "other batches": lambda: model(**inputs_of_rank),
        "other images": lambda: image_model(**images_of_rank),
        "hybrid plugin": lambda: hybrid_model(**inputs),
        "world": lambda: WallFacerPlugin(sequence_parallel_size=3),
        "group": lambda: wf_colossalai.apply(build("llama"), {"sequence_parallel_size": 3}),
        "plugin of another size": lambda: WallFacerPlugin(**size_of_rank),
        "model of another size": lambda: wf_colossalai.apply(build("llama"), size_of_rank),
        "pipeline": lambda: boost(OwnModel(), own_stages),
        "zero bubble": lambda: boost(build("gpt2"), zero_bubble),
        "clipped": lambda: boost(build("gpt2"), WallFacerPlugin(tp_size=2, max_norm=1.0)),
        "cache": lambda: model(**inputs, past_key_values=((),)),
        "tuple": lambda: model(**inputs, return_dict=False),
        "mode": lambda: boost(build("llama"), split_gather),
    }
    return {name: refusal_of(call) for name, call in calls.items()}


def loaders(case: Case, folder: Path) -> dict[str, list[list[int]]]:
    """The samples of every rank, by where the loader comes from and whether it shuffles."""
    config = {"sequence_parallel_size": 2, "route": "ring"}
    sources = {
        "plugin": WallFacerPlugin(**config),
        "apply": wf_colossalai.apply(build("llama"), config),
    }
    samples_by_loader = {}
    for name, source in sources.items():
        for shuffle in (False, True):
            prepare = partial(source.prepare_dataloader, list(range(8)), 2, shuffle=shuffle)
            resumed = prepare(distributed_sampler_cls=ResumedSampler)
            loader = prepare()
            assert list(map(Tensor.tolist, resumed)) == list(map(Tensor.tolist, loader))[1:]
            samples = torch.cat([part for part in loader])
            gathered = [torch.empty_like(samples) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, samples)
            samples_by_loader[f"{name} {shuffle}"] = [x.tolist() for x in gathered]
    return samples_by_loader


def whole_logits(case: Case, folder: Path) -> dict[str, Any]:
    """Logits of a rank after model.eval(), and those of all tokens in one process."""
    plugin = WallFacerPlugin(**case["wallfacer"], **case.get("options", {}))
    _, model, _ = boost(build("llama"), plugin)
    inputs, reference = batch("llama", "ragged", 0), build("llama").eval()
    model.eval()
    with torch.no_grad():
        return {
            "gradients": {"logits": model(**copy.deepcopy(inputs)).logits},
            "expected": {"gradients": {"logits": reference(**inputs).logits}},
        }


class ResumedSampler(DistributedSampler[Any]):
    """Gives what is left of an epoch after the first two samples of a rank."""

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), 2, None)


def sharded_optimizer(case: Case, folder: Path) -> dict[str, Any]:
    """A step of ColossalAI's CAME, whose states ZeRO shards: the ranks of its group."""
    model, options = build("llama"), {"zero_stage": 1, "overlap_communication": False}
    plugin = WallFacerPlugin(**case["wallfacer"], **options, precision="bf16")
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, CAME(model.parameters(), lr=1e-3))
    booster.backward(model(**batch("llama", "plain", 0)).loss, optimizer)
    optimizer.step()
    return {"ranks": optimizer.optim.dp_group.size()}


RUNS = {
    function.__name__: function
    for function in (
        large_logits,
        same_size,
        key_bytes,
        half_precision_loss,
        padded_labels,
        attention_alone,
        colossalai_model_test,
        own_model,
        refused,
        loaders,
        whole_logits,
        sharded_optimizer,
    )
}
