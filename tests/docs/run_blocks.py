"""One rank of a page's Python blocks: `python -m tests.docs.run_blocks FOLDER`.

FOLDER/scripts.json: a list of [where, names that are given, source].
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main(folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    scripts = json.loads(Path(folder, "scripts.json").read_text())
    os.chdir(folder)
    with ExitStack() as stack:
        without_a_gpu(stack, "".join(source for *_, source in scripts))
        for where, given, source in scripts:
            run(where, given, source)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def without_a_gpu(stack: ExitStack, sources: str) -> None:
    """What DeepSpeed and ColossalAI need on a CPU; on GPUs a reader needs none of it."""
    if "wf_deepspeed" in sources:
        import wf_deepspeed

        stack.enter_context(wf_deepspeed.without_shared_memory_op())
    if "wf_colossalai" in sources:
        from wf_colossalai.cpu import cpu_accelerator

        stack.enter_context(cpu_accelerator())


def run(where: str, given: list[str], source: str) -> None:
    """Run a script with the names that it is given.

    Raises:
        SystemExit: with the traceback, and where the script stands.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for name in given:
            names[name] = GIVEN[name](names)
        exec(compile(source, where, "exec", dont_inherit=True), names)
    except Exception:
        sys.exit(f"{where}: {traceback.format_exc()}")


def tiny_llama(_: dict[str, Any]) -> Any:
    """A Hugging Face model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape, **heads))


def token_ids(_: dict[str, Any]) -> torch.Tensor:
    return torch.randint(32, (1, 64))


def tokens(_: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """A data set of 8 samples."""
    ids = torch.randint(32, (8, 64))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(_: dict[str, Any]) -> Any:
    """Of a Trainer, for two steps on CPUs."""
    from transformers import TrainingArguments

    words: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1, "report_to": []}
    return TrainingArguments("out", use_cpu=True, save_strategy="no", disable_tqdm=True, **words)


def sgd(names: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(names["model"].parameters(), lr=0.1)


GIVEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": tiny_llama,
    "ids": token_ids,
    "dataset": tokens,
    "arguments": arguments,
    "optimizer": sgd,
}


if __name__ == "__main__":
    main(sys.argv[1])
