# SPDX-License-Identifier: Apache-2.0
"""Moves on the pool: swaps, pins, withdrawn keys, resets, snapshots and queries."""

from __future__ import annotations

from kvcore import Refused
from kvcore.types.errors import UnusedBlock
from tests.oracle.backends import Language
from tests.oracle.engine import Engine
from tests.oracle.finding import demand
from tests.oracle.moves_batches import held_blocks, null_blocks


def swap_out(e: Engine) -> None:
    """Swap some requests out to the host tier."""
    able = e.idle(running=True, settled=False)
    if able and e.config.num_host_blocks:
        chosen = e.rng.sample(able, e.rng.randint(1, min(3, len(able))))
        if e.leave("swap_out", chosen, [each.name for each in chosen], count=None):
            for each in chosen:
                each.swapped = each.count > 0


def swap_in(e: Engine) -> None:
    """Swap some requests in."""
    able = [each for each in e.known.values() if each.swapped]
    if able:
        chosen = e.rng.sample(able, e.rng.randint(1, len(able)))
        before = e.before()
        moved = e.call("swap_in", [each.name for each in chosen])
        if isinstance(moved, Refused):
            e.refused(moved, before, None)
            return
        for each in chosen:
            each.swapped = False


def pin(e: Engine) -> None:
    """Pin blocks: those that requests hold, or any."""
    able = held_blocks(e)
    if e.rng.random() < 0.2:
        able = [e.rng.randrange(len(null_blocks(e)), e.config.num_blocks)]
    if able and len(e.pins) < 3:
        blocks = e.rng.sample(able, 1)
        if e.call("pin", blocks, allowed=(UnusedBlock,)) is None:
            e.pins += blocks


def unpin(e: Engine) -> None:
    """Unpin a block."""
    if e.pins:
        e.call("unpin", [e.pins.pop(e.rng.randrange(len(e.pins)))])


def evict(e: Engine) -> None:
    """Withdraw the keys of some blocks."""
    first = len(null_blocks(e))
    blocks = [e.rng.randrange(first, e.config.num_blocks) for _ in range(e.rng.randint(1, 3))]
    e.call("evict_blocks", blocks)


def reset(e: Engine) -> None:
    """Reset the cache, which succeeds exactly if nothing is used."""
    free = e.manager.ask("num_free_blocks") == e.config.num_usable_blocks
    free = free and e.manager.ask("num_free_host_blocks") == e.config.num_host_blocks
    done = e.call("reset_prefix_cache")
    demand(done == free, f"reset_prefix_cache gives {done}, all blocks are free: {free}")
    e.hear()
    demand(not (done and e.router.found), f"{len(e.router.found)} keys are left after a reset")


def snapshot(e: Engine) -> None:
    """Encode the states and go on in the other language."""
    if not e.restores:
        return
    other: dict[Language, Language] = {"python": "rust", "rust": "python"}
    if len(e.languages) > 1 or e.rng.random() < 0.3:
        e.languages = tuple(other[each] for each in e.languages)
    data = e.manager.encode()
    e.manager.restore(e.languages)
    demand(e.manager.encode() == data, "a restored state is encoded in another way")


def ask(e: Engine) -> None:
    """Make the queries, which change nothing, and drain what can be drained."""
    before = e.manager.encode()
    for each in e.known.values():
        e.call("get_blocks", each.name)
        e.call("get_num_common_prefix_blocks", each.name)
    held = set(held_blocks(e))
    for block in range(int(e.config.null_block), e.config.num_blocks):
        owners = e.manager.ask("num_owners", block)
        demand(owners >= (block in held), f"block {block} is held, and has {owners} owners")
    demand(e.manager.encode() == before, "a question has changed the state")
    stats = e.call("take_stats")
    demand(stats.hits <= stats.queries, f"{stats!r} has more hits than queries")
    e.hear()
