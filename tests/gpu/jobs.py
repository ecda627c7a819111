"""Jobs of several processes on one GPU: what a rank runs, by name, and `run_job`, which starts it.

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
MOST = 1.1
"""Times the error of one process that one of several may have: 1.002 on an H100."""


def run_job(size: int, name: str, backend: str = "", seconds: int = 100) -> str:
    """What the ranks of a job printed, rank by rank; each is an interpreter of its own.

    Raises:
        AssertionError: if a rank failed or took longer, with what all have printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), *sys.path])
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": paths, "OMP_NUM_THREADS": 2}
    command = [sys.executable, "-m", "tests.gpu.jobs", name, backend, str(seconds)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(size)]
        ranks = []
        for rank, path in enumerate(files):
            more = {key: str(x) for key, x in shared.items()} | {"RANK": str(rank)}
            environ = os.environ | more | {"LOCAL_RANK": str(rank)}
            with path.open("w") as out:
                ranks.append(subprocess.Popen(command, stdout=out, stderr=out, env=environ))
        deadline = time.monotonic() + seconds + 10
        while time.monotonic() < deadline and None in [one.poll() for one in ranks]:
            time.sleep(0.05)
        exits = [one.poll() for one in ranks]
        for one in ranks:
            one.kill()
            one.wait()
        told = "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in enumerate(files))
    assert exits == [0] * size, f"exit codes {exits}\n{told}"
    return told


def llama(dtype: torch.dtype) -> Any:
    """A small Llama, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQLEN, **shape, **heads)
    return LlamaForCausalLM(config).to(DEVICE, dtype).train()


def whole_batch() -> dict[str, Tensor]:
    """The same on every rank."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, SEQLEN), generator=random).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all parameters, in float32."""
    return [p.grad.float().clone() for p in model.parameters() if p.grad is not None]


def on_one(dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process on the whole sequence, by torch's own attention."""
    model = llama(dtype)
    loss = model(**whole_batch()).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


def compare(name: str, loss: float, found: list[Tensor], dtype: torch.dtype) -> None:
    """Loss and gradients beside float32's on one process, and beside one process in `dtype`."""
    (right_loss, right), (one_loss, one) = on_one(torch.float32), on_one(dtype)
    assert len(found) == len(right), (len(found), len(right))
    many, alone = (
        largest(float((a - b).norm() / b.norm()) for a, b in zip(grads, right, strict=True))
        for grads in (found, one)
    )
    print(
        f"{name}, {dtype}: loss {loss:.6f} (one process {one_loss:.6f}, float32 {right_loss:.6f}), "
        f"largest error of a gradient {many:.2e} (one process {alone:.2e})",
        flush=True,
    )
    most = 1e-4 if dtype == torch.float32 else MOST * alone
    assert many <= most, (many, alone)
    assert abs(loss - right_loss) < 1e-2 * right_loss


def transformers_step(dtype: torch.dtype, words: dict[str, Any], compiled: bool = False) -> None:
    """One step as docs/transformers.md does it.

    Args:
        compiled: the model runs under torch.compile.
    """
    import wf_transformers

    words = {"sequence_parallel_size": dist.get_world_size(), **words}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words))
    model = llama(dtype)
    wf_transformers.attach(model, sp)
    run: Any = torch.compile(model) if compiled else model
    local = sp.shard_batch(whole_batch())
    start = time.perf_counter()
    loss = sp.loss(run(**wf_transformers.forward_kwargs(model, local)).logits, local["labels"])
    loss.backward()
    DoubleAverage(sp)(model.parameters())
    total = float(sp.sum_over_ranks(loss))
    took = time.perf_counter() - start
    name = f"transformers, {words}, {'compiled, ' * compiled}{took:.2f} s"
    compare(name, total, gradients(model), dtype)


def transformers() -> None:
    """Steps on all ranks of the job, by several schemes."""
    size = dist.get_world_size()
    for words in ({"route": "ring"}, {"route": "ring", "ulysses_degree": min(2, size)}, {}):
        transformers_step(torch.bfloat16, words)
    transformers_step(torch.float32, {"route": "all_gather" if size > 1 else "ring"})


def compiled() -> None:
    """The model by inductor around our attention, which stays eager."""
    transformers_step(torch.bfloat16, {"route": "ring"}, compiled=True)


def accelerate() -> None:
    """One step under accelerate's DDP, called with whole batches."""
    from accelerate import Accelerator

    import wf_accelerate

    os.environ["LOCAL_RANK"] = "0"  # all ranks share the GPU
    accelerator, model = Accelerator(cpu=DEVICE == "cpu"), llama(torch.bfloat16)
    print(f"{accelerator.state}", flush=True)
    words = {"sequence_parallel_size": dist.get_world_size(), "route": "ring"}
    wf_accelerate.connect(model, accelerator, words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trained, optimizer = accelerator.prepare(model, optimizer)
    loss = trained(**whole_batch()).loss
    accelerator.backward(loss)
    compare("accelerate", float(loss.detach()), gradients(model), torch.bfloat16)


def deepspeed() -> None:
    """Steps of ZeRO 2 with the "wallfacer" block: losses beside those of one process."""
    import deepspeed as package

    import wf_deepspeed
    import wf_transformers

    os.environ["LOCAL_RANK"] = "0"  # all ranks share the GPU
    size = dist.get_world_size()
    package.init_distributed(dist_backend=dist.get_backend())
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "optimizer": adam,
        "wallfacer": {"sequence_parallel_size": size, "route": "ring"},
    }
    model, losses = llama(torch.float32), []
    plain = copy.deepcopy(model).to(torch.bfloat16)
    engine, *_ = wf_deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    for _ in range(3):
        shard = engine.wallfacer.shard_batch(whole_batch())
        logits = engine(**wf_transformers.forward_kwargs(engine, shard)).logits
        loss = engine.wallfacer.loss(logits, shard["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.wallfacer.mean(loss.detach())))
    optimizer, wanted = torch.optim.AdamW(plain.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = plain(**whole_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    print(f"DeepSpeed ZeRO 2 on {size}: losses {losses}, one process {wanted}", flush=True)
    assert losses[-1] < losses[0]
    assert all(abs(a - b) < 2e-2 * b for a, b in zip(losses, wanted, strict=True))


def nccl_alone() -> None:
    """One rank under NCCL: what a user's first program does, and a warm call that never waits."""
    print(f"{launch.init()}, NCCL {torch.cuda.nccl.version()}", flush=True)
    transformers()
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1))
    assert sp.comm.carries(torch.device("cuda")) and sp.comm.on_host
    q, k, v, dout = (torch.randn(1, 512, 8, 64, device="cuda").bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        torch.autograd.grad(sp.attention(*leaves, causal=True), leaves, dout)
    torch.cuda.set_sync_debug_mode("default")
    print("a warm call waits for nothing", flush=True)


JOBS = {one.__name__: one for one in (transformers, compiled, accelerate, deepspeed, nccl_alone)}


def main(name: str, backend: str, seconds: str) -> None:
    """Join the job and run its work."""
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
