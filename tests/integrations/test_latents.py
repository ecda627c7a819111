"""DeepSeek-V3 whose latents travel in place of keys and values: what one device gives, in fewer
bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from torch import nn  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    MLA,
    NoFloat32,
    alone,
    batch,
    build,
)
from tests.integrations.transformers_models import (  # noqa: E402
    assert_close,
    gradients,
    sequence_parallel,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers import ModelOptions  # noqa: E402

DEEPSEEK = FAMILIES["deepseek_v3"]
HEADS, HEAD_DIM = 4, MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]
LATENTS = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
ULYSSES = {"route": "ring", "ulysses_degree": 2}


def on_ranks(size: int, words: Any = None, latents: bool = True, **more: Any) -> list[Any]:
    """[(logits of all tokens, share of the loss, gradients, bytes sent by attention)] by rank."""
    models = [build(DEEPSEEK, **more) for _ in range(size)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        if words is not None:
            config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **words})
            sp = SequenceParallel(config, comm)
        with wf_transformers.attach(model, sp, verify=False, latents=latents), NoFloat32():
            local = sp.shard_batch(batch())
            sp.report()
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
            loss = sp.loss(logits, local["labels"])
            loss.backward()
            sent = {k: n for k, n in sp.report().items() if k.startswith(("forward", "backward"))}
            full = sp.unshard(logits.detach(), dim=1)
        return full, loss.detach(), gradients(model), sent

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("words", "more"),
    [
        (None, {"q_lora_rank": 16}),
        (None, {"q_lora_rank": None}),
        (ULYSSES, {"q_lora_rank": 5, "rope_interleave": False}),
        ({"route": "auto"}, {"attention_bias": True}),
    ],
)
def test_loss_and_gradients(size: int, words: Any, more: dict[str, Any]) -> None:
    if more.get("q_lora_rank", 0) is None and tf.__version__ < "5":
        pytest.skip(f"DeepseekV3Attention of transformers {tf.__version__} needs a q_lora_rank")
    logits, loss, wanted = alone(DEEPSEEK, build(DEEPSEEK, **more), batch())
    found = on_ranks(size, words, **more)
    for full, *_ in found:
        assert_close(full[:, : logits.shape[1]], logits, "logits")
    assert_close(sum(one[1] for one in found), loss, "loss")
    assert "model.layers.0.self_attn.kv_b_proj.weight" in wanted
    for parameter, gradient in wanted.items():
        assert_close(sum(one[2][parameter] for one in found), gradient, parameter)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_fewer_by_the_ratio_of_the_widths(size: int) -> None:
    both = zip(on_ranks(size), on_ranks(size, latents=False), strict=True)
    for (*_, latents), (*_, plain) in both:
        assert latents and set(latents) == set(plain)
        for label, count in plain.items():
            width = HEADS * (HEAD_DIM + MLA["v_head_dim"])
            assert count * LATENTS == latents[label] * width, label


@pytest.mark.parametrize("latents", [12, 24, 47])
def test_verify_passes(latents: int) -> None:
    """Also where there are as many latents as a rank has tokens in the drawn batch, or all."""
    models = [build(DEEPSEEK, kv_lora_rank=latents).float() for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        words = ModelOptions(latents=True)
        make = words.attaching(model, lambda: wf_transformers.attach_model(model, sp))
        return wf_transformers.verify(model, sp, make, "strict")

    assert run_threads(2, rank)[0] is not None


def test_all_of_it_can_be_undone() -> None:
    model, sp = build(DEEPSEEK).float(), SequenceParallel(SequenceParallelConfig())
    logits = model(batch()["input_ids"]).logits
    with wf_transformers.attach(model, sp, latents=True):
        torch.testing.assert_close(model(batch()["input_ids"]).logits, logits)
        assert any("wallfacer" in vars(module) for module in model.modules())
    assert not any({"wallfacer", "forward"} & set(vars(module)) for module in model.modules())
    assert torch.equal(model(batch()["input_ids"]).logits, logits)


def test_what_cannot_be_is_refused_by_name() -> None:
    sp = SequenceParallel(SequenceParallelConfig())
    with pytest.raises(ValueError, match='"latents" must be true or false, got 3'):
        ModelOptions.split({"latents": 3})
    assert ModelOptions.split({"latents": True})[1] == ModelOptions(latents=True)
    other: Any = build(FAMILIES["stablelm"])
    with pytest.raises(ValueError, match='"latents": true .* StableLmForCausalLM has none'):
        wf_transformers.attach(other, sp, latents=True)
    assert other.config._attn_implementation == "sdpa"
    model: Any = build(DEEPSEEK).float()
    with pytest.raises(ValueError, match='not beside "dsp"'):
        ModelOptions(latents=True).attaching(model, lambda: wf_transformers.Handle(sp))()
    up = model.model.layers[0].self_attn
    up.kv_b_proj = nn.Sequential(nn.Dropout(0.5), up.kv_b_proj)
    with (
        wf_transformers.attach(model, sp, latents=True),
        pytest.raises(NotImplementedError, match="kv_b_proj without dropout"),
    ):
        model(batch()["input_ids"])


def test_lora_on_the_projection() -> None:
    """Its gradients are those of keys and values that travel."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model: Any = build(DEEPSEEK)
        words = peft.LoraConfig(target_modules=["kv_b_proj"], r=4, init_lora_weights=False)
        return peft.get_peft_model(model, words).double()

    state, found = adapted().state_dict(), []
    for latents in (True, False):
        models = [adapted() for _ in range(2)]

        def rank(comm: Any, models: list[Any] = models, latents: bool = latents) -> Any:
            sp, model = sequence_parallel(comm), models[comm.rank]
            model.load_state_dict(state)
            with wf_transformers.attach(model, sp, verify=False, latents=latents), NoFloat32():
                local = sp.shard_batch(batch())
                logits = model(**wf_transformers.forward_kwargs(model, local)).logits
                sp.loss(logits, local["labels"]).backward()
            return gradients(model)

        found.append(run_threads(2, rank))
    assert any("kv_b_proj.lora_A" in name for name in found[1][0])
    for name in found[1][0]:
        mine, wanted = (torch.stack([one[name] for one in own]).sum(0) for own in found)
        assert_close(mine, wanted, name)
