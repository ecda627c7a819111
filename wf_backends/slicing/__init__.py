"""Which operators may be computed slice by slice, and what a slice reads: a rule for each.

In reading order: `call` has the words of a rule; each of the `rules_*` files the rules of some
operators; `rules` asks them about a node of a graph, and adds the call of a slice to another one;
`flow` finds the operators of a graph that are sliced together.
`group_norm` is in two passes, so that space can be sliced.
"""

from wf_backends.slicing.flow import Flow, RowsOf, Sliced, rows_of, trace
from wf_backends.slicing.group_norm import join_group_norms, split_group_norms
from wf_backends.slicing.rules import Source, Value, emit, rule_of, sources, viewed, writes, written
from wf_backends.slicing.rules_experts import Experts
from wf_backends.slicing.rules_products import is_interleaved

__all__ = [
    "Experts",
    "Flow",
    "RowsOf",
    "Sliced",
    "Source",
    "Value",
    "emit",
    "is_interleaved",
    "join_group_norms",
    "rows_of",
    "rule_of",
    "sources",
    "split_group_norms",
    "trace",
    "viewed",
    "writes",
    "written",
]
