# SPDX-License-Identifier: Apache-2.0
"""Policies find, request by request, what an independent simulator of theirs finds.

The simulator knows contents, not blocks. Requests are served one at a time; some that follow are
added ahead. No prompt ends with a full block, so each full block is looked up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.types.config import EvictionName
from tests.conftest import Backend

SIZE, NUM_USABLE = 2, 24
Prompt = tuple[int, ...]


class Simulator:
    """One cache: a dict of contents, each a prefix, searched through at each eviction."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.cached: dict[Prompt, dict[str, Any]] = {}
        self.ghosts: dict[Prompt, dict[str, Any]] = {}
        self.waiting: list[Prompt] = []
        self.clock = 0

    def serve(self, prompt: Prompt, now: int) -> int:
        """Return the hit blocks; the prompt's blocks are computed, and then freed, tail first."""
        contents = [prompt[:end] for end in range(SIZE, len(prompt) + 1, SIZE)]
        hits = list(takewhile(self.cached.__contains__, contents))
        for content in hits:
            self.use(self.cached[content], now)
        num_taken = -(-len(prompt) // SIZE) - len(hits)
        for _ in range(len(self.cached) + num_taken - NUM_USABLE):
            left = self.victim({*hits}, now)
            self.ghosts[left] = {**self.cached.pop(left), "place": None}
            self.ghosts = dict(list(self.ghosts.items())[-NUM_USABLE - 1 :])
        if self.policy == "lru":  # where a block without key leaves when it is its turn
            contents.append((*prompt, -now))
        for content in reversed(contents):
            if content not in self.cached:
                known = self.ghosts.pop(content, None)
                self.cached[content] = known or {"uses": 0, "last": 0, "before": 0, "place": None}
                self.use(self.cached[content], now)
            elif content not in hits:  # it was cached behind a gap, and the copies are merged
                self.use(self.cached[content], now)
            self.join(self.cached[content], now + 1)
        return len(hits)

    def use(self, known: dict[str, Any], now: int) -> None:
        known.update(uses=known["uses"] + 1, before=known["last"], last=now)

    def join(self, known: dict[str, Any], now: int) -> None:
        self.clock += 1
        known["joined"] = self.clock
        if known["place"] is None:
            known["place"] = ("small" if known["uses"] == 1 else "main", now)

    def wait(self, waiting: list[Prompt]) -> None:
        """Contents whose first waiting request is another now join again, tail first."""
        if self.policy != "queue_aware":
            return
        before, self.waiting = {each: self.due(each) for each in self.cached}, waiting
        for content in sorted(self.cached, key=len, reverse=True):
            if self.due(content) != before[content]:
                self.join(self.cached[content], 0)

    def due(self, content: Prompt) -> int | None:
        places = (at for at, each in enumerate(self.waiting) if each[: len(content)] == content)
        first = next(places, None)
        return None if first is None else len(self.waiting) - first

    def victim(self, kept: set[Prompt], now: int) -> Prompt:
        free = {each: known for each, known in self.cached.items() if each not in kept}
        joined = {each: known["joined"] for each, known in free.items()}
        if self.policy == "queue_aware":
            return min(free, key=lambda each: (self.due(each) or 0, joined[each]))
        if self.policy == "lru2":
            return min(free, key=lambda each: (free[each]["before"], joined[each]))
        while self.policy == "s3fifo":
            queues: dict[str, list[Prompt]] = {"small": [], "main": []}
            for each in sorted(free, key=lambda each: (free[each]["place"][1], joined[each])):
                queues[free[each]["place"][0]].append(each)
            small, main = queues["small"], queues["main"]
            queue = small if not main or (small and 9 * len(small) >= len(main)) else main
            known = free[queue[0]]
            again = known["uses"] > 2 if queue is small else known["last"] >= known["place"][1]
            if not again:
                return queue[0]
            known["place"] = None
            self.join(known, now)
            known["place"] = ("main", now)
        return min(free, key=lambda each: joined[each])


def prompts(seed: int) -> Iterator[Prompt]:
    """Conversations that go on after each other, and questions that come once."""
    dice, talks = random.Random(seed), list[Prompt]((talk,) for talk in range(9))
    for number in range(300):
        if dice.random() < 0.3:
            yield (100 + number,) * (2 * dice.randrange(1, 5) + 1)
            continue
        at = min(dice.randrange(9), dice.randrange(9))
        talks[at] += tuple(dice.randrange(50) for _ in range(2 * dice.randrange(1, 3)))
        yield talks[at]
        if len(talks[at]) > 17:
            talks[at] = (1000 + number,)


@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize("policy", ["lru", "queue_aware", "lru2", "s3fifo"])
def test_each_request_finds_what_the_simulator_finds(
    policy: EvictionName, ahead: int, backend: Backend
) -> None:
    manager = KVCacheManager(
        Config(NUM_USABLE + 1, SIZE, eviction=policy, duplicates="merge"), backend
    )
    simulator, todo = Simulator(policy), list(prompts(7))
    found, num_added = 0, 0
    for now, prompt in enumerate(todo):
        for number in range(num_added, min(now + 1 + ahead, len(todo))):
            manager.add_request(Request(str(number), todo[number]))
            simulator.wait(todo[now : number + 1])
        num_added = min(now + 1 + ahead, len(todo))
        hit = manager.get_computed_blocks(str(now))
        got = manager.allocate_slots(str(now), len(prompt) - hit.num_tokens, hit)
        assert not hasattr(got, "reason"), got
        manager.take_batch()
        manager.free(str(now))
        manager.remove_request(str(now))
        assert simulator.serve(prompt, now + 1) * SIZE == hit.num_tokens, f"request {now}"
        simulator.wait(todo[now + 1 : num_added])
        found += hit.num_tokens
    assert found > 200, "the trace finds something"
