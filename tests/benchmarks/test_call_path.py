"""How much code an attention call goes through: benchmarks/call_path.py and its targets."""

from __future__ import annotations

import pytest

from tests.helpers import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import call_path


@pytest.mark.parametrize("causal", (False, True))
def test_a_call_stays_as_short_as_it_is(causal: bool) -> None:
    """At most 10 files, and 350 calls in a warm forward, 500 in a backward; always the same."""
    found = call_path.paths(causal)
    warm, backward = found["warm forward"], found["backward"]
    assert warm.files <= 10 and warm.calls <= 350, warm
    assert backward.files <= 10 and backward.calls <= 500, backward
    assert call_path.paths(causal)["warm forward"].calls == warm.calls
