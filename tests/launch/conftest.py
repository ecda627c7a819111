"""The variables of a launcher, for the tests of `launch.init()`."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def set_environ(monkeypatch):
    """Sets the variables of a launcher, and deletes those of a launcher of the test itself."""

    def set_variables(**variables: str) -> None:
        for name in os.environ:
            if name.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables
