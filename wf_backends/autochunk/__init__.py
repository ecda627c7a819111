"""AutoChunk (arXiv 2401.10652): a model under a memory budget, found automatically.

In the paper's order:

    graph/capture  the forward pass as a graph, whose live bytes are known at every step
    graph/copies   where masks and the like are computed anew for each reader
    slicing/flow   which operators may be computed slice by slice together (section 3.2)
    search         the regions around the step that needs most (3.3)
    cost           what slices add to the time
    select         which regions, and how many slices (3.4)
    region, lower  the slices' loops, and the graph that calls them (3.5)

`planning` goes from a graph and a budget to a `plan`, also for a model that is only looked at;
`chunked` is what a user calls.
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
