"""Records what attaching changed in a model's modules and configs, and undoes it for a while.

Engines wrap an attached model, so it cannot be detached and attached again: their hooks would run
in another order. Here only our own entries are removed from dictionaries, and restored in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.configuration_utils import PretrainedConfig

Dictionary = dict[Any, Any]
NOT_OURS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module that attaching never changes, but engines do."""
ABSENT = object()


class Changes:
    """Dictionary entries that were set or removed inside `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: list[tuple[Dictionary, Any, Any]] = []
        """(dictionary, key, value before the change)."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the changes that are made inside."""
        before = [(dictionary, dict(dictionary)) for dictionary in _dictionaries(self._model)]
        yield
        for dictionary, old in before:
            for key in {**old, **dictionary}:
                if old.get(key, ABSENT) is not dictionary.get(key, ABSENT):
                    self._changes.append((dictionary, key, old.get(key, ABSENT)))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, the recorded changes are undone, whatever others have changed since."""
        saved = [(dictionary, dict(dictionary)) for dictionary, _, _ in self._changes]
        for dictionary, key, value in reversed(self._changes):
            if value is ABSENT:
                dictionary.pop(key, None)
            else:
                dictionary[key] = value
        try:
            yield
        finally:
            for dictionary, entries in saved:
                dictionary.clear()
                dictionary.update(entries)


def _dictionaries(model: nn.Module) -> Iterator[Dictionary]:
    """The attributes and hooks of every module, and the attributes of every config."""
    configs = dict[int, Any]()
    for module in model.modules():
        attributes = vars(module)
        yield attributes
        for key, value in attributes.items():
            if isinstance(value, dict) and key not in NOT_OURS:
                yield value
        _add_config(attributes.get("config"), configs)
    yield from (vars(config) for config in configs.values())


def _add_config(config: Any, configs: dict[int, Any]) -> None:
    """Add a config and the configs inside it, by id."""
    if isinstance(config, PretrainedConfig) and id(config) not in configs:
        configs[id(config)] = config
        for value in vars(config).values():
            _add_config(value, configs)
