"""What attaching changed of a model's modules and configs, and the model without it for a while.

Engines wrap an attached model, so it cannot be detached and attached again: their hooks would run
in another order. Here only our own entries are taken out, and put back where they stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.configuration_utils import PretrainedConfig

Entries = dict[Any, Any]
OTHERS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module that attaching leaves alone, and engines do not."""
NOTHING = object()


class Changes:
    """Entries that were set or removed while `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: list[tuple[Entries, Any, Any]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, changes are ours."""
        before = [(entries, dict(entries)) for entries in _entries(self._model)]
        yield
        for entries, old in before:
            for key in {**old, **entries}:
                if old.get(key, NOTHING) is not entries.get(key, NOTHING):
                    self._found.append((entries, key, old.get(key, NOTHING)))

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Inside, the model is as it was before them, whatever others have changed since."""
        kept = [(entries, dict(entries)) for entries, _, _ in self._found]
        for entries, key, old in reversed(self._found):
            if old is NOTHING:
                entries.pop(key, None)
            else:
                entries[key] = old
        try:
            yield
        finally:
            for entries, whole in kept:
                entries.clear()
                entries.update(whole)


def _entries(model: nn.Module) -> Iterator[Entries]:
    """Attributes and hooks of every module, attributes of every config."""
    configs = dict[int, Any]()
    for module in model.modules():
        own = vars(module)
        yield own
        yield from (x for key, x in own.items() if isinstance(x, dict) and key not in OTHERS)
        _add_config(own.get("config"), configs)
    yield from (vars(config) for config in configs.values())


def _add_config(config: Any, found: dict[int, Any]) -> None:
    if isinstance(config, PretrainedConfig) and id(config) not in found:
        found[id(config)] = config
        for part in vars(config).values():
            _add_config(part, found)
