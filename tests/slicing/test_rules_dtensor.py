"""The rules against DTensor's: rows of a slice are what one rank of two holds of a sharded tensor.

DTensor's table is private to torch. It is asked without a process group: with the inputs sharded as
our rule slices them, is the output sharded along the sliced dimension, with nothing sent?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.slicing.drawn import Draw
from tests.slicing.rule_cases import CASES
from tests.slicing.slicing import tensors
from tests.slicing.test_rules import as_graph
from wf_backends.slicing.rules import sources

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy
    from torch.distributed.tensor._ops.single_dim_strategy import (
        _expand_single_dim_strategy_to_mesh as expand_strategy,
    )
except ImportError as missing:
    pytest.skip(f"DTensor's table is elsewhere in this torch: {missing}", allow_module_level=True)

# Operator -> dimensions of the output that we slice and DTensor does not shard, and why it may be.
BEYOND_DTENSOR = {
    # Each slice makes its rows from the whole input; for DTensor the output is then whole as well.
    "expand": "02",
    "new_full": "1",
    "new_ones": "1",
    "new_zeros": "1",
    "repeat": "1",
    # An argument is shifted by where the slice begins: the diagonal, the start, the padding.
    "constant_pad_nd": "1",
    "slice": "1",
    "tril": "012",
    "triu": "012",
    # By space with a halo, and by output channels.
    "avg_pool2d": "23",
    "avg_pool3d": "34",
    "convolution": "1234",
    "max_pool2d_with_indices": "3",
    "max_pool3d_with_indices": "23",
    # By a whole factor.
    "_upsample_nearest_exact2d": "23",
    "_upsample_nearest_exact3d": "234",
    "upsample_nearest1d": "2",
    "upsample_nearest2d": "23",
    "upsample_nearest3d": "234",
    # DTensor has only the rule of training, which needs the whole batch.
    "native_batch_norm": "02",
    # DTensor names the wrong dimension of the output with keepdim.
    "logsumexp": "2",
}


class EvenDraw(Draw):
    """Sizes that two ranks share evenly."""

    def size(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        return self.sizes.setdefault(name, self.random.choice((2, 4, 6)))


class Calls(TorchDispatchMode):
    """The operators that run below the composite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Table:
    """DTensor's rules for a mesh of two ranks."""

    def __init__(self) -> None:
        self.mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
        self.rules = DTensor._op_dispatcher.sharding_propagator

    def has(self, op: Any) -> bool:
        return op in self.rules.op_single_dim_strategy_funcs or op in self.rules.op_strategy_funcs

    def outputs(self, op: Any, args: Any, kwargs: Any, placed: list[Placement]) -> list[Placement]:
        """How the first output may lie if the tensors are `placed` so and nothing is sent."""
        each = iter(placed)

        def spec(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            return DTensorSpec(self.mesh, (next(each),), meta)

        args, kwargs = tree_map(spec, (args, kwargs))
        strategy = self.strategy(op, OpSchema(op, tuple(args), kwargs, self.schema_info(op)))
        if isinstance(strategy, TupleStrategy):
            strategy = strategy.children[0]
        found = []
        for option in strategy.strategies:
            inputs = option.input_specs
            if inputs is None or [spec.placements[0] for spec in inputs] == placed:
                found += [out.placements[0] for out in tensors(option.output_specs)[:1] if out]
        return found

    def schema_info(self, op: Any) -> Any:
        infos = (
            self.rules.op_to_schema_info,
            self.rules.op_to_schema_info_for_single_dim_strategy,
        )
        return next((info[op] for info in infos if op in info), None)

    def strategy(self, op: Any, schema: Any) -> Any:
        by_dim = self.rules.op_single_dim_strategy_funcs.get(op)
        wrapped = self.rules._wrap_with_op_strategy(schema)
        if by_dim is None:
            return self.rules.op_strategy_funcs[op](wrapped)
        outputs = self.rules._propagate_tensor_meta_non_cached(schema)
        expanded: Callable[..., Any] = expand_strategy(self.mesh, wrapped, by_dim, outputs)
        return expanded(op, wrapped.args_meta, wrapped.kwargs_meta)


def lowered(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The one operator that a call is below; None if it is several or none."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with Calls() as calls:
        node.target(*args, **kwargs)
    return calls.seen[0] if len(calls.seen) == 1 else None


def placements(node: fx.Node, dim: int, args: Any, kwargs: Any) -> list[Placement]:
    """Each tensor of the lowered call as our rule slices it; what is not of the node's: whole."""
    ours = {id(source.node.meta["val"]): source.dim for source in sources(node, dim) or ()}
    dims = [ours.get(id(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return [Replicate() if own is None else Shard(own) for own in dims]


def compared() -> Iterator[tuple[str, int, bool]]:
    """(operator, dimension, whether DTensor agrees), of each even dimension that we slice."""
    table = Table()
    for case in CASES:
        node = as_graph(case, EvenDraw(0))
        below = lowered(node) if case.dims else None
        if below is None or not table.has(below[0]):
            continue
        op, args, kwargs = below
        shape = tensors(node.meta["val"])[0].shape
        for dim in case.dims:
            if shape[dim] % 2 == 0:
                outputs = table.outputs(op, args, kwargs, placements(node, dim, args, kwargs))
                yield op.overloadpacket.__name__, dim, Shard(dim) in outputs


def test_what_we_slice_dtensor_shards_without_communication() -> None:
    answers = list(compared())
    refused = {(op, dim) for op, dim, agrees in answers if not agrees}
    assert refused == {(op, int(dim)) for op, dims in BEYOND_DTENSOR.items() for dim in dims}
    assert sum(agrees for *_, agrees in answers) > 300
