"""Other packages that run a model larger than the GPU, for `hetegen_gpu.py`.

Each: (model, device, bytes of the GPU) -> the model, to be called over tokens on the device.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def cpu_offload(model: Any, device: torch.device, _: int) -> Any:
    """accelerate: a module's weights are copied when it is called, and dropped afterwards."""
    import accelerate

    return accelerate.cpu_offload(model, device)


def device_map(model: Any, device: torch.device, nbytes: int) -> Any:
    """accelerate: whole layers on the GPU as far as they fit, the rest as `cpu_offload`."""
    import accelerate

    layer, memory = type(model.model.layers[0]).__name__, {0: nbytes, "cpu": 10**12}
    placed = accelerate.infer_auto_device_map(model, memory, no_split_module_classes=[layer])
    print(f"device_map: {sum(where == 0 for where in placed.values())} of {len(placed)} on the GPU")
    return accelerate.dispatch_model(model, placed, main_device=device, force_hooks=True)


def zero_inference(model: Any, device: torch.device, nbytes: int) -> Any:
    """DeepSpeed: ZeRO stage 3 with pinned parameters on the host, some of which may stay."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29517"}  # fmt: skip
    os.environ.update(told)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.HashStore(), rank=0, world_size=1,
    )  # fmt: skip
    kept = nbytes // 2 // 2  # numbers of 2 bytes: half of the memory stays, half is on its way
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": device.type == "cuda"},
        "stage3_model_persistence_threshold": kept,
        "stage3_max_live_parameters": kept,
        "stage3_prefetch_bucket_size": kept // 2,
    }
    words = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config={**words, "zero_optimization": zero})
    return engine.module.eval()


PEERS = {
    "accelerate cpu_offload": cpu_offload,
    "accelerate device_map": device_map,
    "DeepSpeed ZeRO-Inference": zero_inference,
}
