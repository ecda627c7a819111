"""Joining the ranks of a job: `launch.init()`."""

from wf_backends.launch.agreement import refuse_other_value
from wf_backends.launch.ending import leave_at_exit, settle_at_exit
from wf_backends.launch.environment import detect
from wf_backends.launch.job_group import Launch, init, load_mpi

__all__ = [
    "Launch",
    "detect",
    "init",
    "leave_at_exit",
    "load_mpi",
    "refuse_other_value",
    "settle_at_exit",
]
