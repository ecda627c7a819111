"""What a user holds: the configuration, the handle, the gradients' mean."""

from wf_backends.config import SequenceParallelConfig, key_hint
from wf_backends.kernels import position_dropout
from wf_backends.parallel.attention import check_tensors
from wf_backends.parallel.channels import ChannelExchange
from wf_backends.parallel.data import IGNORE_INDEX, MASK_ARGUMENTS, mask_arguments, prepare_batch
from wf_backends.parallel.dense_mask import slices_of_mask
from wf_backends.parallel.gradients import DoubleAverage, GradientMean
from wf_backends.parallel.loss import at_least_one, count_valid, token_loss
from wf_backends.parallel.sequence_parallel import SequenceParallel
from wf_backends.parallel.softmax import make_softmax

__all__ = [
    "IGNORE_INDEX",
    "ChannelExchange",
    "DoubleAverage",
    "GradientMean",
    "MASK_ARGUMENTS",
    "SequenceParallel",
    "SequenceParallelConfig",
    "at_least_one",
    "check_tensors",
    "count_valid",
    "mask_arguments",
    "key_hint",
    "make_softmax",
    "position_dropout",
    "prepare_batch",
    "slices_of_mask",
    "token_loss",
]
