"""Tiled modules under DDP, FSDP1 and FSDP2, on two ranks.

Gradients, the number of collectives, and how often gradients are accumulated equal those of the
same model without tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.autochunk.tiling.helpers import Collectives, ForCausalLMLoss, assert_close, error_message
from tests.helpers import run_processes
from wf_backends.autochunk.tiling import Tiles, tile_modules
from wf_backends.comm import Communicator

pytestmark = pytest.mark.processes

RANKS, ROWS, WIDTH, VOCABULARY, BATCHES_A_STEP = 2, 10, 6, 9, 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).cumsum(1)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers[1].mlp.up.weight.requires_grad_(False)
        self.head, self.loss_function = nn.Linear(WIDTH, VOCABULARY), ForCausalLMLoss
        self.recompute = recompute

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits = self.head(x)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
        return {"loss": loss, "logits": logits}


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp_layers(model: Model) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp_mlps(model: Model) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.mlp)
    return fully_shard(model)


def fsdp1(strategy: ShardingStrategy, model: Model) -> nn.Module:
    policy = ModuleWrapPolicy({Layer})
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(model, None, strategy, auto_wrap_policy=policy, **options)


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": ddp,
    "fsdp layers": fsdp_layers,
    "fsdp mlps": fsdp_mlps,
    "fsdp1": partial(fsdp1, ShardingStrategy.FULL_SHARD),
    "fsdp1 gradients": partial(fsdp1, ShardingStrategy.SHARD_GRAD_OP),
}


@dataclass(frozen=True)
class Step:
    """What an optimizer step's backwards leave on a rank."""

    gradients: list[Tensor]
    collectives: Counter[str]
    num_accumulated: int
    """How often the gradient of a parameter was accumulated."""


@dataclass(frozen=True)
class RankResults:
    steps: dict[tuple[str, bool, bool], Step]
    """By wrapper, whether layers are recomputed, whether the model is tiled."""
    agreed_tiles: list[Tiles]
    """Of all ranks, where each asked for other numbers of tiles."""
    fsdp_error: str
    """Where FSDP2 shards a part of a tiled module."""


def train(comm: Communicator) -> RankResults:
    own_tiles = [Tiles(f"layers.{i}.mlp", 1, 2 + 2 * i * comm.rank) for i in range(2)]
    own_tiles += [Tiles("head", 1, 3 - comm.rank, loss=True)]
    steps = {}
    for wrapper, recompute, tiled in product(WRAPPERS, (False, True), (False, True)):
        torch.manual_seed(0)
        model = Model(recompute).double()
        handle = tile_modules(model, own_tiles if tiled else [])
        steps[wrapper, recompute, tiled] = one_step(WRAPPERS[wrapper](model), comm.rank)
    agreed_tiles = list(handle.tiles)  # of the last model, which is tiled
    return RankResults(steps, agreed_tiles, error_message(shard_part_of_a_tiled_module))


def one_step(model: nn.Module, rank: int) -> Step:
    """A step of several batches, whose gradients are accumulated."""
    accumulated: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: accumulated.append(name)
            )
    generator = torch.Generator().manual_seed(rank)
    with Collectives() as collectives:
        for _ in range(BATCHES_A_STEP):
            x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
            labels = torch.randint(VOCABULARY, (2, ROWS), generator=generator)
            model(x, labels)["loss"].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    full_grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return Step(full_grads, collectives.counts, len(accumulated))


def shard_part_of_a_tiled_module() -> None:
    model = Model()
    tile_modules(model, [Tiles("layers.0.mlp", 1, 2)])
    fully_shard(model.layers[0].mlp.up)
    model(torch.randn(1, ROWS, WIDTH), torch.zeros(1, ROWS, dtype=torch.int64))


@pytest.fixture(scope="module")
def ranks() -> list[RankResults]:
    return run_processes(RANKS, train)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_and_collectives_equal_those_without_tiles(
    wrapper: str, recompute: bool, ranks: list[RankResults]
) -> None:
    for rank in ranks:
        tiled, expected = (rank.steps[wrapper, recompute, tiled] for tiled in (True, False))
        assert_close(tiled.gradients, expected.gradients)
        assert tiled.collectives == expected.collectives and expected.collectives
        assert tiled.num_accumulated == expected.num_accumulated
        if wrapper == "ddp":  # FSDP accumulates sharded gradients itself
            assert tiled.num_accumulated > 0


def test_largest_number_of_tiles_of_a_rank_runs_on_all_ranks(ranks: list[RankResults]) -> None:
    expected = [
        Tiles("layers.0.mlp", 1, 2),
        Tiles("layers.1.mlp", 1, 4),  # of rank 1
        Tiles("head", 1, 3, loss=True),  # of rank 0
    ]
    assert [rank.agreed_tiles for rank in ranks] == [expected] * RANKS


def test_part_of_a_tiled_module_that_fsdp_gathers_is_refused(ranks: list[RankResults]) -> None:
    for rank in ranks:
        assert rank.fsdp_error.startswith("FSDP2 would gather 'up' of a tiled Mlp for every tile")


def tile_what_differs(_: Communicator) -> tuple[list[Tiles], str]:
    """The tiles of all ranks, where each names another module; the error, where each names another
    dimension."""
    rank = dist.get_rank()
    handle = tile_modules(Model(), [Tiles(f"layers.{rank}.mlp", 1, 2)])
    other_dim = [Tiles("layers.0.mlp", rank, 2)]
    return list(handle.tiles), error_message(lambda: tile_modules(Model(), other_dim))


def test_ranks_tile_the_modules_of_all_ranks_and_refuse_different_dimensions() -> None:
    every_module = [Tiles(f"layers.{i}.mlp", 1, 2) for i in range(RANKS)]
    for tiles, error in run_processes(RANKS, tile_what_differs):
        assert tiles == every_module
        assert error.startswith("all ranks must tile a module alike")
