"""Imported by the server of forks: none of them compiles DeepSpeed's shared-memory operator.

It is `wf_deepspeed.without_shared_memory_op()` for scripts that know nothing of us, and saves a
minute.
"""

from importlib.util import find_spec

if find_spec("deepspeed"):
    import deepspeed.ops

    from wf_deepspeed.cpu import SHARED_MEMORY_OP

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
