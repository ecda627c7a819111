"""The files and calls of an attention call, as benchmarks/call_path.py counts them."""

from __future__ import annotations

import pytest

from tests.helpers import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import call_path


@pytest.mark.parametrize("causal", (False, True))
def test_a_call_passes_through_few_files_and_functions(causal: bool) -> None:
    """At most 10 files, as docs/design.md says. The counts are the same in every run."""
    paths = call_path.paths(causal)
    warm, backward = paths["warm forward"], paths["backward"]
    assert warm.files <= 10 and warm.calls <= 350, warm
    assert backward.files <= 10 and backward.calls <= 500, backward
    assert call_path.paths(causal)["warm forward"].calls == warm.calls
