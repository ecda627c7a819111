"""WallFacer for accelerate and the Trainer of transformers, under DDP or FSDP.

trainer = Trainer(model, arguments, train_dataset=..., eval_dataset=...)
wf_accelerate.connect_trainer(trainer, {"sequence_parallel_size": 4})
trainer.train()
"""

from wf_accelerate.entry import connect, connect_trainer
from wf_transformers import Handle, counted_by_group

__all__ = ["Handle", "connect", "connect_trainer", "counted_by_group"]
