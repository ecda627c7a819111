"""The difference between what several ranks compute and what one computes."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from wf_backends.dsp import error_between


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ([-inf, 1.0, 4.0], 0.0),
        ([-inf, 1.0, 3.0], 0.25),  # of the largest element that is finite
        ([0.0, 1.0, 4.0], inf),
        ([-inf, inf, 4.0], inf),
        ([-inf, nan, 4.0], inf),
    ],
)
def test_an_infinite_element_hides_no_other_that_differs(part: list[float], error: float) -> None:
    assert error_between(torch.tensor(part), torch.tensor([-inf, 1.0, 4.0])) == error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_lowest_number_of_a_dtype_hides_no_other_that_differs(dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    whole = torch.tensor([lowest, 1.0, 4.0], dtype=dtype)
    assert error_between(torch.tensor([lowest, 1.0, 3.0], dtype=dtype), whole) == 0.25
