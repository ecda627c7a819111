"""What users start on a machine with one GPU: transformers, accelerate, DeepSpeed, NCCL."""

from __future__ import annotations

import pytest

from tests.gpu.jobs import run_job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@pytest.mark.parametrize("size", (2, 4))
def test_a_llama_trains_on_gloo_as_on_one_process(size):
    print(run_job(size, "transformers", "gloo", 90))


def test_a_compiled_llama_keeps_our_attention():
    print(run_job(2, "compiled", "gloo", 120))


def test_accelerate_trains_on_gloo_as_one_process_does():
    print(run_job(2, "accelerate", "gloo", 90))


@pytest.mark.deepspeed
def test_deepspeed_zero_2_trains_on_gloo_as_one_process_does():
    print(run_job(2, "deepspeed", "gloo", 120))


def test_one_rank_under_nccl():
    print(run_job(1, "nccl_alone", "", 90))


def test_two_ranks_of_nccl_on_one_gpu_are_refused():
    with pytest.raises(AssertionError, match=r"ValueError: .*share GPUs: show each rank") as error:
        run_job(2, "nccl_alone", "", 60)
    assert str(error.value).count("share GPUs") >= 2, "both ranks say so"
