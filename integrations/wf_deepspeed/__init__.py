"""WallFacer for DeepSpeed: a "wallfacer" block in the JSON, and `initialize`."""

from wf_deepspeed.block import Block, read_block
from wf_deepspeed.component import WallFacer
from wf_deepspeed.cpu import without_shared_memory_op
from wf_deepspeed.door import initialize
from wf_deepspeed.mpu import Groups, NeutralMpu
from wf_deepspeed.unmodified import opened

__all__ = [
    "Block",
    "Groups",
    "NeutralMpu",
    "WallFacer",
    "initialize",
    "opened",
    "read_block",
    "without_shared_memory_op",
]
