"""The hooks of `wf_transformers`, for models that ColossalAI splits.

Their logits may be split over tensor-parallel ranks. They may be a stage of a pipeline, or no
model of transformers. The hooks are the same under all booster plugins.
"""

from __future__ import annotations

from typing import Any

from colossalai.shardformer.layer.loss import cross_entropy_1d
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.modeling_outputs import CausalLMOutput

from wf_backends.parallel import at_least_one
from wf_colossalai.sequence import plain
from wf_transformers import Handle, WholeBatchHooks, mask_arguments, outermost
from wf_transformers.whole_batches.arguments import BatchCall, WhichLogits
from wf_transformers.whole_batches.custom_loss import INPUTS, custom_loss_reason

BATCH_KEYS = (*INPUTS, "labels")


class TokenHooks(WholeBatchHooks):
    """Cuts ids and labels, and computes the loss, for a model with one output row per token.

    Args:
        causal: whether labels must be shifted.
        tensor_parallel: the group over which logits may be split.
    """

    whole_without_labels = False
    hides_local_logits = False

    def __init__(
        self, model: nn.Module, handle: Handle, causal: bool, tensor_parallel: ProcessGroup | None
    ) -> None:
        super().__init__(model, handle, head="causal" if causal else "masked")
        self._tensor_parallel = tensor_parallel

    def _which_logits(self, asked: bool | None, trains: bool, labelled: bool) -> WhichLogits:
        """What the base class says; GeminiDDP.eval() reaches the model's children alone."""
        trains = trains and any(child.training for child in self.model.children())
        return super()._which_logits(asked, trains, labelled)

    def _cut_arguments(self, arguments: dict[str, Any], seqlen: int) -> dict[str, Any]:
        """Select by name: hidden states from the previous pipeline stage are already cut."""
        return {key: arguments[key] for key in BATCH_KEYS if arguments.get(key) is not None}

    def _has_custom_loss(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        if not outermost(model):
            return False
        reason = custom_loss_reason(model, arguments)
        if reason is not None:
            raise NotImplementedError(
                f"{reason}, and under ColossalAI WallFacer computes only plain cross entropy from "
                "labels: leave labels out, and compute your loss from logits that sp.unshard "
                "gathers"
            )
        return False

    def _model_kwargs(
        self, model: nn.Module, arguments: dict[str, Any], call: BatchCall
    ) -> dict[str, Any]:
        if outermost(model):
            return super()._model_kwargs(model, arguments, call)
        taken = {k: v for k, v in call.local.items() if k in self._names and k != "labels"}
        return arguments | taken | {"cu_seqlens": None} | mask_arguments(call.local)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            output = CausalLMOutput(logits=output)  # type: ignore[arg-type]
        # a pipeline stage before the last has no logits
        return super()._after(model, args, output) if "logits" in output else None

    def _token_loss(
        self, model: nn.Module, logits: Tensor, labels: Tensor, num_items: Tensor | int
    ) -> Tensor:
        """Do what the base class does; `logits` may be a tensor-parallel rank's columns."""
        vocab_size = _split_vocab_size(model, logits)
        if self._tensor_parallel is None or vocab_size is None:
            return super()._token_loss(model, plain(logits), labels, num_items)
        logits = logits.float()
        loss_sum = cross_entropy_1d(
            logits.flatten(0, -2),
            labels.flatten(),
            process_group=self._tensor_parallel,
            vocab_size=vocab_size,
            dtype=logits.dtype,
            mode="sum",
        )
        return loss_sum / at_least_one(num_items)


def _split_vocab_size(model: nn.Module, logits: Tensor) -> int | None:
    """Return the padded size of the vocabulary if `logits` hold only some of it, else None."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", 0)
    return head.out_features if head is not None and logits.shape[-1] < vocab_size else None
