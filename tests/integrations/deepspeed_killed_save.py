"""One rank of two that save "step1"; rank 1 is killed while it writes its part of "step2".

python deepspeed_killed_save.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import wf_deepspeed
from tests.integrations.deepspeed_jobs import tiny_llama
from wf_backends import launch


def kill_this_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str) -> None:
    job = launch.init(timeout=20)
    model = tiny_llama()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "wallfacer": {"sequence_parallel_size": 2, "route": "ring", "verify": False},
    }
    with wf_deepspeed.without_shared_memory_op():
        engine: Any = wf_deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]
    engine.save_checkpoint(folder, tag="step1")
    if job.rank == 1:
        engine._save_zero_checkpoint = kill_this_process
    engine.save_checkpoint(folder, tag="step2")


if __name__ == "__main__":
    main(sys.argv[1])
