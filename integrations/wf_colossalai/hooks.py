"""The hooks of `wf_transformers` for models as ColossalAI cuts them.

Their vocabulary may be split over tensor-parallel ranks, and they may be a stage of a pipeline or
know nothing of transformers. Which booster plugin wraps the model does not matter.
"""

from __future__ import annotations

from typing import Any

from colossalai.shardformer.layer.loss import cross_entropy_1d
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_backends.parallel import count_valid
from wf_colossalai.sequence import plain
from wf_transformers import Handle, WholeBatchHooks, mask_words
from wf_transformers.whole_batches.call import Call
from wf_transformers.whole_batches.custom_loss import INPUTS, custom_loss_reason

BATCH_KEYS = (*INPUTS, "labels")


class TokenHooks(WholeBatchHooks):
    """Cuts ids and labels, and makes the loss, of a model with one output row per token.

    Args:
        model: the model; what wraps it is none of our business.
        handle: what attached it.
        causal: whether labels are to be shifted.
        tensor_parallel: the group that logits may be split over.
    """

    whole_without_labels = False
    hides_local_logits = False

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        causal: bool,
        tensor_parallel: ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, handle, head="causal" if causal else "masked")
        self._tensor_parallel = tensor_parallel

    def _cut_arguments(self, arguments: dict[str, Any], seqlen: int) -> dict[str, Any]:
        """By name: what a pipeline's stage gets from the one before is cut already."""
        return {key: arguments[key] for key in BATCH_KEYS if arguments.get(key) is not None}

    def _has_custom_loss(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        reason = (
            custom_loss_reason(model, arguments) if isinstance(model, PreTrainedModel) else None
        )
        if reason is not None:
            raise NotImplementedError(
                f"{reason}, and of a model with labels WallFacer makes plain cross entropy under "
                "ColossalAI: leave labels out, and make your loss from logits that sp.unshard "
                "brings together"
            )
        return False

    def _model_kwargs(
        self, model: nn.Module, arguments: dict[str, Any], local: dict[str, Any]
    ) -> dict[str, Any]:
        if isinstance(model, PreTrainedModel):
            return super()._model_kwargs(model, arguments, local)
        known = {k: v for k, v in local.items() if k in self._names and k != "labels"}
        return arguments | known | {"cu_seqlens": None} | mask_words(local)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            output = CausalLMOutput(logits=output)  # type: ignore[arg-type]
        if "logits" in output:
            return super()._after(model, args, output)
        self._call = None  # not the last stage of a pipeline
        return None

    def _share(self, model: nn.Module, logits: Tensor, call: Call) -> Tensor:
        """As without ColossalAI, and of logits that are this rank's columns of the vocabulary."""
        vocabulary, labels = _split_vocabulary(model, logits), call.local["labels"]
        if self._tensor_parallel is None or vocabulary is None:
            return super()._share(model, plain(logits), call)
        wide, sp = logits.float(), self.handle.sp
        total = cross_entropy_1d(
            wide.flatten(0, -2),
            labels.flatten(),
            process_group=self._tensor_parallel,
            vocab_size=vocabulary,
            dtype=wide.dtype,
            mode="sum",
        )
        return total / sp.sum_over_ranks(count_valid(labels)).clamp(min=1) * sp.size


def _split_vocabulary(model: nn.Module, logits: Tensor) -> int | None:
    """Columns of the vocabulary with padding if `logits` hold only some of them, else None."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    wanted = getattr(getattr(model, "config", None), "vocab_size", 0)
    return head.out_features if head is not None and logits.shape[-1] < wanted else None


@eager
def recompute_with_documents(handle: Handle, model: Any, _: Any) -> None:
    """A hook before a model of transformers: checkpointed layers get back their documents, wherever
    checkpointing was switched on."""
    running = (m for m in model.modules() if getattr(m, "gradient_checkpointing", False))
    checkpoint = getattr(next(running, None), "_gradient_checkpointing_func", None)
    words, wanted = getattr(checkpoint, "keywords", {}), handle.checkpoint_kwargs
    if checkpoint is not None and words.get("context_fn") != wanted["context_fn"]:
        model.gradient_checkpointing_enable(wanted)
