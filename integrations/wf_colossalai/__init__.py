"""WallFacer for ColossalAI: a booster plugin, a shardformer policy, `apply` for other plugins."""

# ruff: noqa: E402  (check first: the imports below would fail with messages that help less)
from wf_colossalai.doctor import check

check()

from wf_colossalai.entry import PluginHandle, apply, from_config
from wf_colossalai.plugin import WallFacerPlugin
from wf_colossalai.policy import WallFacerPolicy
from wf_colossalai.table import TABLE, AttentionModule

__all__ = [
    "TABLE",
    "AttentionModule",
    "PluginHandle",
    "WallFacerPlugin",
    "WallFacerPolicy",
    "apply",
    "from_config",
]
