"""The plan of an attention call, chosen once for all calls that are like it.

Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from threading import Lock

from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.proxy import alike, counted, packed
from wf_backends.planner.ranking import ranked
from wf_backends.planner.search import best_plan, price_again

_PLANNING = Lock()  # ranks that are threads ask together: the first plans, the others read


def plan_for(request: Request) -> Plan:
    """The best plan for a call and for those that are like it; priced as `alike` says.

    Raises:
        ValueError: if no plan fits the memory limit or the heads.
    """
    with _PLANNING:
        return _plan(alike(request))


@lru_cache(maxsize=64)
def _plan(request: Request) -> Plan:
    few = counted(request)
    if few == request:
        return best_plan(request)
    one = replace(request, workload=packed(request.workload, None))
    plans = [*(price_again(few, plan) for plan in _fitting(one)), *_fitting(few)]
    return ranked(plans, few.topology, few.memory_limit)[0] if plans else best_plan(few)


def _fitting(request: Request) -> list[Plan]:
    """The best plan, if one fits the memory: one document may need more of it than several."""
    try:
        return [best_plan(request)]
    except ValueError:
        return []
