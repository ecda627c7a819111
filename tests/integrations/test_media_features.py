"""What methods for features return in several releases, and what a rank keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from transformers.utils.generic import ModelOutput  # noqa: E402

from wf_transformers.families.media_features import _selected  # noqa: E402

ROWS = torch.tensor([2, 0])


@dataclass
class Output(ModelOutput):
    """As that of encoders in transformers 5."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    deepstack_features: Any = None


@pytest.mark.parametrize("by_medium", [False, True])
def test_features_of_layers_keep_their_form(by_medium: bool) -> None:
    """A tensor for each layer in 5.0, one of each medium in 5.24 (Qwen3-VL)."""
    features = torch.randn(3, 4)
    layer: Any = (features[:1], features[1:]) if by_medium else features
    selected = _selected(Output(None, features, [layer]), ROWS)
    (of_layer,) = selected.deepstack_features
    assert isinstance(of_layer, type(layer))
    of_layer = torch.cat(of_layer) if by_medium else of_layer
    torch.testing.assert_close(of_layer, features[ROWS])
    torch.testing.assert_close(selected.pooler_output, features[ROWS])


def test_features_that_are_not_pooled_are_selected() -> None:
    """The Omnis' sounds in 5.0 to 5.10."""
    features = torch.randn(3, 4)
    selected = _selected(Output(features), ROWS)
    torch.testing.assert_close(selected.last_hidden_state, features[ROWS])
