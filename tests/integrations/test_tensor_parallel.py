"""Sequence parallelism beside torch's tensor parallelism and FSDP2: gradients of one device.

The ranks are a mesh of 2 x 2, "sp" and "tp". For transformers' own plans see
test_distributed_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_processes  # noqa: E402
from tests.integrations.deepspeed_jobs import (  # noqa: E402
    VOCABULARY,
    dense_loss_sum,
    python,
    tiny_llama,
    token_batches,
)
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_backends.comm import Communicator  # noqa: E402
from wf_transformers.handle import Handle  # noqa: E402

pytestmark = pytest.mark.processes

COLUMNWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
TP_PLAN: dict[str, Any] = {
    **{f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNWISE},
    **{f"model.layers.*.{name}": RowwiseParallel() for name in ROWWISE},
}


NUM_LATENTS = 12


class RotaryOfAllHeads(ParallelStyle):
    """Of what kv_a_proj_with_mqa gives, all heads read the rotary part past kv_b_proj."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sum_gradient(_: nn.Module, __: Any, x: torch.Tensor) -> torch.Tensor:
            latents, rotary = x.tensor_split([NUM_LATENTS], -1)
            replicated = DTensor.from_local(rotary, device_mesh, [Replicate()])
            return torch.cat([latents, replicated.to_local(grad_placements=[Partial()])], -1)

        module.register_forward_hook(sum_gradient)
        return module


LATENTS_PLAN: dict[str, Any] = {
    "model.layers.*.self_attn.kv_a_proj_with_mqa": RotaryOfAllHeads(),
    "model.layers.*.self_attn.q_b_proj": ColwiseParallel(),
    "model.layers.*.self_attn.kv_b_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
}


@dataclass(frozen=True)
class Setting:
    """What is applied to the model, in order, and the fields of its sequence-parallel config."""

    order: tuple[str, ...]
    config: dict[str, Any]
    key_heads: int = 2
    latents: bool = False
    """Whether the model is a DeepSeek-V3 that sends latents, and not a Llama."""


SETTINGS = {
    "attached-first": Setting(("sp", "tp"), {"route": "ring"}),
    "attached-last": Setting(("tp", "sp"), {"route": "ring"}),
    "ulysses": Setting(("tp", "sp"), {"ulysses_degree": 2}, key_heads=4),
    "planned": Setting(("tp", "sp"), {}),
    "fsdp": Setting(("tp", "sp", "fsdp"), {"route": "ring"}),
    "fsdp-before": Setting(("tp", "fsdp", "sp"), {"route": "ring"}),
    "latents": Setting(("tp", "sp"), {"route": "ring"}, latents=True),
    "latents-fsdp": Setting(("sp", "tp", "fsdp"), {"route": "ring"}, latents=True),
}
LossAndGradients = tuple[float, dict[str, torch.Tensor]]


def tiny_model(setting: Setting) -> Any:
    if not setting.latents:
        return tiny_llama(num_key_value_heads=setting.key_heads).double()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2}
    widths = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 16}
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, kv_lora_rank=NUM_LATENTS, **sizes, **heads, **widths
    )
    return DeepseekV3ForCausalLM(config).double()


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))


def apply(
    step: str, model: Any, sp: SequenceParallel, mesh: DeviceMesh, latents: bool = False
) -> None:
    """Attach the model ("sp"), or apply torch's tensor parallelism or FSDP2 ("tp", "fsdp")."""
    match step:
        case "sp":
            wf_transformers.attach(model, sp, latents=latents)
        case "tp":
            parallelize_module(model, mesh["tp"], LATENTS_PLAN if latents else TP_PLAN)
        case "fsdp":
            fully_shard(model, mesh=mesh["sp"])


def run_all_settings(comm: Communicator) -> dict[str, LossAndGradients]:
    mesh = make_mesh()
    return {name: run_setting(mesh, setting) for name, setting in SETTINGS.items()}


def run_setting(mesh: DeviceMesh, setting: Setting) -> LossAndGradients:
    """The loss, and the gradients of all parameters in full."""
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.T.tolist())
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": 2, **setting.config})
    sp, model = SequenceParallel(config, group), tiny_model(setting)
    for step in setting.order:
        apply(step, model, sp, mesh, setting.latents)
    shard = sp.shard_batch(next(token_batches(0)))
    logits = model(**wf_transformers.forward_kwargs(model, shard)).logits
    loss = sp.loss(logits, shard["labels"])
    (loss * sp.size).backward()
    total_loss = loss.detach().clone()
    dist.all_reduce(total_loss, group=group)
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        full_grad = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        if "fsdp" not in setting.order:  # FSDP has averaged over the ranks of a sequence
            dist.all_reduce(full_grad, group=group)
            full_grad /= sp.size
        gradients[name] = full_grad
    return total_loss.item(), gradients


@pytest.fixture(scope="module")
def results_by_rank() -> list[dict[str, LossAndGradients]]:
    return run_processes(4, run_all_settings, timeout=280.0, start=python())


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_those_of_one_device(
    name: str, results_by_rank: list[dict[str, LossAndGradients]]
) -> None:
    """To 1e-7, for gradients of the largest of each weight: Llama's norms compute in float32."""
    reference = tiny_model(SETTINGS[name])
    loss_sum, num_valid = dense_loss_sum(reference, next(token_batches(0)))
    expected_loss = loss_sum / num_valid
    expected_loss.backward()
    for results in results_by_rank:
        loss, gradients = results[name]
        assert loss == pytest.approx(expected_loss.item(), rel=1e-7)
        for key, parameter in reference.named_parameters():
            error = (gradients[key] - parameter.grad).abs().max()
            assert error <= 1e-7 * parameter.grad.abs().max(), key


def refusals_of_tp_ranks(comm: Communicator) -> dict[str, list[str]]:
    """Messages by the order of steps, where the ranks of "tp" share a sequence.

    Attaching before tensor parallelism cannot know of it: then each forward is refused.
    """
    mesh = make_mesh()
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), mesh["tp"].get_group())
    messages: dict[str, list[str]] = {}
    for order in ("tp sp", "tp fsdp sp"):
        model = tiny_llama()
        *torch_steps, attach = order.split()
        for step in torch_steps:
            apply(step, model, sp, mesh)
        with pytest.raises(ValueError) as raised:
            apply(attach, model, sp, mesh)
        messages[order] = [str(raised.value)]
    model = tiny_llama()
    apply("sp", model, sp, mesh)
    apply("tp", model, sp, mesh)
    kwargs = wf_transformers.forward_kwargs(model, sp.shard_batch(next(token_batches(0))))
    messages["sp tp"] = []
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            model(**kwargs)
        messages["sp tp"].append(str(raised.value))
    return messages


def same_data_on_a_mesh() -> list[str]:
    """The advice where ranks of "sp" read different samples; afterwards they read the same."""
    group, _ = dist.new_subgroups_by_enumeration(make_mesh().mesh.T.tolist())
    handle = Handle(SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), group))
    samples: Any = [{"input_ids": torch.full((8,), n)} for n in range(4)]
    with pytest.raises(ValueError) as raised:
        handle.shard_batch(next(iter(handle.prepare_dataloader(samples, batch_size=1))))
    handle.data_parallel_rank, handle.data_parallel_size = 0, 1
    for batch in handle.prepare_dataloader(samples, batch_size=1):
        handle.shard_batch(batch)
    return raised.value.__notes__


def refusals(comm: Communicator) -> tuple[dict[str, list[str]], list[str]]:
    return refusals_of_tp_ranks(comm), same_data_on_a_mesh()


def test_ranks_of_a_mesh_that_share_the_wrong_tokens_are_refused() -> None:
    by_rank = run_processes(4, refusals, timeout=280.0, start=python())
    for rank, (messages, notes) in enumerate(by_rank):
        shared = [0, 2] if rank % 2 == 0 else [1, 3]
        assert "set handle.data_parallel_rank and data_parallel_size" in notes[0]
        assert f"ranks {shared} share a sequence" in notes[0]
        ranks = [0, 1] if rank < 2 else [2, 3]
        expected = f"q_proj.weight is in parts on the ranks {ranks}, and ranks {ranks} share"
        assert {order: len(texts) for order, texts in messages.items()} == {
            "tp sp": 1,
            "tp fsdp sp": 1,
            "sp tp": 2,
        }
        for texts in messages.values():
            for message in texts:
                assert expected in message
