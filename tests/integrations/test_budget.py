"""The memory budget's formulas beside every byte that a small Llama really holds in a step."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import wf_transformers  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.budget import Decoder, Experts, Options, Training  # noqa: E402
from wf_backends.cluster import load  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_backends.lowering import Shape  # noqa: E402
from wf_backends.planner import Choice, Request, Workload, price_plan  # noqa: E402
from wf_backends.schedule import in_rank_order, make_mask  # noqa: E402
from wf_transformers.shape import model_shape  # noqa: E402

SEQLEN = 512
WITHIN = 0.1


class Held(TorchDispatchMode):
    """The most bytes of storages that live at one time, those of `known` tensors left out."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._seen = {one.untyped_storage()._cdata for one in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self._seen:
                self._hold(one.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def llama(dtype: torch.dtype, intermediate: int, vocabulary: int) -> Any:
    """Four layers, four heads on two key heads."""
    shape = {"hidden_size": 64, "intermediate_size": intermediate, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**shape, **heads, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def mixtral(dtype: torch.dtype, width: int, vocabulary: int) -> Any:
    """The same with eight experts in the place of each MLP, of which a token goes to two."""
    shape = {"hidden_size": 64, "intermediate_size": width, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = transformers.MixtralConfig(**shape, **heads, attn_implementation="sdpa")
    return transformers.MixtralForCausalLM(config).to(dtype).train()


def held(model: Any, checkpoints: str) -> int:
    """Bytes at the peak of a step of one rank, beyond the model and its gradients."""
    words = None if checkpoints == "none" else {"offload": checkpoints == "host"}
    sp = SequenceParallel(SequenceParallelConfig(route={"name": "ring"}), World(1).comm(0))
    with wf_transformers.attach(model, sp, activation_checkpointing=words) as handle:
        wf_transformers.WholeBatchHooks(model, handle)
        ids = torch.randint(model.config.vocab_size, (1, SEQLEN))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [one.grad for one in model.parameters()]
        with Held([*model.parameters(), *model.buffers(), *gradients, ids]) as found:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return found.peak


def predicted(model: nn.Module, checkpoints: Any) -> float:
    """The same by the formulas, device and host together: here they are one memory."""
    config: Any = model.config
    size = config.torch_dtype.itemsize if config.torch_dtype else 4
    mlp = config.intermediate_size
    experts = Experts(8, 2, mlp) if config.model_type == "mixtral" else None
    width = 0 if experts else mlp
    sizes = Decoder(4, 64, width, config.vocab_size, 4, 2, 16, 1, size, experts)
    work = Workload(
        Shape(1, 4, 2, 16, size), SEQLEN, make_mask(True, (-1, -1)).within(SEQLEN), "zigzag"
    )
    ring = in_rank_order({"name": "ring"}, 1)
    request = Request(replace(load("one-host"), ranks_per_host=1), work)
    buffers = price_plan(request, Choice(1, ring, ring)).cost.memory_bytes / SEQLEN
    found = Training(sizes, 1, buffers).activations(SEQLEN, Options(checkpoints))
    return found.peak + found.host


@pytest.mark.parametrize("checkpoints", ["none", "device", "host"])
@pytest.mark.parametrize(
    ("intermediate", "vocabulary"),
    [(176, 512), (176, 16), (16, 16)],
    ids=["loss is the most", "an MLP is the most", "attention is the most"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_are_within_a_tenth_of_a_real_step(
    dtype: torch.dtype, intermediate: int, vocabulary: int, checkpoints: str
) -> None:
    model = llama(dtype, intermediate, vocabulary)
    model.config.torch_dtype = dtype
    assert predicted(model, checkpoints) == pytest.approx(held(model, checkpoints), rel=WITHIN)


@pytest.mark.parametrize("checkpoints", ["none", "device", "host"])
@pytest.mark.parametrize(("width", "vocabulary"), [(176, 2048), (176, 16), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_are_within_a_tenth_of_a_mixtures_step(
    dtype: torch.dtype, width: int, vocabulary: int, checkpoints: str
) -> None:
    if checkpoints != "none" and int(transformers.__version__[0]) < 5:
        pytest.skip("the backward of transformers 4 is at one expert at a time, not at all of them")
    model = mixtral(dtype, width, vocabulary)
    model.config.torch_dtype = dtype
    assert predicted(model, checkpoints) == pytest.approx(held(model, checkpoints), rel=WITHIN)


def test_tiles_of_experts_hold_their_rows_and_sums_of_all_weights() -> None:
    experts = Experts(8, 2, 176)
    one = Decoder(4, 64, 0, 16, 4, 2, 16, 1, 4, experts)
    whole, tiled = (Training(one, 1, 0.0).activations(2**16, Options("device", t)) for t in (0, 64))
    weights, rows = 3 * 64 * 8 * 176 * 4, 2**16 * 64 * 4
    assert weights < tiled.mlp < 20 * rows < whole.mlp


def test_a_models_sizes_are_read_from_its_folder(tmp_path: Any) -> None:
    model = llama(torch.float32, 176, 512)
    model.config.save_pretrained(tmp_path)
    found = model_shape(str(tmp_path), sizes=True)
    wanted = {"layers": 4, "hidden": 64, "intermediate": 176, "vocabulary": 512}
    assert found == model_shape(str(tmp_path)) | wanted | {
        "parameters": sum(one.numel() for one in model.parameters())
    }
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    assert model_shape(str(tmp_path), sizes=True)["intermediate"] == 4 * 32


def test_the_experts_of_a_mixture_are_read_from_its_folder(tmp_path: Any) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 4}
    config = transformers.MixtralConfig(num_local_experts=4, intermediate_size=48, **small)
    config.save_pretrained(tmp_path)
    found = model_shape(str(tmp_path), sizes=True)
    assert (found["intermediate"], found["experts"]) == (0, Experts(4, 2, 48))
    words = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    config = transformers.Qwen2MoeConfig(**words, shared_expert_intermediate_size=40, **small)
    config.save_pretrained(tmp_path)
    found = model_shape(str(tmp_path), sizes=True)
    assert (found["intermediate"], found["experts"]) == (40, Experts(8, 4, 24))


def test_a_mixture_that_does_not_tell_its_experts_is_refused(tmp_path: Any) -> None:
    transformers.MixtralConfig(num_local_experts=4).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_experts_per_tok": 2', '"n": 2'))
    assert model_shape(str(tmp_path), sizes=True)["experts"].chosen == 2  # its class's own
    config.write_text(config.read_text().replace('"n": 2', '"num_experts_per_tok": "two"'))
    with pytest.raises(
        (NotImplementedError, ValueError), match="how many experts|num_experts_per_tok"
    ):
        model_shape(str(tmp_path), sizes=True)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="transformers has none")
def test_a_model_whose_layers_differ_is_refused(tmp_path: Any) -> None:
    transformers.Gemma4TextConfig(num_hidden_layers=6).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'head_dim' is a per-layer attribute.*; say --heads,"):
        model_shape(str(tmp_path))
