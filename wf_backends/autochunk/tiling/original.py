"""A module as it was before it was tiled."""

from __future__ import annotations

from typing import Any

from torch import nn


class Original(nn.Module):
    """The forward that a module had before it was tiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.original_forward = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_gathered_children(self.module)
        return self.original_forward(*args, **kwargs)


def _refuse_gathered_children(module: nn.Module) -> None:
    """Refuse a module with hooks that gather parameters of its children, once for every tile."""
    for name, child in module.named_modules():
        if name and "ds_id" in vars(child):  # DeepSpeed hooked it
            raise NotImplementedError(
                f"ZeRO 3 would gather {name!r} of a tiled {type(module).__name__} for every tile: "
                "call deepspeed.utils.set_z3_leaf_module(module, True) before deepspeed.initialize"
            )
        if name and any(base.__name__ == "FSDPModule" for base in type(child).__mro__):
            raise NotImplementedError(
                f"FSDP2 would gather {name!r} of a tiled {type(module).__name__} for every tile: "
                "call fully_shard on the module or on what holds it, not on its parts"
            )
