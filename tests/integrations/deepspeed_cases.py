"""Cases of deepspeed_worker.py: routes at all ZeRO stages, other features, and their references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integrations.deepspeed_jobs import tiny_llama

STAGES = (0, 1, 2, 3)
STEPS, FEW_STEPS = 6, 3
STEPS_BEFORE_SAVING, STEPS_AFTER_RESUMING = 2, 4  # the second number counts from the first step

RING = {"route": {"name": "ring"}}
CONCENTRIC = {"route": {"name": "concentric", "team_size": 2}}
MESH = {"route": {"name": "mesh", "rows": 2, "cols": 2}}
OFFLOAD = {"activation_checkpointing": {"offload": True}}
ROUTES = {
    2: {
        "auto": {},
        "ring": RING,
        "mesh": {"route": {"name": "mesh", "rows": 2, "cols": 1}},
        "ulysses": RING | {"ulysses_degree": 2, "layout": "contiguous"},
    },
    4: {
        "auto": {},
        "ring": RING,
        "concentric": CONCENTRIC,
        "mesh": MESH,
        "ulysses": RING | {"ulysses_degree": 4, "layout": "contiguous"},
        "ulysses_ring": RING | {"ulysses_degree": 2},
        "context_first": RING | {"ulysses_degree": 2, "ulysses_stride": 2},
    },
}
CHUNKS = RING | {"ulysses_degree": 2, "ulysses_chunks": 2}
FOUR_KEY_HEADS = {"num_key_value_heads": 4}  # one for each of 2 chunks on each of 2 Ulysses ranks
ADAM = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 1.0,
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "gradient_clipping": 1e9}
PARTITIONED_ON_HOST = {"partition_activations": True, "cpu_checkpointing": True}
OFFLOAD_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}


def case(
    name: str,
    block: dict[str, Any] | None,
    stage: int = 0,
    *,
    optimizer: dict[str, Any] = ADAM,
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Return a case of deepspeed_worker.py.

    Args:
        block: of WallFacer; None: a reference without it.
        stage: of ZeRO. zero: more keys of "zero_optimization".
        config: more keys of the DeepSpeed JSON.
        keys: more keys of the case.
    """
    buckets = {"stage": stage, "reduce_bucket_size": 6000}  # several buckets for a tiny model
    settings = optimizer | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": buckets | (zero or {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if block is not None:
        settings["wallfacer"] = {"enabled": True, **block}
    settings |= config or {}
    return {"name": name, "config": settings, "steps": FEW_STEPS, "sequences": 1} | keys


REFERENCES = {
    (2, STEPS): "adam",
    (2, FEW_STEPS): "few",
    (1, STEPS): "shallow",
    (1, FEW_STEPS): "brief",
}
"""The references with AdamW by (layers, steps)."""


def route_cases(ranks: int) -> list[dict[str, Any]]:
    """Return every route with AdamW, and one route per ZeRO stage with SGD.

    The planner's choice ("auto") and the ring run at all stages, the others at the even or at the
    odd stages by turns. A case's name begins with that of its reference.
    """
    adam = [
        adam_case(ranks, name, stage)
        for number, name in enumerate(ROUTES[ranks])
        for stage in (STAGES if name in ("auto", "ring") else STAGES[number % 2 :: 2])
    ]
    block = {"sequence_parallel_size": ranks, "verify": False}
    sgd = [
        case(f"sgd_{stage}", block | route, stage, optimizer=SGD)
        for stage, route in zip(STAGES, ROUTES[ranks].values(), strict=False)
    ]
    return adam + sgd


def adam_case(ranks: int, name: str, stage: int) -> dict[str, Any]:
    """Return a case of a route.

    The ring takes all steps, the others a few. On 4 ranks, which share few cores, all but the
    planner's choice have one layer; there it is compared with one rank before the first step
    (`verify`), as a user's would be. What `verify` finds is tested in test_verify.py.
    """
    layers = 1 if ranks == 4 and name != "auto" else 2
    steps = STEPS if name == "ring" else FEW_STEPS
    block = {"sequence_parallel_size": ranks} | ROUTES[ranks][name]
    if not (ranks == 4 and name == "auto"):
        block["verify"] = False
    reference = REFERENCES[layers, steps]
    return case(f"{reference}_{name}_{stage}", block, stage, layers=layers, steps=steps)


COMPILED_CASE = case(
    "compiled_3",
    {"sequence_parallel_size": 2, "verify": False, **RING},
    3,
    layers=1,
    steps=2,
    compile={"backend": "eager"},
)


def accumulated(
    name: str, size: int, stage: int, block: dict[str, Any] = RING, **keys: Any
) -> dict[str, Any]:
    """Return a case of four sequences per step on 4 ranks, for any sequence-parallel size."""
    block = {"sequence_parallel_size": size, "verify": False, **block}
    return case(name, block, stage, sequences=4, accumulation=size, **keys)


def feature_cases(folder: Path) -> list[dict[str, Any]]:
    """Return cases of DeepSpeed's and WallFacer's other features, on 4 ranks."""
    four = {"sequence_parallel_size": 4, "verify": False}
    saved, pretrained = str(folder / "saved"), str(folder / "pretrained")
    tiny_llama().save_pretrained(pretrained)
    bf16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    offload_all = OFFLOAD_OPTIMIZER | {"offload_param": {"device": "cpu"}}
    token = RING | {"loss_average": "token"}
    return [
        *(accumulated(f"dp2_{s}", 2, s, optimizer=SGD) for s in STAGES),
        *(accumulated(f"token_{s}", 2, s, optimizer=SGD, block=token) for s in (1, 3)),
        case("offload_2", four | CONCENTRIC, 2, zero=OFFLOAD_OPTIMIZER),
        case("offload_3", four | MESH, 3, zero=offload_all),
        case("bf16_2", four | CONCENTRIC, 2, config=bf16),
        case("bf16_3", four | RING, 3, config=bf16),
        case("recompute_0", four | RING, 0, checkpointing="transformers"),
        case("recompute_3", four | MESH, 3, checkpointing="transformers"),
        *(case(f"offloaded_recompute_{s}", four | RING | OFFLOAD, s) for s in (0, 3)),
        case("pretrained_2", four | RING, 2, pretrained=pretrained),
        case("pretrained_3", four | RING, 3, pretrained=pretrained),
        case("offloaded_init_3", four | MESH, 3, zero=offload_all, pretrained=pretrained),
        case("chunks_1", four | CHUNKS, 1, model=FOUR_KEY_HEADS),
        case("chunks_3", four | CHUNKS, 3, model=FOUR_KEY_HEADS, checkpointing="transformers"),
        case(
            "deepspeed_recompute_1",
            four | CONCENTRIC,
            1,
            checkpointing="deepspeed",
            config={"activation_checkpointing": PARTITIONED_ON_HOST},
        ),
        accumulated("saved_4", 4, 1, steps=STEPS_BEFORE_SAVING, save=saved),
        accumulated("resumed_2", 2, 1, load=saved, steps=STEPS_AFTER_RESUMING),
        accumulated("resumed_1", 1, 1, load=saved, steps=STEPS_AFTER_RESUMING),
    ]


def reference_cases() -> list[dict[str, Any]]:
    """Return cases without WallFacer, for one rank."""
    four_sequences = {"sequences": 4, "accumulation": 4}
    return [
        case("adam", None, steps=STEPS),
        case("shallow", None, steps=STEPS, layers=1),
        case("few", None),
        case("brief", None, layers=1),
        case("two_steps", None, layers=1, steps=2),
        case("four_key_heads", None, model=FOUR_KEY_HEADS),
        case("sgd", None, optimizer=SGD),
        case("adam_4", None, **four_sequences, steps=STEPS_AFTER_RESUMING),
        case("learns", None, **four_sequences, steps=20),
        case("sgd_4", None, **four_sequences, optimizer=SGD),
        case("token_4", None, **four_sequences, optimizer=SGD, average="token"),
    ]


def assert_same_training(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare losses and gradient norms to 1e-5 (float32), weights to 1e-4 of their largest.

    Adam divides a gradient by its own size, so that rounding of small gradients moves weights more.
    """
    first = actual["first_step"]
    for key in ("losses", "norms"):
        curve = torch.tensor(expected[key][first:])
        torch.testing.assert_close(torch.tensor(actual[key]), curve, rtol=1e-5, atol=0)
    for name, weight in expected["weights"].items():
        error = (actual["weights"][name] - weight).abs().max() / weight.abs().max()
        assert error < 1e-4, f"{name} is off by {error:.1e} of its largest element"
