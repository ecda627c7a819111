"""One rank of a job of test_deepspeed_policies.py: TRL's trainers under DeepSpeed, and under DDP.

python policy_worker.py FOLDER, with FOLDER/cases.json; rank 0 writes FOLDER/NAME.json. A case has
the keys of those of preference_worker.py, further "arguments" of the trainer, and the ZeRO stage
"zero", null for DDP. "wallfacer" is the block. Models are in float32.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

import wf_deepspeed
from tests.integrations import preference_worker
from tests.integrations.accelerate_worker import run_cases
from tests.integrations.preference_worker import Options, without_times
from wf_deepspeed.entry import start

STEPS = 3


def train(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the losses of the steps, the change of the parameters, and all logs."""
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    arguments |= case.get("arguments", {})
    if case["zero"] is not None:
        arguments["deepspeed"] = deepspeed_config(case)
    with wf_deepspeed.opened():
        trainer = preference_worker.TRAINERS[case["trainer"]](
            arguments, case["options"], torch.float32
        )
        trainer.eval_dataset = trainer.train_dataset.select(range(4))
        initial = flat_parameters(trainer.model)
        trainer.train()
        trainer.evaluate()
        wallfacer = getattr(trainer.model_wrapped, "wallfacer", None)
        return {
            "losses": trainer.losses,
            "logs": [without_times(log) for log in trainer.state.log_history],
            "parameter_change": (flat_parameters(trainer.model) - initial).tolist(),
            "bytes_sent": wallfacer.report() if wallfacer else {},
        }


def deepspeed_config(case: dict[str, Any]) -> Options:
    config: Options = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": case["zero"]},
    }
    return config | ({"wallfacer": case["wallfacer"]} if case["wallfacer"] else {})


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """Those of all ranks, at ZeRO 3 too."""
    parameters = list(model.parameters())
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        return torch.cat([p.detach().flatten() for p in parameters])


if __name__ == "__main__":
    with wf_deepspeed.without_shared_memory_op():
        start()  # as python -m wf_deepspeed does
        run_cases(Path(sys.argv[1]), train)
