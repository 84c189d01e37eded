# SPDX-License-Identifier: Apache-2.0
"""Random rejections of positions to come, behind which blocks were shared or pinned meanwhile.

What the twin remembers of a request from call to call, and no canonical bytes hold, must not
outlive a rejection: both languages give the same values, commands and bytes after each call.
"""

from __future__ import annotations

import random

import pytest

from kvcore import Config, Group, Request
from tests.property.test_reckless_calls import Pair

WINDOW = Group(4, kind="sliding_window", window=5)
GROUPS: list[tuple[Group, ...]] = [
    (Group(4),),
    (Group(3),),
    (Group(16), Group(2)),
    (WINDOW, Group(4)),
    (Group(8), Group(2, kind="chunked_local", window=4)),
]
NUM_ROUNDS = 3


def come(pair: Pair, dice: random.Random) -> None:
    """Schedule positions to come."""
    count = dice.randint(1, 5)
    pair.call("allocate_slots", "a", count, num_output_placeholders=count)


def share(pair: Pair, dice: random.Random) -> None:
    """Fork the request, or pin or unpin one of its last blocks."""
    tables = pair.managers[0].get_block_ids("a")
    blocks = [block for ids in tables for block in ids[-2:] if block]
    if dice.randrange(3):
        pair.call(dice.choice(["pin", "pin", "unpin"]), [dice.choice(blocks)])
    else:
        pair.call("fork", "a", f"child {len(pair.calls)}")


def take(pair: Pair, _: random.Random) -> None:
    """Take a batch, and complete the oldest one if that is needed."""
    flying = pair.managers[0].in_flight
    if len(flying) == pair.managers[0].config.max_in_flight:
        pair.call("complete", flying[0])
    pair.call("take_batch")


def append(pair: Pair, dice: random.Random) -> None:
    """Schedule one position more, with the token before it or without."""
    pair.call("append", ["a"], dice.choice([None, [0], [1]]))


def hand_in(pair: Pair, dice: random.Random) -> None:
    """Hand in tokens, and reject positions behind them."""
    state = pair.managers[0].state()
    awaited = [batch for batch, _ in state.requests["a"].awaited if batch < state.batch.number]
    batch = dice.choice([None, *awaited[:1]])
    num_tokens, rejected = dice.choice([1, 1, 1, 2]), dice.randint(0, 3)
    pair.call("add_tokens", "a", [0] * num_tokens, num_rejected=rejected, batch=batch)


MOVES = (take, come, share, come, take, hand_in, append)
"""A round; each of these is left out now and then."""


def run(seed: int) -> None:
    """Make calls for one request; a failure names the seed and all of them."""
    dice = random.Random(seed)
    groups = dice.choice(GROUPS)
    pair = Pair(
        Config(
            60,
            hash_seed=b"rejected",
            groups=groups,
            max_in_flight=2,
            publish=dice.choice(["scheduled", "completed"]),
            duplicates=dice.choice(["keep", "merge"]),
            enable_events=True,
        )
    )
    length = dice.randint(1, 9)
    try:
        pair.call("add_request", Request("a", [0] * length))
        pair.call("allocate_slots", "a", length)
        for move in MOVES * NUM_ROUNDS:
            if dice.random() < 0.8:
                move(pair, dice)
    except AssertionError as error:
        error.add_note(f"seed {seed}, {groups}, after\n" + "\n".join(pair.calls))
        raise


def test_rejections_forget_what_shared_blocks_were() -> None:
    for seed in range(200, 400):  # three of these fail if a rejection leaves what was remembered
        run(seed)


@pytest.mark.slow
def test_many_rejections_forget_what_shared_blocks_were() -> None:
    for seed in range(1_000, 11_000):
        run(seed)
