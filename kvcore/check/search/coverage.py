# SPDX-License-Identifier: Apache-2.0
"""Coverage: what an exploration never reached, and where properties may hold vacuously.

It covers calls with their outcomes, kinds of commands, and goals; what a world's options make
impossible is not expected. If something is missing, the world is too small for it, or a guard is
never taken. A named world must reach all of it, or state why it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvcore.check.profiles.profile import Profile
from kvcore.check.world.world import World
from kvcore.types.config import Config

REFUSED = ("allocate_slots", "append", "load", "swap_in")


def never(world: World, notes: Counter[tuple[str, str]]) -> tuple[str, ...]:
    """Return the things that were never reached, in words."""
    return tuple(f"{kind} {name}" for kind, name in expected(world) if not notes[kind, name])


def missed(profile: Profile, notes: Counter[tuple[str, str]]) -> tuple[str, ...]:
    """Return the things that a named world must show and did not, in the words of `never`."""
    wanted = [f"{kind} {name}" for kind, name in expected(profile.world)]
    wanted = [each for each in wanted if each not in profile.not_shown]
    return tuple(each for each in (*wanted, *profile.shows) if not notes[_note(each)])


def needless(profile: Profile, notes: Counter[tuple[str, str]]) -> tuple[str, ...]:
    """Return what a named world says it cannot show, but shows or is not expected to show."""
    wanted = {f"{kind} {name}" for kind, name in expected(profile.world)}
    return tuple(each for each in profile.not_shown if each not in wanted or notes[_note(each)])


def _note(words: str) -> tuple[str, str]:
    kind, _, name = words.partition(" ")
    return kind, name


def expected(world: World) -> Iterator[tuple[str, str]]:
    """Yield the things that a world with these options can show."""
    yield from (("call", name) for name in _calls(world))
    yield from (("command", name) for name in _commands(world))
    yield from (("goal", name) for name in _goals(world))


def _calls(world: World) -> Iterator[str]:
    config = world.config
    for name in sorted(world.calls):
        yield f"{name}: done"
        if name in REFUSED:
            yield f"{name}: refused later"
    yield "take_batch: done"
    if world.num_drafts:
        yield from ("add_drafts: done", "accept: done")
    if {"store", "load"} & world.calls:
        yield "complete_operation: done"
    if config.max_in_flight:
        yield from ("complete: done", "cancel: done")


def _commands(world: World) -> Iterator[str]:
    config, calls = world.config, world.calls
    yield from ("Allocate", "Free", "SetTable", "CutTable")
    if config.enable_caching:
        yield from ("Touch", "Evict")
    if config.enable_caching and "reset_prefix_cache" in calls:
        yield "EvictAll"
    tails = config.has_tails and world.num_tokens > hit_least(config)
    inside = any(group.block_size > 1 for group in config.groups)
    if tails or ("fork" in calls and inside):
        yield "CopyOnWrite"
    named = {"swap_out": "SwapOut", "swap_in": "SwapIn", "store": "Store", "load": "Load"}
    yield from (kind for call, kind in named.items() if call in calls)
    if any(group.zero_new_blocks for group in config.groups):
        yield "Zero"


def _goals(world: World) -> Iterator[str]:
    config, several = world.config, world.num_requests > 1
    if several and ("fork" in world.calls or config.enable_caching):
        yield "sharing"
    if several and config.enable_caching:
        yield "duplicates" if config.duplicates == "keep" else "merge"
    if config.enable_caching and world.num_tokens > hit_least(config):
        yield "full hit"
    if any(group.is_windowed for group in config.groups):
        yield "trim"
    if config.max_in_flight:
        yield from ("quarantine", "cancel", "abort in flight")


def hit_least(config: Config) -> int:
    """Return the tokens of the shortest hit, those included that a look-up leaves out."""
    if config.has_tails:
        drops = any(config.drops_last_hit(index) for index in range(len(config.groups)))
        return config.hit_alignment * (1 + drops)
    groups = enumerate(config.groups)
    dropped = [group.block_size for group_id, group in groups if config.drops_last_hit(group_id)]
    return config.hit_alignment + max(dropped, default=0)
