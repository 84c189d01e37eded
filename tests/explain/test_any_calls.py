# SPDX-License-Identifier: Apache-2.0
"""Any calls in any order, all kinds of groups: every admission is explained to the token, and the
observer finds what the core's look-up finds.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvcore import Config, Request
from kvcore.transitions import QUERIES
from tests.explain.watched import WatchedLockstep
from tests.helpers.amount import examples
from tests.helpers.machine import DATA, Machine
from tests.helpers.worlds import configs, inside_blocks


class Watched(Machine):
    """The machine, with a run that is watched."""

    twin = False

    @initialize(data=DATA)
    def start(self, data: st.DataObject) -> None:
        drawn = configs(least=self.least, most=self.most)
        config = data.draw(inside_blocks(drawn) if self.inside else drawn)
        self.run = WatchedLockstep(config, twin=False)
        self.hits = []


class Middle(Watched):
    """Room for several requests in several groups."""

    least = 8
    most = 24
    longest = 14


class Inside(Watched):
    """Hits that end inside blocks."""

    least = 6
    most = 12
    longest = 14
    inside = True


TestInside = Inside.TestCase
TestInside.settings = settings(max_examples=examples(15), stateful_step_count=40)
TestWatched = Watched.TestCase
TestWatched.settings = settings(max_examples=examples(25), stateful_step_count=40)
TestMiddle = Middle.TestCase
TestMiddle.settings = settings(max_examples=examples(10), stateful_step_count=50)


def test_a_decode_takes_block_0_of_a_pool_without_a_null_block() -> None:
    run = WatchedLockstep(Config(3, 1, null_block=False), twin=False)
    run.call("add_request", Request("a", [1, 5]))
    run.call("allocate_slots", "a", 2)
    run.call("take_batch")
    run.call("free", "a")
    run.call("add_request", Request("b", [2]))
    run.call("allocate_slots", "b", 1)
    for token in (3, 4):  # the second takes block 0, which a had
        run.call("take_batch")
        run.call("append", ["b"], [token])
    assert list(run.state.requests["b"].tables[0]) == [2, 1, 0]
    run.call("take_batch")
    run.call("free", "b")
    run.call("allocate_slots", "a", 1)
    assert run.explained[-1].lengths[-2] == 0


def test_a_block_that_another_one_replaces_loses_the_keys_of_its_parts() -> None:
    config = Config(8, 4, duplicates="merge", use_eagle=True, hash_block_size=1, max_model_len=8)
    run = WatchedLockstep(config, twin=False)
    for name, length in (("short", 3), ("whole", 4)):
        run.call("add_request", Request(name, [0] * length))
        run.call("allocate_slots", name, length)
    run.call("take_batch")
    run.call("free", "short")
    run.call("add_request", Request("longer", [0] * 5))
    hit = QUERIES["get_computed_blocks"](run.state, "longer")
    assert hit.num_tokens == 3
    run.call("allocate_slots", "longer", 2, hit)
    assert run.state.requests["longer"].tables[0][0] == hit.blocks.blocks[0][0]
    run.call("take_batch")  # it now has the four tokens of `whole`, whose block it takes
    assert run.state.requests["longer"].tables[0][0] == run.state.requests["whole"].tables[0][0]
