"""AutoChunk (arXiv 2401.10652): runs a model's forward within a memory budget, in slices.

In the paper's order:

    graph/capture  the forward pass as a graph, whose live bytes are known at every step
    graph/copies   which values, such as masks, are recomputed for each of their readers
    slicing/flow   which operators may be computed slice by slice together (section 3.2)
    search         candidates for regions around the step with the peak (3.3)
    cost           the time that slices add
    select         which regions to slice, into how many slices (3.4)
    region, lower  the loop over the slices, and the graph that calls it (3.5)

`planning` makes a `plan` from a graph and a budget, also for models on fake tensors; `chunked` is
what a user calls.
"""

from wf_backends.autochunk.chunked import autochunk
from wf_backends.autochunk.cost import Rates
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.planning import BudgetError, Profiles, longest, memory_profiles

__all__ = [
    "BudgetError",
    "ChunkPlan",
    "ChunkedPart",
    "Profiles",
    "Rates",
    "autochunk",
    "longest",
    "memory_profiles",
]
