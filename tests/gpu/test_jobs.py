"""Jobs on a machine with one GPU: transformers, accelerate and DeepSpeed on gloo, and NCCL."""

from __future__ import annotations

import pytest

from tests.gpu.jobs import run_job

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.mark.parametrize("size", (2, 4))
def test_gradients_of_a_llama_on_gloo_are_as_exact_as_on_one_process(size):
    print(run_job(size, "transformers", "gloo", 90))


def test_gradients_of_a_compiled_llama_on_gloo_are_as_exact_as_on_one_process():
    print(run_job(2, "compiled", "gloo", 120))


def test_gradients_under_accelerate_on_gloo_are_as_exact_as_on_one_process():
    print(run_job(2, "accelerate", "gloo", 90))


@pytest.mark.deepspeed
def test_losses_of_deepspeed_zero_2_on_gloo_are_those_of_one_process():
    print(run_job(2, "deepspeed", "gloo", 120))


def test_one_nccl_rank_is_exact_and_its_warm_call_never_waits_for_the_gpu():
    print(run_job(1, "nccl_alone", "", 90))


def test_two_nccl_ranks_on_one_gpu_are_refused_on_both():
    with pytest.raises(AssertionError, match=r"ValueError: .*share GPUs: show each rank") as raised:
        run_job(2, "nccl_alone", "", 60)
    assert str(raised.value).count("share GPUs") >= 2
