"""Models of transformers whose layers do not attend to all keys, on ranks that share one GPU.

Layers with an indexer, compressed keys, a convolution, a recurrence, windows, sinks and ALiBi:
outputs, gradients and generated tokens are those of one process.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.dense import largest  # noqa: E402
from tests.gpu.ranks_on_gpu import DEVICE  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations import families, mixer_models, test_generation  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_shares_sum_to,
    run_document_by_document,
    run_on_shard,
)
from tests.integrations.transformers_models import (  # noqa: E402
    SEQLEN,
    sequence_parallel,
    stay_in_float64,
)
from wf_backends.comm import Communicator  # noqa: E402
from wf_transformers.families.mixing import mixers_in  # noqa: E402
from wf_transformers.generation.states import has_state  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100), pytest.mark.usefixtures("no_tf32")]

INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3", "deepseek_v4", "glm5_next")
DISTANCES_ALONE = ("glm_moe_dsa", "minimax_m3", "deepseek_v4")
MIXING = ("mamba", "mamba2", "qwen3_next", "nemotron_h", "lfm2", "minimax", "recurrent_gemma")
OTHERS = ("gemma2", "gpt_oss", "falcon_alibi", "deepseek_v3")
GENERATING = ("gemma3", "gpt_oss", "falcon_alibi", "mamba2", "qwen3_next", "lfm2")
DOCUMENTS = (0, 5, 16, SEQLEN)
FLOAT32_BOUND = 1e-5
MAX_ERROR_RATIO = 1.5
"""Of the error of several ranks to that of one process: in bfloat16, and in float32 above the bound
(Qwen3-Next's random recurrence makes 1e-4 of a rounding)."""
BFLOAT16 = MIXING
"""In others one rounding may change which keys or experts are chosen."""
DTYPES_AND_NAMES = [
    *((torch.float32, name) for name in (*INDEXED, *MIXING, *OTHERS)),
    *((torch.bfloat16, name) for name in BFLOAT16),
]


def indexers_take_caches() -> bool:
    """Those of transformers 5.16 do not, except DeepSeek-V4's; those of 5.24 do."""
    try:
        file = import_module("transformers.models.deepseek_v32.modeling_deepseek_v32")
    except ModuleNotFoundError:
        return False
    return "cache" in inspect.signature(file.DeepseekV32Indexer.forward).parameters


def make(name: str, dtype: torch.dtype = torch.float64, reference: bool = False) -> Any:
    """A tiny random model, the same every time.

    Args:
        reference: with the attention of transformers that computes all options of the config.
    """
    if name in INDEXED and name != "deepseek_v4" and not indexers_take_caches():
        pytest.skip("the indexers of this transformers take no cache")
    if name in families.FAMILIES:
        family = families.FAMILIES[name]
        model = families.build(family, family.reference if reference else "sdpa")
    elif name in mixer_models.FAMILIES:
        model = mixer_models.build(name)
    else:
        pytest.skip(f"this transformers has no {name}")
    return model.to(DEVICE, dtype)


def without_float32(name: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """In float64 no family rounds to float32 on the way; for mixers `stay_in_float64` does that."""
    in_float64 = dtype is torch.float64 and name in families.FAMILIES
    return families.NoFloat32() if in_float64 else nullcontext()


def inputs(documents: bool = False) -> dict[str, Any]:
    batch = {key: x.to(DEVICE) for key, x in families.batch().items()}
    return {**batch, "cu_seqlens": DOCUMENTS} if documents else batch


def on_one_process(name: str, dtype: torch.dtype, documents: bool = False) -> Result:
    """Each document alone."""
    options = {"use_cache": False} if name in MIXING else {}
    model = make(name, dtype, reference=True)
    with without_float32(name, dtype):
        return run_document_by_document(model, inputs(documents), **options)


def over_ranks(name: str, size: int, dtype: torch.dtype, documents: bool = False) -> list[Result]:
    """What each rank has.

    In float32 layers with an indexer run again in the backward. Positions go on from document to
    document where layers see distances alone.
    """
    models = [make(name, dtype) for _ in range(size)]

    def rank(comm: Communicator) -> Result:
        sp, model = sequence_parallel(comm), models[comm.rank]
        # Threads that wait for each other in a backward must not share autograd's thread.
        serial = torch.autograd.set_multithreading_enabled(False)
        with wf_transformers.attach(model, sp, verify=False), serial, without_float32(name, dtype):
            batch = inputs(documents)
            if dtype is torch.float32 and name in INDEXED:
                model.gradient_checkpointing_enable()
            if documents and name in DISTANCES_ALONE:
                batch["position_ids"] = torch.arange(7, 7 + SEQLEN, device=DEVICE)[None]
            local = sp.shard_batch(batch)
            return run_on_shard(model, sp, local, cu_seqlens=local.get("cu_seqlens"))

    return run_threads(size, rank)


def errors(logits: Tensor, grads: dict[str, Tensor], expected: Result) -> tuple[float, float]:
    """Relative errors of the logits and of all gradients as one vector."""
    logits = logits[:, : expected.logits.shape[1]]
    ours, others = (
        torch.cat([x[name].double().flatten() for name in expected.grads])
        for x in (grads, expected.grads)
    )
    pairs = ((logits.double(), expected.logits.double()), (ours, others))
    error, grad_error = (float((a - b).norm() / b.norm()) for a, b in pairs)
    return error, grad_error


@pytest.mark.parametrize("name", [*INDEXED, *MIXING])
def test_documents_are_exact_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in MIXING:
        stay_in_float64(monkeypatch)
    expected = on_one_process(name, torch.float64, documents=True)
    assert_shares_sum_to(expected, over_ranks(name, 2, torch.float64, documents=True))


@pytest.mark.parametrize(("dtype", "name"), DTYPES_AND_NAMES)
def test_loss_and_gradients_are_as_exact_as_those_of_one_process(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if name in MIXING:
            stay_in_float64(patch)
        reference = on_one_process(name, torch.float64)
    one = on_one_process(name, dtype)
    results = over_ranks(name, 4, dtype)
    summed = {key: sum(x.grads[key].double() for x in results) for key in reference.grads}
    ranks_errors = errors(results[0].logits, summed, reference)
    one_errors = errors(one.logits, one.grads, reference)
    parts = zip(("logits", "gradients"), ranks_errors, one_errors, strict=True)
    text = ", ".join(f"{what} {error:.2e} ({alone:.2e})" for what, error, alone in parts)
    print(f"\n{name}, 4 ranks, {dtype}: {text}", flush=True)
    for error, of_one in zip(ranks_errors, one_errors, strict=True):
        least = FLOAT32_BOUND if dtype is torch.float32 else 0.0
        assert error <= max(least, MAX_ERROR_RATIO * of_one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", GENERATING)
def test_tokens_and_logits_are_those_of_one_process(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with windows keep a window of keys, layers with a recurrence a state."""
    layers = mixers_in(make(name)) if name in MIXING else []
    if any(not has_state(x) or row.has_own_cache for _, x, row in layers):
        pytest.skip(f"this transformers keeps no state of {name} in its cache")
    if dtype is torch.float32:
        monkeypatch.setattr(test_generation, "NoFloat32", nullcontext)
    shown = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 12}
    ids = test_generation.prompts().to(DEVICE)
    expected = test_generation.alone(make(name, dtype, True).eval(), ids, **shown)
    bound = 1e-9 if dtype is torch.float64 else 1e-4
    for output in test_generation.on_ranks(4, lambda: make(name, dtype), ids, **shown):
        assert torch.equal(output.sequences, expected.sequences)
        pairs = zip(output.logits, expected.logits, strict=True)
        error = largest(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        assert error <= bound
    print(f"\n{name}, 4 ranks, {dtype}: error of the logits {error:.2e}", flush=True)


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "several tokens a call": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_other_ways_to_generate_give_the_tokens_of_one_process(name: str, options: Any) -> None:
    ids = test_generation.prompts(1).to(DEVICE)
    expected = test_generation.alone(make(name, reference=True).eval(), ids, **options)
    for tokens in test_generation.on_ranks(2, lambda: make(name), ids, **options):
        assert torch.equal(tokens, expected)
