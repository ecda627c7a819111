"""WallFacer for ColossalAI: a booster plugin, a shardformer policy, `apply` for other plugins."""

from wf_colossalai.apply import Applied, apply
from wf_colossalai.plugin import WallFacerPlugin
from wf_colossalai.policy import WallFacerPolicy
from wf_colossalai.table import TABLE, AttentionModule

__all__ = [
    "TABLE",
    "Applied",
    "AttentionModule",
    "WallFacerPlugin",
    "WallFacerPolicy",
    "apply",
]
