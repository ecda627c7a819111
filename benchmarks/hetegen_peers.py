"""Other packages that run a model which is larger than the GPU's memory, for `hetegen_gpu.py`.

Each function prepares a model on the host and returns what is to be called with tokens on the
device. `nbytes` is the memory of the device that weights may take.
"""

from __future__ import annotations

from typing import Any

import torch
from measure import become_only_rank


def cpu_offload(model: Any, device: torch.device, nbytes: int) -> Any:
    """accelerate: copies a module's weights when it is called, and drops them afterwards."""
    import accelerate

    return accelerate.cpu_offload(model, device)


def device_map(model: Any, device: torch.device, nbytes: int) -> Any:
    """accelerate: keeps as many whole layers on the GPU as fit; offloads the others to the CPU."""
    import accelerate

    memory: dict[int | str, int | str] = {0: nbytes, "cpu": 10**12}
    layer_class = type(model.model.layers[0]).__name__
    device_of = accelerate.infer_auto_device_map(
        model, memory, no_split_module_classes=[layer_class]
    )
    on_gpu = sum(device == 0 for device in device_of.values())
    print(f"device_map: {on_gpu} of {len(device_of)} on the GPU")
    return accelerate.dispatch_model(model, device_of, main_device=device, force_hooks=True)


def zero_inference(model: Any, device: torch.device, nbytes: int) -> Any:
    """DeepSpeed: ZeRO stage 3 with pinned parameters on the host; some may stay on the GPU."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    become_only_rank()
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.HashStore(), rank=0, world_size=1,
    )  # fmt: skip
    half = nbytes // 2 // 2  # elements of 2 bytes: half of the memory for parameters that stay
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": device.type == "cuda"},
        "stage3_model_persistence_threshold": half,
        "stage3_max_live_parameters": half,
        "stage3_prefetch_bucket_size": half // 2,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine.module.eval()


PEERS = {
    "accelerate cpu_offload": cpu_offload,
    "accelerate device_map": device_map,
    "DeepSpeed ZeRO-Inference": zero_inference,
}
