"""Jobs of several processes on one GPU: `run_job` starts one, JOBS has what its ranks run.

python -m tests.gpu.jobs NAME BACKEND SECONDS, in a rank's environment
"""

from __future__ import annotations

import copy
import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dense import largest
from tests.helpers import ROOT
from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends.parallel import DoubleAverage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, SEQLEN = 512, 2048
MAX_ERROR_RATIO = 1.1
"""Of the error on several processes to that on one: 1.002 on an H100."""
NUM_STEPS = 3
LEARNING_RATE = 1e-3


def run_job(size: int, name: str, backend: str = "", seconds: int = 100) -> str:
    """Run a job of JOBS on new interpreters; what its ranks printed, rank by rank.

    Raises:
        AssertionError: if a rank failed or took longer, with what all have printed.
    """
    command = [sys.executable, "-m", "tests.gpu.jobs", name, backend, str(seconds)]
    environment = os.environ | job_environment(size)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(size)]
        processes = []
        for rank, log in enumerate(logs):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environment | ranks)
                )
        deadline = time.monotonic() + seconds + 10
        while time.monotonic() < deadline and None in [process.poll() for process in processes]:
            time.sleep(0.05)
        exits = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        output = "\n".join(f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs))
    assert exits == [0] * size, f"exit codes {exits}\n{output}"
    return output


def job_environment(size: int) -> dict[str, str]:
    """The variables that all ranks of a job have in common, as torchrun sets them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations"), *sys.path]),
        "OMP_NUM_THREADS": "2",
    }


def llama(dtype: torch.dtype) -> Any:
    """A small Llama, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQLEN, **shape, **heads)
    return LlamaForCausalLM(config).to(DEVICE, dtype).train()


def make_batch() -> dict[str, Tensor]:
    """The whole sequence, the same on every rank."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, SEQLEN), generator=random).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all parameters, in float32."""
    return [p.grad.float().clone() for p in model.parameters() if p.grad is not None]


def one_process(dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process on the whole sequence, with torch's own attention."""
    model = llama(dtype)
    loss = model(**make_batch()).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


def largest_error(grads: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a gradient."""
    return largest(float((a - b).norm() / b.norm()) for a, b in zip(grads, expected, strict=True))


def assert_as_exact_as_one_process(
    name: str, loss: float, grads: list[Tensor], dtype: torch.dtype
) -> None:
    """Compare the errors of `dtype` on all ranks with those on one process, beside float32."""
    expected_loss, expected_grads = one_process(torch.float32)
    one_process_loss, one_process_grads = one_process(dtype)
    error = largest_error(grads, expected_grads)
    one_process_error = largest_error(one_process_grads, expected_grads)
    print(
        f"{name}, {dtype}: loss {loss:.6f} (one process {one_process_loss:.6f}, float32 "
        f"{expected_loss:.6f}), largest error of a gradient {error:.2e} (one process "
        f"{one_process_error:.2e})",
        flush=True,
    )
    tolerance = 1e-4 if dtype == torch.float32 else MAX_ERROR_RATIO * one_process_error
    assert error <= tolerance, (error, one_process_error)
    assert abs(loss - expected_loss) < 1e-2 * expected_loss


def transformers_step(dtype: torch.dtype, options: dict[str, Any], compiled: bool = False) -> None:
    """One step as in docs/transformers.md.

    Args:
        options: fields of the sequence-parallel config beside the number of ranks.
        compiled: the model runs under torch.compile.
    """
    import wf_transformers

    config = {"sequence_parallel_size": dist.get_world_size(), **options}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(config))
    model = llama(dtype)
    wf_transformers.attach(model, sp)
    forward: Any = torch.compile(model) if compiled else model
    shard = sp.shard_batch(make_batch())
    start = time.perf_counter()
    logits = forward(**wf_transformers.forward_kwargs(model, shard)).logits
    loss = sp.loss(logits, shard["labels"])
    loss.backward()
    DoubleAverage(sp)(model.parameters())
    total_loss = float(sp.sum_over_ranks(loss))
    seconds = time.perf_counter() - start
    name = f"transformers, {config}, {'compiled, ' * compiled}{seconds:.2f} s"
    assert_as_exact_as_one_process(name, total_loss, gradients(model), dtype)


def transformers() -> None:
    """Steps on all ranks of the job, with several configs."""
    size = dist.get_world_size()
    for options in ({"route": "ring"}, {"route": "ring", "ulysses_degree": min(2, size)}, {}):
        transformers_step(torch.bfloat16, options)
    transformers_step(torch.float32, {"route": "all_gather" if size > 1 else "ring"})


def compiled() -> None:
    """Inductor compiles the model around our attention, which stays eager."""
    transformers_step(torch.bfloat16, {"route": "ring"}, compiled=True)


def accelerate() -> None:
    """One step under accelerate's DDP, called with whole batches."""
    from accelerate import Accelerator

    import wf_accelerate

    os.environ["LOCAL_RANK"] = "0"  # all ranks share the GPU
    accelerator, model = Accelerator(cpu=DEVICE == "cpu"), llama(torch.bfloat16)
    print(f"{accelerator.state}", flush=True)
    config = {"sequence_parallel_size": dist.get_world_size(), "route": "ring"}
    wf_accelerate.connect(model, accelerator, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared_model, _ = accelerator.prepare(model, optimizer)
    loss = prepared_model(**make_batch()).loss
    accelerator.backward(loss)
    loss_value = float(loss.detach())
    assert_as_exact_as_one_process("accelerate", loss_value, gradients(model), torch.bfloat16)


def deepspeed() -> None:
    """Steps of ZeRO 2 with the "wallfacer" block: losses beside those of one process."""
    import deepspeed as package

    os.environ["LOCAL_RANK"] = "0"  # all ranks share the GPU
    package.init_distributed(dist_backend=dist.get_backend())
    model = llama(torch.float32)
    reference = copy.deepcopy(model).to(torch.bfloat16)  # before DeepSpeed converts the model
    losses, expected = deepspeed_losses(model), one_process_losses(reference)
    size = dist.get_world_size()
    print(f"DeepSpeed ZeRO 2 on {size}: losses {losses}, one process {expected}", flush=True)
    assert losses[-1] < losses[0]
    assert all(abs(a - b) < 2e-2 * b for a, b in zip(losses, expected, strict=True))


def deepspeed_losses(model: nn.Module) -> list[float]:
    """The losses of NUM_STEPS steps on all ranks of the job."""
    import wf_deepspeed
    import wf_transformers

    adam = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "optimizer": adam,
        "wallfacer": {"sequence_parallel_size": dist.get_world_size(), "route": "ring"},
    }
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    losses = []
    for _ in range(NUM_STEPS):
        shard = engine.wallfacer.shard_batch(make_batch())
        logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
        loss = engine.wallfacer.loss(logits, shard["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.wallfacer.mean(loss.detach())))
    return losses


def one_process_losses(model: nn.Module) -> list[float]:
    """The losses of NUM_STEPS steps of torch's AdamW on the whole sequence."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), []
    for _ in range(NUM_STEPS):
        loss = model(**make_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def nccl_alone() -> None:
    """One rank under NCCL: steps of transformers, and a warm call that never waits for the GPU."""
    print(f"{launch.init()}, NCCL {torch.cuda.nccl.version()}", flush=True)
    transformers()
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))
    assert sp.comm.carries(torch.device("cuda")) and sp.comm.on_host
    q, k, v, dout = (torch.randn(1, 512, 8, 64, device="cuda").bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for mode in ("default", "error"):  # "error": a wait for the GPU raises
        torch.cuda.set_sync_debug_mode(mode)
        torch.autograd.grad(sp.attention(*leaves, causal=True), leaves, dout)
    torch.cuda.set_sync_debug_mode("default")
    print("a warm call never waits for the GPU", flush=True)


JOBS = {job.__name__: job for job in (transformers, compiled, accelerate, deepspeed, nccl_alone)}


def main(name: str, backend: str, seconds: str) -> None:
    """Join the job of this rank's environment and run it."""
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start = time.perf_counter()
    launched = launch.init(backend or None, timeout=60)
    print(f"{launched}, in {time.perf_counter() - start:.1f} s", flush=True)
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    JOBS[name]()
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
