"""Joining the ranks of a job, under the name that users have: `launch.init()`."""

from wf_backends.cluster.launch import Launch, detect, init, leave_at_exit, settle_at_exit

__all__ = ["Launch", "detect", "init", "leave_at_exit", "settle_at_exit"]
