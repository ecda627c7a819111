"""Layers that mix tokens by a convolution or a recurrence (Mamba, delta rules, ...) are exact.

Each rank computes some channels of all tokens: before the layer ranks trade tokens for channels,
after it channels for tokens. The reference is the same model on one device, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.models.mamba2 import modeling_mamba2  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import copy_and_spoil  # noqa: E402
from tests.integrations.mixer_models import FAMILIES, build  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_document_by_document,
    run_on_shard,
)
from tests.integrations.transformers_models import (  # noqa: E402
    SEQLEN,
    assert_close,
    batch,
    sequence_parallel,
    stay_in_float64,
)
from wf_transformers.families.mixers import heads_and_groups  # noqa: E402

DOCUMENTS = (0, 5, 16, SEQLEN)
KINDS = ["mamba", "mamba2", "zamba", "jamba", "recurrent_gemma"]
"""A family for each kind of layer that every version of transformers has."""
NEWER_KINDS = [
    family for family in ("qwen3_next", "nemotron_h", "lfm2", "minimax") if family in FAMILIES
]
"""The same of newer versions."""


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def attached(family: str, comm: Any, layout: str = "zigzag") -> tuple[Any, Any, Any]:
    """(sp, model, handle)"""
    sp, model = sequence_parallel(comm, layout), build(family)
    return sp, model, wf_transformers.attach_model(model, sp)


def assert_exact(
    family: str,
    size: int,
    inputs: dict[str, Any],
    layout: str = "zigzag",
    recompute: bool = False,
    valid: Tensor | None = None,
    change_attached: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """On `size` ranks; the logits of the `valid` tokens."""
    expected = run_document_by_document(build(family), inputs, use_cache=False)

    def rank(comm: Any) -> Result:
        sp, model, handle = attached(family, comm, layout)
        if recompute:
            model.gradient_checkpointing_enable()
        local = sp.shard_batch(inputs)
        documents = local.get("cu_seqlens")
        return run_on_shard(change_attached(model), sp, local, cu_seqlens=documents)

    assert_shares_sum_to(expected, run_threads(size, rank), valid)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_exact(family: str, size: int) -> None:
    assert_exact(family, size, batch(2))


@pytest.mark.parametrize("family", KINDS)
def test_deep_copy_of_an_attached_model_is_exact(family: str) -> None:
    assert_exact(family, 2, batch(2), change_attached=copy_and_spoil)


def exchange_parameters(model: Any) -> Any:
    """Do what FSDP1 does: in a forward the parameters of a layer are plain tensors."""

    def enter(layer: nn.Module, _: Any) -> None:
        for name, parameter in parameters[layer].items():
            path, _, attribute = name.rpartition(".")
            delattr(layer.get_submodule(path), attribute)
            setattr(layer.get_submodule(path), attribute, parameter.view_as(parameter))

    def leave(layer: nn.Module, *_: Any) -> None:
        for name, parameter in parameters[layer].items():
            path, _, attribute = name.rpartition(".")
            delattr(layer.get_submodule(path), attribute)
            setattr(layer.get_submodule(path), attribute, parameter)

    parameters = {layer: dict(layer.named_parameters()) for layer in model.backbone.layers}
    for layer in parameters:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    return model


def test_parameters_that_are_plain_tensors_in_a_forward_are_exact() -> None:
    assert_exact("mamba", 2, batch(2), change_attached=exchange_parameters)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "document_zigzag"])
@pytest.mark.parametrize("family", [*KINDS, *NEWER_KINDS])
def test_states_end_with_their_document(family: str, layout: str) -> None:
    assert_exact(family, 2, batch(cu_seqlens=DOCUMENTS), layout)


@pytest.mark.parametrize("family", ["mamba", "zamba2"])
def test_recomputed_layers_see_the_documents_of_their_forward(family: str) -> None:
    assert_exact(family, 2, batch(cu_seqlens=DOCUMENTS), recompute=True)


def test_states_end_with_their_document_on_one_rank() -> None:
    assert_exact("mamba", 1, batch(cu_seqlens=DOCUMENTS))


def test_padding_of_ragged_samples_reaches_no_token() -> None:
    mask = (torch.arange(SEQLEN)[None] < torch.tensor([[SEQLEN], [9]])).long()
    assert_exact("mamba", 4, batch(2, attention_mask=mask), valid=mask.bool())


def test_remove_restores_the_layers() -> None:
    ids = batch(seqlen=24)["input_ids"]
    expected = build("mamba")(ids, use_cache=False).logits

    def rank(comm: Any) -> None:
        _, model, handle = attached("mamba", comm)
        handle.remove()
        assert_close(model(ids, use_cache=False).logits, expected, "logits")

    run_threads(2, rank)


def test_a_cache_is_refused() -> None:
    def rank(comm: Any) -> None:
        _, model, _ = attached("mamba", comm)
        hidden_states = torch.ones(1, 2, 32, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="called with a cache"):
            model.backbone.layers[0].mixer(hidden_states, cache_params=object())

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("mamba", 3, r"backbone.layers.0.mixer \(MambaMixer\): its 64 channels"),
        ("mamba2", 3, r"\(Mamba2Mixer\): its 16 heads"),
        ("recurrent_gemma", 3, r"\(RecurrentGemmaRecurrentBlock\): its 4 num_attention_heads"),
        ("zamba", 8, r"\(ZambaMambaMixer\): its 4 n_mamba_heads"),
    ],
)
def test_channels_that_do_not_divide_by_the_ranks_are_refused(
    family: str, size: int, message: str
) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotImplementedError, match=message):
            attached(family, comm)

    run_threads(size, rank)


def test_groups_that_do_not_divide_by_the_ranks_are_refused() -> None:
    layer = SimpleNamespace(num_heads=12, n_groups=3, A_log=torch.ones(12))
    with pytest.raises(NotImplementedError, match="its 3 groups cannot be shared by 4 ranks"):
        heads_and_groups(layer, 0, 4)


def test_cuda_kernels_have_groups_side_by_side_also_of_a_layer_whose_class_fsdp2_derived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`fully_shard` makes a class in a file of torch's, which tells nothing of the kernels."""
    monkeypatch.setattr(modeling_mamba2, "is_fast_path_available", True, raising=False)
    derived = type("FSDPMamba2Mixer", (modeling_mamba2.Mamba2Mixer,), {"__module__": "torch"})
    layer: Any = derived.__new__(derived)
    nn.Module.__init__(layer)
    layer.num_heads, layer.n_groups = 4, 2
    layer.A_log = SimpleNamespace(device=torch.device("cuda"))
    assert [heads_and_groups(layer, rank, 2)[0].tolist() for rank in (0, 1)] == [[0, 1], [2, 3]]


def test_a_model_built_with_the_registered_name_needs_apply() -> None:
    """The name reaches its attention but not its mixers."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("zamba")
        with wf_transformers.register(sp, f"wallfacer-{comm.rank}") as registration:
            model.config._attn_implementation = registration.name
            with pytest.raises(ValueError, match="mixes tokens .* wf_transformers.apply"):
                wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))

    run_threads(2, rank)


def test_parameters_that_the_table_does_not_know_are_refused() -> None:
    """And the layer before, which was replaced already, is restored."""

    def rank(comm: Any) -> None:
        model = build("mamba")
        model.backbone.layers[1].mixer.adapter = nn.Linear(2, 2)
        with pytest.raises(NotImplementedError, match="adapter.weight.* cannot be cut by channels"):
            wf_transformers.attach_model(model, sequence_parallel(comm))
        assert "forward" not in vars(model.backbone.layers[0].mixer)

    run_threads(2, rank)


def test_channels_are_exchanged_once_each_way() -> None:
    """A layer of 2 ranks sends half of its rows' channels, gets half back, and sums dt, B and C.

    Mamba's input projection gives two tensors of 64 channels, values and gates.
    """
    layers, rows, channels, itemsize = 2, 12, 64, 8
    time_step_rank, state_size = 3, 4

    def rank(comm: Any) -> dict[str, int]:
        sp, model, _ = attached("mamba", comm)
        local = sp.shard_batch(batch(seqlen=2 * rows))
        sp.report()
        model(**wf_transformers.forward_kwargs(model, local))
        return sp.report()

    for sent in run_threads(2, rank):
        half = layers * rows * channels // 2 * itemsize
        assert sent["forward channels"] == 2 * half
        assert sent["forward channels back"] == half
        summed = layers * rows * (time_step_rank + 2 * state_size) * itemsize
        assert sent["forward channels sum reduce"] == summed
        assert sent["forward channels sum gather"] == summed


@pytest.mark.skipif("minimax" not in FAMILIES, reason="this transformers has none")
def test_a_layer_with_a_cache_of_its_own_kind_does_not_generate() -> None:
    def rank(comm: Any) -> None:
        _, model, handle = attached("minimax", comm)
        with pytest.raises(NotImplementedError, match="cannot generate over ranks"):
            wf_transformers.generate(model.eval(), handle, batch()["input_ids"])

    run_threads(2, rank)
