"""WallFacer for DeepSpeed: a "wallfacer" block in the JSON, and `initialize`."""

from wf_deepspeed.config import Block, read_block
from wf_deepspeed.cpu import without_shared_memory_op
from wf_deepspeed.entry import initialize
from wf_deepspeed.handle import WallFacer
from wf_deepspeed.inference import InferenceEngine, init_inference
from wf_deepspeed.unmodified import opened

__all__ = [
    "Block",
    "InferenceEngine",
    "WallFacer",
    "init_inference",
    "initialize",
    "opened",
    "read_block",
    "without_shared_memory_op",
]
