"""The rules compared with DTensor's sharding rules, which are torch's own.

A slice of two is what one rank of two holds of a sharded tensor: with the inputs sharded as our
rule slices them, DTensor must shard the output along the sliced dimension without communication.
DTensor's table is private to torch; it is read without a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.autochunk.slicing.drawn import Draw, node_of
from tests.autochunk.slicing.rule_cases import CASES
from tests.autochunk.slicing.slicing import tensors
from wf_backends.autochunk.slicing.rules import sources

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy
    from torch.distributed.tensor._ops.single_dim_strategy import (
        _expand_single_dim_strategy_to_mesh as expand_strategy,
    )
except ImportError as error:
    pytest.skip(f"DTensor's table is elsewhere in this torch: {error}", allow_module_level=True)

# Operator -> dimensions of the output that we slice and DTensor does not shard, and why we may.
BEYOND_DTENSOR = {
    # A slice is computed from the whole input; for DTensor the output is then whole as well.
    "expand": "02",
    "new_full": "1",
    "new_ones": "1",
    "new_zeros": "1",
    "repeat": "1",
    # An argument depends on where the slice begins: the diagonal, the start, the padding.
    "constant_pad_nd": "1",
    "slice": "1",
    "tril": "012",
    "triu": "012",
    # Space dimensions, with a halo; output channels.
    "avg_pool2d": "23",
    "avg_pool3d": "34",
    "convolution": "1234",
    "max_pool2d_with_indices": "3",
    "max_pool3d_with_indices": "23",
    # Space dimensions, for an integer scale.
    "_upsample_nearest_exact2d": "23",
    "_upsample_nearest_exact3d": "234",
    "upsample_nearest1d": "2",
    "upsample_nearest2d": "23",
    "upsample_nearest3d": "234",
    # DTensor has the rule of training only, which needs the whole batch.
    "native_batch_norm": "02",
    # DTensor names the wrong dimension of the output with keepdim.
    "logsumexp": "2",
}


class EvenDraw(Draw):
    """Draws sizes that two ranks can share evenly."""

    def size(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        return self.sizes.setdefault(name, self.random.choice((2, 4, 6)))


class RecordedCalls(TorchDispatchMode):
    """Records the operators on tensors that a composite operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class DTensorRules:
    """DTensor's sharding rules for a mesh of two ranks."""

    def __init__(self) -> None:
        self.mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
        self.propagator = DTensor._op_dispatcher.sharding_propagator

    def has(self, op: Any) -> bool:
        tables = self.propagator.op_single_dim_strategy_funcs, self.propagator.op_strategy_funcs
        return any(op in table for table in tables)

    def output_placements(
        self, op: Any, args: Any, kwargs: Any, input_placements: list[Placement]
    ) -> list[Placement]:
        """The placements of the first output that need no communication for these inputs."""
        placements = iter(input_placements)

        def spec(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            return DTensorSpec(self.mesh, (next(placements),), meta)

        args, kwargs = tree_map(spec, (args, kwargs))
        strategy = self.strategy(op, OpSchema(op, tuple(args), kwargs, self.schema_info(op)))
        if isinstance(strategy, TupleStrategy):
            strategy = strategy.children[0]
        outputs = []
        for option in strategy.strategies:
            specs = option.input_specs
            if specs is None or [spec.placements[0] for spec in specs] == input_placements:
                outputs += [out.placements[0] for out in tensors(option.output_specs)[:1] if out]
        return outputs

    def schema_info(self, op: Any) -> Any:
        tables = (
            self.propagator.op_to_schema_info,
            self.propagator.op_to_schema_info_for_single_dim_strategy,
        )
        return next((table[op] for table in tables if op in table), None)

    def strategy(self, op: Any, schema: Any) -> Any:
        single_dim_strategy = self.propagator.op_single_dim_strategy_funcs.get(op)
        wrapped = self.propagator._wrap_with_op_strategy(schema)
        if single_dim_strategy is None:
            return self.propagator.op_strategy_funcs[op](wrapped)
        outputs = self.propagator._propagate_tensor_meta_non_cached(schema)
        expanded: Callable[..., Any] = expand_strategy(
            self.mesh, wrapped, single_dim_strategy, outputs
        )
        return expanded(op, wrapped.args_meta, wrapped.kwargs_meta)


def lowered(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The call that a composite operator makes; None if there are several or none."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with RecordedCalls() as recorded:
        node.target(*args, **kwargs)
    return recorded.calls[0] if len(recorded.calls) == 1 else None


def input_placements(node: fx.Node, dim: int, args: Any, kwargs: Any) -> list[Placement]:
    """The placement of each tensor of the lowered call: sharded along the dimension that our rule
    slices; replicated, where the rule reads all of it or the node has no such argument."""
    sliced_dims = {id(source.node.meta["val"]): source.dim for source in sources(node, dim) or ()}
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dims = [sliced_dims.get(id(tensor)) for tensor in inputs]
    return [Replicate() if sliced is None else Shard(sliced) for sliced in dims]


def comparisons() -> Iterator[tuple[str, int, bool]]:
    """(operator, dimension, whether DTensor agrees) for each dimension of even size that we slice
    of each operator that DTensor has a rule for."""
    rules = DTensorRules()
    for case in CASES:
        node = node_of(case, EvenDraw(0))
        call = lowered(node) if case.dims else None
        if call is None or not rules.has(call[0]):
            continue
        op, args, kwargs = call
        shape = tensors(node.meta["val"])[0].shape
        for dim in case.dims:
            if shape[dim] % 2 == 0:
                inputs = input_placements(node, dim, args, kwargs)
                outputs = rules.output_placements(op, args, kwargs, inputs)
                yield op.overloadpacket.__name__, dim, Shard(dim) in outputs


def test_dtensor_shards_without_communication_what_we_slice() -> None:
    results = list(comparisons())
    only_ours = {(op, dim) for op, dim, agrees in results if not agrees}
    assert only_ours == {(op, int(dim)) for op, dims in BEYOND_DTENSOR.items() for dim in dims}
    assert sum(agrees for *_, agrees in results) > 300
