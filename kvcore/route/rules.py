# SPDX-License-Identifier: Apache-2.0
"""Chooses the replica of a request. Ties go to the lowest number.

`least-loaded` counts the blocks of prompts without a first token. `cost` is the rule of Dynamo's
router: the remaining prefill (of the queue, and of the request after its hit) times a weight, plus
the blocks of requests that decode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvcore.route.jobs import Job
from kvcore.route.replica import Replica
from kvcore.route.results import Options

HASHED_BLOCKS = 2


class Router:
    """Chooses replicas by one rule. blocks_per_second: computing speed of a replica."""

    def __init__(self, options: Options, blocks_per_second: float) -> None:
        self._options = options
        self._speed = blocks_per_second
        self._turn = -1

    def choose(
        self, job: Job, replicas: Sequence[Replica], found: Mapping[int, int], now: float
    ) -> Replica:
        """Return the replica for a request. replicas: the living ones. found: leading blocks per
        replica number.
        """
        match self._options.rule:
            case "round-robin":
                return self._after(replicas)
            case "least-loaded":
                return min(replicas, key=lambda each: each.waiting)
            case "hash":
                return self._hashed(job, replicas)
            case "prefix":
                return max(replicas, key=lambda each: found.get(each.number, 0))
            case "cost":
                return self._cheapest(job, replicas, found, now)

    def _after(self, replicas: Sequence[Replica]) -> Replica:
        """Return the replica after the one chosen last."""
        later = (each for each in replicas if each.number > self._turn)
        chosen = next(later, replicas[0])
        self._turn = chosen.number
        return chosen

    def _hashed(self, job: Job, replicas: Sequence[Replica]) -> Replica:
        """Choose by a hash of the first blocks; for a dead replica, the next living one."""
        ids = list(job.request.hash_ids[:HASHED_BLOCKS])
        first = f"{self._options.seed} {ids}".encode()
        place = int.from_bytes(hashlib.sha256(first).digest()[:8], "big")
        number = place % self._options.num_replicas
        return next((each for each in replicas if each.number >= number), replicas[0])

    def _cheapest(
        self, job: Job, replicas: Sequence[Replica], found: Mapping[int, int], now: float
    ) -> Replica:
        scale, speed, num_blocks = self._options.scale, self._speed, len(job.names)

        def cost(each: Replica) -> float:
            own = num_blocks - found.get(each.number, 0)
            return scale * (each.prefill_left(now, speed) + own) + each.active

        return min(replicas, key=cost)
