"""Which dimension modules need whole, as a user says it by their names.

A stage is a module whose first argument is the hidden state and which needs one of its sequence
dimensions whole, such as a residual block of temporal attention. Other modules work on any shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wf_backends._validation import one_of


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where a model's hidden state is sharded, by the names of modules in `named_modules()`.

    `dims` names the sequence dimensions of the hidden state, e.g. {"time": 1, "space": 2}.
    `needs` maps stages, by name or pattern of names, to the dimension that they need whole, e.g.
    {"blocks.*.temporal": "time"}. The whole hidden state is cut along `starts_along` before the
    module `enters`, and gathered after the module `leaves`.

    Raises:
        ValueError: naming the field that has a wrong value, and what is right.
    """

    dims: Mapping[str, int]
    enters: str
    starts_along: str
    leaves: str
    needs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, type_, example in (
            ("dims", int, '{"time": 1, "space": 2}'),
            ("needs", str, '{"blocks.*.temporal": "time"}'),
        ):
            value = getattr(self, key)
            if not isinstance(value, Mapping) or any(type(v) is not type_ for v in value.values()):
                raise ValueError(f"{key} must be an object such as {example}, got {value!r}")
        for key in ("enters", "starts_along", "leaves"):
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"{key} must be a name, got {getattr(self, key)!r}")
        distinct = {*self.dims.values()}
        if len(distinct) < len(self.dims) or min(distinct, default=0) < 0:
            raise ValueError(f"dims must be different numbers, from 0 on, got {dict(self.dims)}")
        if self.needs and len(self.dims) < 2:
            raise ValueError(f"dims must name at least two dimensions to switch, got {self.dims}")
        dim_of_key = {"starts_along": self.starts_along}
        dim_of_key |= {f"needs[{pattern!r}]": dim for pattern, dim in self.needs.items()}
        for key, dim in dim_of_key.items():
            one_of(key, dim, tuple(self.dims))
