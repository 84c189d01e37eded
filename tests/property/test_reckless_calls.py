# SPDX-License-Identifier: Apache-2.0
"""Random calls that an engine need not mean well with: both languages answer alike and stay whole.

The arguments are near what is allowed, on both sides of it: requests run ahead of their tokens, are
cut, swapped, forked and freed meanwhile, and output is handed in for any batch. Each call must give
the same value, or the same error with the same fields, and the same canonical bytes; then every
invariant must hold.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore import Config, Group, KVCacheManager, KvcoreError, Request
from kvcore.check.search.parity import whole

WINDOW = Group(2, kind="sliding_window", window=3)
GROUPS: list[tuple[Group, ...]] = [
    (Group(2),),
    (Group(4),),
    (Group(1, kind="sliding_window", window=2),),
    (Group(2), WINDOW),
    (Group(4), Group(2, kind="chunked_local", window=4)),
]
MOST_REQUESTS = 8
NUM_CALLS = 60


def draw_config(dice: random.Random) -> Config:
    """Draw a small pool with any of the options that calls depend on."""
    groups = dice.choice(GROUPS)
    return Config(
        dice.randint(5, 14),
        hash_seed=b"reckless",
        groups=groups,
        null_block=any(group.is_windowed for group in groups),
        num_host_blocks=dice.choice([0, 6]),
        max_in_flight=dice.choice([0, 1, 2]),
        publish=dice.choice(["scheduled", "completed"]),
        duplicates=dice.choice(["keep", "merge"]),
        enable_caching=dice.random() < 0.9,
        enable_events=True,
    )


class Pair:
    """A manager of each language, to which the same calls are made."""

    def __init__(self, config: Config) -> None:
        self.managers = [KVCacheManager(config, backend=each) for each in ("python", "rust")]
        self.calls: list[str] = []

    def call(self, name: str, *args: Any, **options: Any) -> None:
        """Make a call on both, and compare what it gives and leaves."""
        self.calls.append(f"{name} {args} {options}")
        given = [made(manager, name, *args, **options) for manager in self.managers]
        python, rust = self.managers
        assert given[0] == given[1]
        assert python.encode() == rust.encode()
        python.check()
        rust.check()


def made(manager: KVCacheManager, name: str, *args: Any, **options: Any) -> Any:
    """Return the outcome of a call: its value with all columns, or its error with the fields."""
    try:
        value = getattr(manager, name)(*args, **options)
    except KvcoreError as error:
        return type(error).__name__, error.fields
    return list(value) if name == "take_events" else whole(value)


def make_call(pair: Pair, dice: random.Random) -> None:
    """Make one call of any kind."""
    manager = pair.managers[0]
    requests = manager.state().requests
    if not requests or (len(requests) < MOST_REQUESTS and not dice.randrange(8)):
        tokens = dice.choices([0, 1], k=dice.randint(1, 6))
        pair.call("add_request", Request(fresh_name(requests), tokens))
        return
    name = dice.choice(list(requests))
    dice.choice([allocate, allocate, append, append, hand_in, of_batches, of_batches, other])(
        pair, dice, name
    )


def fresh_name(requests: Any) -> str:
    """Return a name that no request has."""
    return next(f"r{number}" for number in range(len(requests) + 1) if f"r{number}" not in requests)


def allocate(pair: Pair, dice: random.Random, name: str) -> None:
    """Allocate, or look up, about as many slots as a request has tokens left."""
    manager = pair.managers[0]
    request = manager.state().requests[name]
    hit = None
    if not any(request.tables) and not request.host_tables and dice.random() < 0.7:
        hit = manager.get_computed_blocks(name)
    left = len(request.tokens) + len(request.drafts) - request.num_computed
    left -= 0 if hit is None else hit.num_tokens
    to_come = dice.choice([0, 0, 1, 2])
    pair.call(
        dice.choice(["allocate_slots", "allocate_slots", "can_allocate"]),
        name,
        dice.choice([max(1, left), 1, left + to_come, to_come, 3]),
        hit,
        num_output_placeholders=to_come,
        num_external_computed_tokens=dice.choice([0, 0, 0, 2]),
        num_lookahead_tokens=dice.choice([0, 0, 1]),
        delay_cache_blocks=dice.random() < 0.1,
        full_sequence_must_fit=dice.random() < 0.2,
    )


def append(pair: Pair, dice: random.Random, _: str) -> None:
    """Append known tokens, or tokens to come, to some requests."""
    requests = pair.managers[0].state().requests
    names = dice.sample(list(requests), dice.randint(1, len(requests)))
    if dice.random() < 0.7:
        done = (n for n in names if requests[n].num_computed >= len(requests[n].tokens))
        names = list(done)
    if dice.randrange(2):
        pair.call("append", names)
    else:
        batch = draw_batch(pair, dice, names[:1])
        pair.call("append", names, dice.choices([0, 1], k=len(names)), batch=batch)


def hand_in(pair: Pair, dice: random.Random, name: str) -> None:
    """Hand in tokens, as the output of a batch or of none."""
    tokens = dice.choices([0, 1], k=dice.randint(1, 2))
    rejected = dice.choice([0, 0, 1, 2])
    batch = draw_batch(pair, dice, [name])
    pair.call("add_tokens", name, tokens, num_rejected=rejected, batch=batch)


def draw_batch(pair: Pair, dice: random.Random, names: list[str]) -> int | None:
    """Draw a batch taken recently, one not taken yet, or one whose output a request awaits."""
    state = pair.managers[0].state()
    opened = state.batch.number
    awaited = [batch for name in names for batch, _ in state.requests[name].awaited]
    return dice.choice([None, max(0, opened - 1), max(0, opened - 2), opened, *awaited[:2]])


def of_batches(pair: Pair, dice: random.Random, _: str) -> None:
    """Take, complete or cancel a batch."""
    flying = pair.managers[0].in_flight
    name = dice.choice(["take_batch", "take_batch", "complete", "complete", "cancel"])
    if name == "take_batch":
        pair.call(name)
    else:
        pair.call(name, dice.choice(flying) if flying else 0)


def other(pair: Pair, dice: random.Random, name: str) -> None:
    """Cut, swap, fork, free, cache, trim, or go on from the canonical bytes."""
    manager = pair.managers[0]
    known, computed = manager.num_tokens(name), manager.num_computed_tokens(name)
    which = dice.randrange(13)
    if which == 0:
        pair.call("truncate", name, dice.randint(1, max(1, known)))
    elif which == 1:
        pair.call("rewind", [name], dice.randint(0, computed))
    elif which == 2:
        pair.call("add_drafts", name, dice.choices([0, 1], k=dice.randint(0, 2)))
    elif which == 3:
        pair.call("accept", name, dice.randint(0, 2))
    elif which in (4, 5):
        pair.call("swap_out" if which == 4 else "swap_in", [name])
    elif which == 6:
        pair.call("fork", name, fresh_name(manager.state().requests))
    elif which in (7, 8):
        pair.call("free" if which == 7 else "remove_request", name)
    elif which == 9:
        pair.call("cache_blocks", name, computed)
    elif which == 10:
        pair.call("unschedule", name, dice.randint(max(0, computed - 3), computed))
    elif which == 11:
        pair.call("remove_skipped_blocks", name, min(computed, known))
    else:
        pair.call("restore", pair.managers[1].encode())


def run(seed: int) -> None:
    """Make calls; a failure names the seed and all of them."""
    dice = random.Random(seed)
    config = draw_config(dice)
    pair = Pair(config)
    try:
        for _ in range(NUM_CALLS):
            make_call(pair, dice)
    except AssertionError as error:
        error.add_note(f"seed {seed}, {config}, after\n" + "\n".join(pair.calls))
        raise


def test_both_languages_answer_reckless_calls_alike() -> None:
    for seed in range(30):
        run(seed)


@pytest.mark.slow
def test_both_languages_answer_many_reckless_calls_alike() -> None:
    for seed in range(1_000, 6_000):
        run(seed)
