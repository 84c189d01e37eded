# SPDX-License-Identifier: Apache-2.0
"""Both languages agree call by call under each policy, and bytes hold all that it goes by."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.trace.calls import Call
from kvcore.types.commands import Batch, Evict
from kvcore.types.errors import DamagedState
from kvcore.types.policies import BUILT_IN
from tests.conftest import Backend, need_twin
from tests.helpers.amount import examples
from tests.helpers.lockstep import Lockstep, story

NUM_RUNS, NUM_CALLS = min(20, examples(6)), 150
"""Bugs that are seeded in the policies are found by the sixth run."""


def config_of(dice: random.Random, policy: Any) -> Config:
    """Return a small pool, with a host tier or batches in flight now and then."""
    return Config(
        dice.choice([7, 9, 14]),
        2,
        eviction=policy,
        num_host_blocks=dice.choice([0, 4]),
        max_in_flight=dice.choice([0, 0, 2]),
        duplicates=dice.choice(["keep", "merge"]),
        hash_seed=b"seed",
    )


def next_call(dice: random.Random, run: Lockstep, names: list[str]) -> Call:
    """Return a call on the current state."""
    kind = dice.randrange(13)
    if kind < 3 or not names:
        names.append(f"r{len(run.calls)}")
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
        return Call("add_request", (Request(names[-1], tokens),), {})
    name = dice.choice(names)
    holders = [each.request_id for each in run.state.requests.values() if any(each.tables)]
    if run.state.device.num_free < 3 and holders:
        return Call("free", (dice.choice(sorted(holders)),), {})
    if kind < 6:
        request, hit = run.state.requests[name], run.hit(name)
        left = len(request.tokens) - max(request.num_computed, hit.num_tokens)
        return Call("allocate_slots", (name, max(1, left - dice.randrange(2))), {"hit": hit})
    if kind < 8:
        return Call("take_batch", (), {})
    if kind < 10:
        return Call("free", (name,), {})
    if kind == 10:
        return Call("remove_request", (name,), {})
    in_flight = [batch.number for batch in run.state.in_flight]
    calls = [Call("add_tokens", (name, [dice.randrange(2)]), {}), Call("swap_in", ([name],), {})]
    calls += [Call("swap_out", ([name],), {}), Call("evict_blocks", ([1, 2],), {})]
    calls += [Call("truncate", (name, 1), {})]
    calls += [Call("advance_epoch", (), {})] if dice.random() < 0.3 else []
    calls += [Call(each, (in_flight[0],), {}) for each in ("complete", "cancel") if in_flight]
    return dice.choice(calls)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_both_languages_agree_and_bytes_hold_everything(policy: str) -> None:
    need_twin()
    num_evicted = 0
    for seed in range(NUM_RUNS):
        dice, names = random.Random(seed), list[str]()
        run = Lockstep(config_of(dice, policy))
        try:
            for _ in range(NUM_CALLS):
                call = next_call(dice, run, names)
                before = run.state
                value = run.call(call.name, *call.args, **call.options)
                if isinstance(value, Batch):
                    num_evicted += sum(isinstance(each, Evict) for each in value)
                names = [each for each in names if each in run.state.requests]
                tries_twin = dice.random() < 0.1
                if run.state == before:
                    continue
                data = encode(run.state)
                assert decode(data) == run.state
                if tries_twin:
                    restored = KVCacheManager(run.state.config, "rust")
                    restored.restore(data)
                    assert restored.encode() == data
        except AssertionError as error:
            error.add_note(f"seed {seed} of {policy}, after\n{story(run)}")
            raise
    assert num_evicted > 10 * NUM_RUNS


def test_a_place_has_one_form_in_the_bytes(backend: Backend) -> None:
    config = Config(2, 1, eviction="s3fifo", null_block=False, hash_seed=b"seed")
    manager = KVCacheManager(config, backend)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):  # a's content leaves, and is remembered
        manager.add_request(Request(name, [token]))
        manager.allocate_slots(name, 1)
        manager.take_batch()
        manager.free(name)
        manager.remove_request(name)
    data = bytearray(manager.encode())
    place = len(data) - 16  # the order of the last content that left, before the next number
    assert data[place - 1 : place + 8] == bytes(9)
    data[place] = 1
    with pytest.raises(DamagedState, match="the use of a content is impossible"):
        manager.restore(bytes(data))
