# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with one manager: rank 0 plans, and all ranks apply the same batches.

A rank is a process with its own share of the heads. Block ids, tables and commands are the same on
all of them.
"""

from kvcore_runtime.ranks.exchange import RankExchange
from kvcore_runtime.ranks.follower import RankFollower
from kvcore_runtime.ranks.leader import Leader
from kvcore_runtime.ranks.links import Links, connect
from kvcore_runtime.ranks.shard import pad_heads, shard

__all__ = ["Leader", "Links", "RankExchange", "RankFollower", "connect", "pad_heads", "shard"]
