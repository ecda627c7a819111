"""One rank of a page's Python blocks: `python -m tests.docs.run_blocks FOLDER`.

FOLDER/scripts.json: a list of [page:line, variables that it uses, source].
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
        emulate_a_gpu(stack, "".join(source for *_, source in scripts))
        for name, given, source in scripts:
            run(name, given, source)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def emulate_a_gpu(stack: ExitStack, sources: str) -> None:
    """Enter the contexts in which DeepSpeed and ColossalAI run on a CPU, if a script uses them."""
    if "wf_deepspeed" in sources:
        import wf_deepspeed

        stack.enter_context(wf_deepspeed.without_shared_memory_op())
    if "wf_colossalai" in sources:
        from wf_colossalai.cpu import cpu_accelerator

        stack.enter_context(cpu_accelerator())


def run(name: str, given: list[str], source: str) -> None:
    """Run a script in which the variables `given` are defined.

    Raises:
        SystemExit: with the traceback and the name of the script, page:line.
    """
    torch.manual_seed(0)
    variables: dict[str, Any] = {"__name__": "__main__"}
    try:
        for variable in given:
            variables[variable] = GIVEN[variable](variables)
        exec(compile(source, name, "exec", dont_inherit=True), variables)
    except Exception:
        sys.exit(f"{name}: {traceback.format_exc()}")


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
    """TrainingArguments for two steps on CPUs."""
    from transformers import TrainingArguments

    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1, "report_to": []}
    return TrainingArguments("out", use_cpu=True, save_strategy="no", disable_tqdm=True, **options)


def sgd(variables: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(variables["model"].parameters(), lr=0.1)


GIVEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": tiny_llama,
    "ids": token_ids,
    "dataset": tokens,
    "arguments": arguments,
    "optimizer": sgd,
}


if __name__ == "__main__":
    main(sys.argv[1])
