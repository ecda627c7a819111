"""Every family of the table gives on ranks what it gives on one device."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.integrations.families import FAMILIES, assert_equal, batch  # noqa: E402


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(name: str, size: int) -> None:
    assert_equal(FAMILIES[name], size, batch())
