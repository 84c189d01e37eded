# SPDX-License-Identifier: Apache-2.0
"""Any calls in any order: contents, counts, tables, owners and events are right, the twin agrees.

Each step is checked by `tests.helpers.lockstep`. Small pools find most; large ones show effects of
scale.
"""

from __future__ import annotations

from hypothesis import settings

from tests.helpers.amount import examples
from tests.helpers.machine import Machine


class SmallPools(Machine):
    """Pools of 3 to 8 usable blocks."""


class MiddlePools(Machine):
    """Pools of 8 to 24 usable blocks: room for several requests in several groups."""

    least = 8
    most = 24
    longest = 14


class SmallPoolsInsideBlocks(SmallPools):
    """The same, with hits that may end inside blocks."""

    inside = True


class MiddlePoolsInsideBlocks(MiddlePools):
    """The same, with hits that may end inside blocks."""

    inside = True


class LargePools(Machine):
    """Pools of 64 to 4096 usable blocks, prompts of up to 200 tokens."""

    least = 64
    most = 4096
    longest = 200
    names = tuple(f"request {number}" for number in range(24))


TestSmallPools = SmallPools.TestCase
TestSmallPools.settings = settings(max_examples=examples(25), stateful_step_count=40)
TestMiddlePools = MiddlePools.TestCase
TestMiddlePools.settings = settings(max_examples=examples(8), stateful_step_count=50)
TestLargePools = LargePools.TestCase
TestLargePools.settings = settings(max_examples=examples(5), stateful_step_count=40)
TestSmallPoolsInsideBlocks = SmallPoolsInsideBlocks.TestCase
TestSmallPoolsInsideBlocks.settings = settings(max_examples=examples(25), stateful_step_count=40)
TestMiddlePoolsInsideBlocks = MiddlePoolsInsideBlocks.TestCase
TestMiddlePoolsInsideBlocks.settings = settings(max_examples=examples(8), stateful_step_count=50)
