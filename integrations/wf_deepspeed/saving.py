"""Checkpoints of an engine with our block: complete or absent; `latest` is written last."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wf_backends.checkpoints import find_checkpoint, saved_whole
from wf_transformers import Handle


def make_checkpoints_atomic(engine: Any, handle: Handle) -> None:
    """Make `engine` write checkpoints to a temporary folder and rename it when all ranks are done.

    DeepSpeed writes `latest` when rank 0 is done, even if other ranks are not; a job that is killed
    then cannot resume. Loading refuses incomplete checkpoints. Only this engine is changed, until
    `handle.remove()`.
    """
    handle.replace(engine, "save_checkpoint", partial(_save, engine))
    handle.replace(engine, "load_checkpoint", partial(_load, engine))


def _save(
    engine: Any,
    original: Callable[..., bool],
    save_dir: str,
    tag: object = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    **options: Any,
) -> bool:
    """Replace DeepSpeedEngine.save_checkpoint."""
    decoupled = engine.checkpoint_engine.is_decoupled()
    if not save_dir or decoupled or engine.use_node_local_storage():
        return original(save_dir, tag, client_state or {}, save_latest, **options)
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    with saved_whole(save_dir, name, save_latest) as temporary_folder:
        part = os.path.relpath(temporary_folder, save_dir)  # a tag may be "run1/step100"
        return original(save_dir, part, client_state or {}, False, **options)


def _load(
    engine: Any, original: Callable[..., Any], load_dir: str, tag: object = None, **options: Any
) -> Any:
    """Replace DeepSpeedEngine.load_checkpoint: one that is incomplete is refused, and the newest
    complete one named; also one of ZeRO 3 at another stage, or the reverse."""
    universal = engine.load_universal_checkpoint()
    latest = Path(load_dir, "latest_universal" if universal else "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is not None and not engine.use_node_local_storage():
        if not universal:
            tag = os.path.relpath(find_checkpoint(load_dir, str(tag)), load_dir)
        _refuse_other_stage(Path(load_dir, str(tag)), engine.zero_optimization_stage())
    result = original(load_dir, tag, **options)
    if universal and engine.zero_optimization_stage() == 3 and result[0] is not None:
        _separate_groups(engine.optimizer.optimizer, Path(result[0]).parent)
    return result


def _refuse_other_stage(checkpoint: Path, stage: int) -> None:
    """Refuse a checkpoint without the files that DeepSpeed looks for at this stage, which ends in
    an AssertionError without a message. ZeRO 3 saves the model's states by rank, the others once.
    """
    by_rank = any(checkpoint.glob("zero_pp_rank_*_model_states.pt"))
    once = any(checkpoint.glob("mp_rank_*_model_states.pt"))
    if by_rank != once and by_rank != (stage == 3):
        saved = "ZeRO 3" if by_rank else "ZeRO 0, 1 or 2"
        raise ValueError(
            f'{checkpoint} was saved at {saved}, and this engine has "zero_optimization": '
            f'{{"stage": {stage}}}: resume at {saved}, or begin anew with the weights that '
            "zero_to_fp32.py makes of it"
        )


def _separate_groups(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give each parameter group its own step counter and options of a universal checkpoint.

    ZeRO 3 of DeepSpeed 0.19 gives all groups one tensor as their counter, which torch's Adam
    increments once for each group, and the options (weight decay) of the first group.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
    file = folder / "zero" / "optimizer_state.pt"
    saved: Any = torch.load(file, weights_only=False) if file.is_file() else {}
    own_groups = saved.get("optimizer_state_dict", {}).get("param_groups", [])
    for group, own in zip(optimizer.param_groups, own_groups, strict=False):
        group.update({key: value for key, value in own.items() if key != "params"})
