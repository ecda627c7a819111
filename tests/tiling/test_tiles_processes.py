"""Tiled modules under DDP and FSDP2: gradients and collectives are those of the whole calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.helpers import run_processes
from tests.tiling.test_tiled_loss import ForCausalLMLoss
from wf_backends.comm import Communicator
from wf_backends.tiling import Tiles, tile_modules

pytestmark = pytest.mark.processes

RANKS, ROWS, WIDTH, VOCABULARY, ACCUMULATION = 2, 10, 6, 9, 2
Found = dict[str, tuple[list[Tensor], Counter[str], int]]


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
    def __init__(self, recompute: bool) -> None:
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


WRAPS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": ddp,
    "fsdp layers": fsdp_layers,
    "fsdp mlps": fsdp_mlps,
}


def train(comm: Communicator) -> tuple[Found, list[Tiles], str]:
    """All settings; what the ranks agreed on; and the error of a module gathered by part."""
    found: Found = {}
    for name, recompute, tiled in product(WRAPS, (False, True), (False, True)):
        torch.manual_seed(0)
        model = Model(recompute).double()
        mine = [Tiles(f"layers.{i}.mlp", 1, 2 + 2 * i * comm.rank) for i in range(2)]
        mine += [Tiles("head", 1, 3 - comm.rank, loss=True)]
        handle = tile_modules(model, mine if tiled else [])
        found[f"{name} {recompute} {tiled}"] = one_step(WRAPS[name](model), comm.rank)
    return found, list(handle.tiles), error_of(gathered_by_part)


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def one_step(model: nn.Module, rank: int) -> tuple[list[Tensor], Counter[str], int]:
    """Gradients of a step of several batches, collectives, and how often gradients arrived."""
    fired: list[int] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    generator = torch.Generator().manual_seed(rank)
    with Collectives() as seen:
        for _ in range(ACCUMULATION):
            x = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
            labels = torch.randint(VOCABULARY, (2, ROWS), generator=generator)
            model(x, labels)["loss"].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return whole, seen.counts, len(fired)


def gathered_by_part() -> None:
    model = Model(recompute=False)
    tile_modules(model, [Tiles("layers.0.mlp", 1, 2)])
    fully_shard(model.layers[0].mlp.up)
    model(torch.randn(1, ROWS, WIDTH), torch.zeros(1, ROWS, dtype=torch.int64))


def of_one_rank(_: Communicator) -> tuple[list[Tiles], str]:
    """What all ranks tile where each names a module of its own; and the error of two dimensions."""
    rank = dist.get_rank()
    handle = tile_modules(Model(False), [Tiles(f"layers.{rank}.mlp", 1, 2)])
    different = [Tiles("layers.0.mlp", rank, 2)]
    return list(handle.tiles), error_of(lambda: tile_modules(Model(False), different))


def error_of(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def trained() -> list[tuple[Found, list[Tiles], str]]:
    return run_processes(RANKS, train)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", WRAPS)
def test_gradients_and_collectives(name: str, recompute: bool, trained: list[Any]) -> None:
    for found, _, _ in trained:
        whole, counts, fired = found[f"{name} {recompute} False"]
        ours, our_counts, our_fired = found[f"{name} {recompute} True"]
        for one, other in zip(ours, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert our_counts == counts and counts
        assert our_fired == fired and (fired or name != "ddp")


def test_the_largest_count_runs_on_all(trained: list[Any]) -> None:
    for _, tiles, _ in trained:
        mlps = [Tiles("layers.0.mlp", 1, 2), Tiles("layers.1.mlp", 1, 4)]
        assert tiles == [*mlps, Tiles("head", 1, 3, loss=True)]


def test_a_part_that_fsdp_gathers_is_refused(trained: list[Any]) -> None:
    for _, _, error in trained:
        assert error.startswith("FSDP2 would gather 'up' of a tiled Mlp for every tile")


def test_all_ranks_tile_what_one_does() -> None:
    for tiles, error in run_processes(RANKS, of_one_rank):
        assert tiles == [Tiles(f"layers.{i}.mlp", 1, 2) for i in range(RANKS)]
        assert error.startswith("all ranks must tile a module alike")
