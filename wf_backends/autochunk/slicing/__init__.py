"""A rule for each operator: whether it may be computed slice by slice, and what a slice reads.

In reading order: `call` defines what rules are written in; each `rules_*` file has the rules of a
group of operators; `rules` applies them to a node of a graph, and adds the call of a slice to
another graph; `flow` finds the operators of a graph that are sliced together. `group_norm` splits
group norms into two passes, so that their space dimensions can be sliced.
"""

from wf_backends.autochunk.slicing.call import Call, Reads, Rows, Rule
from wf_backends.autochunk.slicing.flow import (
    Flow,
    RowsByValue,
    SlicedOperator,
    Value,
    needed_rows,
    trace,
    with_permutations,
)
from wf_backends.autochunk.slicing.group_norm import join_group_norms, split_group_norms
from wf_backends.autochunk.slicing.rules import (
    Source,
    changed,
    emit,
    rule_of,
    sources,
    view_base,
    written,
)

__all__ = [
    "Call",
    "Flow",
    "Reads",
    "Rows",
    "RowsByValue",
    "Rule",
    "SlicedOperator",
    "Source",
    "Value",
    "changed",
    "emit",
    "join_group_norms",
    "needed_rows",
    "rule_of",
    "sources",
    "split_group_norms",
    "trace",
    "view_base",
    "with_permutations",
    "written",
]
