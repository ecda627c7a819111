"""WallFacer for accelerate and the Trainer of transformers, under DDP or FSDP.

trainer = Trainer(model, arguments, train_dataset=..., eval_dataset=...)
wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 4})
trainer.train()
"""

from wf_accelerate.connect import Connected, connect, connect_trainer
from wf_accelerate.groups import counted_by_group

__all__ = ["Connected", "connect", "connect_trainer", "counted_by_group"]
