"""Keeps DeepSpeed from compiling its shared-memory operator in the ranks of a job, for a minute.

The process from which ranks are forked imports this module. It does what
`wf_deepspeed.without_shared_memory_op()` does, for scripts that do not call it.
"""

from importlib.util import find_spec

if find_spec("deepspeed"):
    import deepspeed.ops

    from wf_deepspeed.cpu import SHARED_MEMORY_OP

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
