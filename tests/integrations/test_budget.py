"""The memory budget compared with the bytes that small models really hold in a step.

Measured: every storage that is allocated in a step of one rank, on a CPU, beyond the model and its
gradients. Predicted: `Training.activations`, to a tenth, by formulas and by layers that are counted
in the model.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import wf_transformers  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.autochunk.tiling import Tiles, tile_modules  # noqa: E402
from wf_backends.budget import Decoder, Experts, MemoryOptions, Training  # noqa: E402
from wf_backends.cluster import load  # noqa: E402
from wf_backends.comm import World  # noqa: E402
from wf_backends.lowering import Shape  # noqa: E402
from wf_backends.planner import Choice, Request, Workload, price_plan  # noqa: E402
from wf_backends.schedule import default_placement, make_mask  # noqa: E402
from wf_transformers.folders import layers  # noqa: E402
from wf_transformers.folders.shape import model_shape  # noqa: E402

SEQLEN = 512
TOLERANCE = 0.1  # relative
LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 64, 4, 2
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2
CHECKPOINTS = ["none", "device", "host"]
DTYPES = [torch.float32, torch.bfloat16]


class LiveBytes(TorchDispatchMode):
    """Records the largest number of bytes of storages that live at one time, beyond `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._seen:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live -= size


def build(family: str, dtype: torch.dtype, intermediate: int, vocabulary: int) -> Any:
    """A "Llama", or a "Mixtral" with eight experts for each MLP, of which a token goes to two."""
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=intermediate,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=vocabulary,
        attn_implementation="sdpa",
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()


def measured_bytes(model: Any, checkpoints: str, tile: int = 0) -> int:
    """At the peak of a step of one rank, beyond the model, its gradients and the inputs.

    Args:
        tile: tokens of a tile of each MLP; 0 = no tiles.
    """
    mlps = [name for name, _ in model.named_modules() if name.endswith(".mlp") and tile]
    checkpointing = None if checkpoints == "none" else {"offload": checkpoints == "host"}
    sp = SequenceParallel(SequenceParallelConfig(route={"name": "ring"}), World(1).comm(0))
    with wf_transformers.attach(model, sp, activation_checkpointing=checkpointing) as handle:
        wf_transformers.WholeBatchHooks(model, handle)
        ids = torch.randint(model.config.vocab_size, (1, SEQLEN))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters()]
        tiled = tile_modules(model, [Tiles(name, 1, SEQLEN // tile) for name in mlps])
        with LiveBytes([*model.parameters(), *model.buffers(), *gradients, ids]) as live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        tiled.remove()
    return live.peak


def predicted_bytes(model: Any, checkpoints: str) -> float:
    """The same by the formulas; device and host together, as here they are one memory."""
    itemsize, width = model.dtype.itemsize, model.config.intermediate_size
    is_mixture = model.config.model_type == "mixtral"
    decoder = Decoder(
        layers=LAYERS,
        hidden=HIDDEN,
        intermediate=0 if is_mixture else width,
        vocabulary=model.config.vocab_size,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        parameters=1,
        itemsize=itemsize,
        experts=Experts(NUM_EXPERTS, EXPERTS_PER_TOKEN, width) if is_mixture else None,
    )
    return step_bytes(decoder, MemoryOptions(checkpoints))


def step_bytes(decoder: Decoder, options: MemoryOptions) -> float:
    """Of the device and the host at the peak of a step."""
    job = Training(decoder, 1, attention_bytes_a_token(decoder))
    activations = job.activations(SEQLEN, options)
    return activations.peak + activations.host


def attention_bytes_a_token(model: Decoder) -> float:
    """Of the buffers of a ring of one rank, as the planner prices them."""
    shape = Shape(1, model.heads, model.kv_heads, model.head_dim, model.itemsize)
    work = Workload(shape, SEQLEN, make_mask(True, (-1, -1)).within(SEQLEN), "zigzag")
    ring = default_placement({"name": "ring"}, 1)
    request = Request(replace(load("one-host"), ranks_per_host=1), work)
    return price_plan(request, Choice(1, ring, ring)).cost.memory_bytes / SEQLEN


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize(
    ("intermediate", "vocabulary"),
    [(176, 512), (176, 16), (16, 16)],
    ids=["loss is largest", "MLP is largest", "attention is largest"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formulas_predict_the_bytes_of_a_llama(
    dtype: torch.dtype, intermediate: int, vocabulary: int, checkpoints: str
) -> None:
    model = build("Llama", dtype, intermediate, vocabulary)
    expected = measured_bytes(model, checkpoints)
    assert predicted_bytes(model, checkpoints) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize(("intermediate", "vocabulary"), [(176, 2048), (176, 16), (16, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formulas_predict_the_bytes_of_a_mixture(
    dtype: torch.dtype, intermediate: int, vocabulary: int, checkpoints: str
) -> None:
    if checkpoints != "none" and int(transformers.__version__[0]) < 5:
        pytest.skip("transformers 4 computes the backward of one expert at a time, not of all")
    model = build("Mixtral", dtype, intermediate, vocabulary)
    expected = measured_bytes(model, checkpoints)
    assert predicted_bytes(model, checkpoints) == pytest.approx(expected, rel=TOLERANCE)


WIDTHS = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
WIDTHS |= {"vocab_size": 16}
LIKE_LLAMA = {"intermediate_size": 176, "num_key_value_heads": KV_HEADS, **WIDTHS}
FAMILIES = {  # of layers unlike Llama's: without a gated MLP, with more norms, other norms, experts
    "Falcon": {"alibi": False} | WIDTHS,
    "GPT2": {"attn_pdrop": 0.0} | WIDTHS,
    "GPTNeoX": {"intermediate_size": 4 * HIDDEN} | WIDTHS,
    "Gemma3Text": {"head_dim": 16} | LIKE_LLAMA,
    "Llama": LIKE_LLAMA,
    "Olmo2": LIKE_LLAMA,
    "OPT": {"ffn_dim": 4 * HIDDEN, "word_embed_proj_dim": HIDDEN, "dropout": 0.0} | WIDTHS,
    "Phi": LIKE_LLAMA,
    "Qwen3": {"head_dim": 16} | LIKE_LLAMA,
    "DeepseekV3": {
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
        **{"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    } | LIKE_LLAMA | {"num_key_value_heads": HEADS},
    "Llama4Text": {
        **{"head_dim": 16, "intermediate_size_mlp": 352, "num_local_experts": 4},
        **{"interleave_moe_layer_step": 2, "attention_chunk_size": None},
    } | LIKE_LLAMA,
    "Mixtral": LIKE_LLAMA,
    "Qwen3Moe": {
        **{"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 88},
    } | LIKE_LLAMA,
}  # fmt: skip
WITH_EXPERTS = ("DeepseekV3", "Llama4Text", "Mixtral", "Qwen3Moe")
CHOICES = [(dtype, MemoryOptions("none")) for dtype in DTYPES]
CHOICES += [(torch.bfloat16, MemoryOptions("none", 64)), (torch.bfloat16, MemoryOptions("device"))]
CHOICES += [(torch.float32, MemoryOptions("host"))]


def counted(family: str, dtype: torch.dtype, folder: Path) -> tuple[Any, Decoder]:
    """A small model, and what `wallfacer plan --model` reads from its folder."""
    if family in WITH_EXPERTS and int(transformers.__version__[0]) < 5:
        pytest.skip("experts of transformers 4 look at values, so they are counted by formulas")
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    config.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train(), Decoder(**model_shape(str(folder), dtype.itemsize))


@pytest.mark.parametrize(("dtype", "options"), CHOICES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_counted_in_a_model_predict_its_bytes(
    family: str, dtype: torch.dtype, options: MemoryOptions, tmp_path: Path
) -> None:
    if options.tile and family == "Llama4Text":
        pytest.skip("its experts return more than rows, so they are not tiled")
    model, decoder = counted(family, dtype, tmp_path)
    assert sum(kind.count for kind in decoder.kinds) == LAYERS
    expected = measured_bytes(model, options.checkpoints, options.tile)
    assert step_bytes(decoder, options) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capped_logits_are_counted(dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    sizes = {"head_dim": 16} | LIKE_LLAMA | {"vocab_size": 4096}
    monkeypatch.setitem(FAMILIES, "Gemma2", sizes)
    model, decoder = counted("Gemma2", dtype, tmp_path)
    expected = measured_bytes(model, "device")
    assert step_bytes(decoder, MemoryOptions("device")) == pytest.approx(expected, rel=TOLERANCE)


def test_a_llama_counted_in_its_layers_holds_what_the_formulas_say(tmp_path: Path) -> None:
    _, decoder = counted("Llama", torch.bfloat16, tmp_path)
    by_formulas = replace(decoder, kinds=(), last_norm=None)
    for options in (MemoryOptions(where, tile) for where in CHECKPOINTS for tile in (0, 64)):
        assert step_bytes(decoder, options) == pytest.approx(step_bytes(by_formulas, options))


def test_a_model_that_cannot_run_on_fake_tensors_has_no_counted_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("reads a value")

    monkeypatch.setattr(layers, "attach_model", fail)
    decoder = counted("Llama", torch.bfloat16, tmp_path)[1]
    assert decoder.kinds == () and decoder.uncounted == "RuntimeError: reads a value"


def test_tiles_of_experts_hold_sums_of_all_weights_but_rows_of_one_tile() -> None:
    tokens, width, fp32 = 2**16, 176, 4
    experts = Experts(NUM_EXPERTS, EXPERTS_PER_TOKEN, width)
    decoder = Decoder(LAYERS, HIDDEN, 0, 16, HEADS, KV_HEADS, 16, 1, 4, experts)
    untiled, tiled = (
        Training(decoder, 1, 0.0).activations(tokens, MemoryOptions("device", tile))
        for tile in (0, 64)
    )
    weights_bytes, rows_bytes = 3 * HIDDEN * NUM_EXPERTS * width * fp32, tokens * HIDDEN * fp32
    assert weights_bytes < tiled.mlp < 20 * rows_bytes < untiled.mlp


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 4}


class TestSizesOfAModelsFolder:
    """`model_shape` reads the sizes of a Decoder from a folder's config.json."""

    def test_llama(self, tmp_path: Path) -> None:
        model = build("Llama", torch.float32, 176, 512)
        model.config.save_pretrained(tmp_path)
        sizes = {"layers": LAYERS, "hidden": HIDDEN, "intermediate": 176, "vocabulary": 512}
        sizes |= {"parameters": sum(p.numel() for p in model.parameters())}
        shape = model_shape(str(tmp_path))
        counted = model_shape(str(tmp_path), itemsize=2)
        assert counted | shape | sizes == counted

    def test_gpt2_has_an_mlp_of_four_times_its_width(self, tmp_path: Path) -> None:
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
        assert model_shape(str(tmp_path), itemsize=2)["intermediate"] == 4 * 32

    def test_mixtral_has_experts_and_no_mlp(self, tmp_path: Path) -> None:
        experts = {"num_local_experts": 4, "intermediate_size": 48}
        transformers.MixtralConfig(**experts, **SMALL).save_pretrained(tmp_path)
        sizes = model_shape(str(tmp_path), itemsize=2)
        assert (sizes["intermediate"], sizes["experts"]) == (0, Experts(4, 2, 48))

    def test_qwen2_moe_has_experts_and_a_shared_one(self, tmp_path: Path) -> None:
        experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
        experts |= {"shared_expert_intermediate_size": 40}
        transformers.Qwen2MoeConfig(**experts, **SMALL).save_pretrained(tmp_path)
        sizes = model_shape(str(tmp_path), itemsize=2)
        assert (sizes["intermediate"], sizes["experts"]) == (40, Experts(8, 4, 24))

    def test_dbrx_has_its_experts_in_a_config_of_their_own(self, tmp_path: Path) -> None:
        experts = {"moe_num_experts": 8, "moe_top_k": 4, "ffn_hidden_size": 24}
        attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
        transformers.DbrxConfig(
            d_model=32, n_heads=4, n_layers=2, ffn_config=experts, attn_config=attention
        ).save_pretrained(tmp_path)
        assert model_shape(str(tmp_path), itemsize=2)["experts"] == Experts(8, 4, 24)

    def test_opt_has_the_width_of_its_mlp_under_another_name(self, tmp_path: Path) -> None:
        transformers.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4
        ).save_pretrained(tmp_path)
        assert model_shape(str(tmp_path), itemsize=2)["intermediate"] == 48

    def test_granite_has_a_shared_expert_under_another_name(self, tmp_path: Path) -> None:
        experts = {"num_local_experts": 4, "intermediate_size": 48, "shared_intermediate_size": 40}
        transformers.GraniteMoeSharedConfig(**experts, **SMALL).save_pretrained(tmp_path)
        assert model_shape(str(tmp_path), itemsize=2)["intermediate"] == 40

    def test_an_encoder_beside_the_decoder_is_refused(self, tmp_path: Path) -> None:
        """As a causal model it would be built without its encoder."""
        transformers.BartConfig().save_pretrained(tmp_path)
        with pytest.raises(NotImplementedError, match="BartConfig has an encoder, too; leave --m"):
            model_shape(str(tmp_path), itemsize=2)

    @pytest.mark.parametrize(
        ("config", "kv_heads", "head_dim"),
        [
            (transformers.FalconConfig(), 1, 64),
            (transformers.FalconConfig(new_decoder_architecture=True, num_kv_heads=8), 71, 64),
            (transformers.FalconConfig(multi_query=False), 71, 64),
            (transformers.Zamba2Config(), 32, 160),
        ],
        ids=["Falcon 7B", "Falcon 40B", "Falcon RW", "Zamba2"],
    )
    def test_heads_under_other_names(
        self, config: Any, kv_heads: int, head_dim: int, tmp_path: Path
    ) -> None:
        config.save_pretrained(tmp_path)
        shape = model_shape(str(tmp_path))
        assert (shape["kv_heads"], shape["head_dim"]) == (kv_heads, head_dim)

    def test_missing_number_of_experts_a_token_is_that_of_the_class(self, tmp_path: Path) -> None:
        self.save_mixtral(tmp_path, '"num_experts_per_tok": 2', '"unknown": 2')
        assert model_shape(str(tmp_path), itemsize=2)["experts"].chosen == 2

    def test_wrong_number_of_experts_a_token_is_refused(self, tmp_path: Path) -> None:
        self.save_mixtral(tmp_path, '"num_experts_per_tok": 2', '"num_experts_per_tok": "two"')
        with pytest.raises(
            (NotImplementedError, ValueError), match="how many experts|num_experts_per_tok"
        ):
            model_shape(str(tmp_path), itemsize=2)

    @staticmethod
    def save_mixtral(folder: Path, old: str, new: str) -> None:
        """The config of a Mixtral with one of its lines replaced."""
        transformers.MixtralConfig(num_local_experts=4).save_pretrained(folder)
        text = (folder / "config.json").read_text()
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new))

    @pytest.mark.skipif(
        not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4"
    )
    def test_model_whose_layers_differ_is_refused(self, tmp_path: Path) -> None:
        transformers.Gemma4TextConfig(num_hidden_layers=6).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="'head_dim' is a per-layer .*; give --heads,"):
            model_shape(str(tmp_path))


def test_building_many_expert_modules_calls_no_fake_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors the modules of a large mixture took a minute to build and to initialise."""
    calls = list[object]()
    dispatch = FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, func: object, *args: Any, **kwargs: Any) -> Any:
        calls.append(func)
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    counts = list[int]()
    for experts in (4, 64):
        config = transformers.MixtralConfig(num_local_experts=experts, **sizes, **heads)
        config.save_pretrained(tmp_path / str(experts))
        model_shape(str(tmp_path / str(experts)), 2)
        counts.append(len(calls))
        calls.clear()
    assert counts[1] - counts[0] < 16 * (64 - 4)  # less than one for each further expert
