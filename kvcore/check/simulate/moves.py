# SPDX-License-Identifier: Apache-2.0
"""The moves of a simulated engine and its device, each as calls on a run.

A move that makes no sense at its point of the run does nothing and returns None, so that moves can
be left out of a run. Blocks are named by request, group and position, batches and operations by
their age. A cancel, a failing load and an abort are moves like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvcore.check.simulate.batches import execute, take
from kvcore.check.simulate.events import follow
from kvcore.check.simulate.kept import forget_pinned
from kvcore.check.simulate.play import Play, Transfer
from kvcore.check.simulate.prefixes import SimulatedRequest, make_request, media_end
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended, Hit, Refused, Status

WELL = (Misuse, Refused)


def add(play: Play, name: str, tokens: Sequence[int], kind: str, goal: int) -> Any:
    """Add a new request. goal: tokens at which it is done."""
    if name in play.known:
        return None
    known = SimulatedRequest(
        name, 0, make_request(name, list(tokens), kind), goal, own=kind == "own"
    )
    play.prefixes.grow(known, tokens)
    if known.own:
        known.request = attrs.evolve(known.request, block_hashes=play.prefixes.own(known))
    row = play.call("add_request", known.request)
    if not isinstance(row, Misuse):
        play.known[name], known.row = known, row
    return row


def hashes(play: Play, name: str) -> Any:
    """Give a request with hashes of its own those of the blocks that filled since."""
    more = play.prefixes.own(play.known[name]) if name in play.known else []
    return play.call("add_block_hashes", name, more) if more else None


def extend(play: Play, name: str, tokens: Sequence[int]) -> Any:
    """Append tokens to a request that awaits none."""
    if name not in play.known or play.known[name].future or play.known[name].guesses:
        return None
    value = play.call("add_tokens", name, list(tokens))
    if not isinstance(value, Misuse):
        play.prefixes.grow(play.known[name], tokens)
    return value


def allocate(
    play: Play, name: str, most: int, hits: bool, options: dict[str, Any], advised: bool = False
) -> Any:
    """Schedule the next tokens of a request, at most this many. advised: as many as the manager
    advises, so that a state is worth keeping. A mark is dropped if no hit can end there.
    """
    status = play.status(name)
    if status in (None, Status.SWAPPED) or play.loading(name):
        return None
    known = play.known[name]
    hit = _hit(play, name) if hits and status is Status.WAITING else None
    start = play.manager.num_computed_tokens(name) + (hit.num_tokens if hit else 0)
    limit = play.config.length_limit
    left = min(len(known.tokens) + len(known.drafts), limit) - start
    external = options.get("num_external_computed_tokens", 0)
    external = min(external, max(0, len(known.tokens) - start))
    count = min(most, left - external)
    if count < 0 or count + external < 1:
        return None
    said = dict(options)
    marks = said.pop("checkpoint", False)
    if advised and count and not external:
        count, marks = _advice(play, name, count, hit)
    end = start + external + count
    if marks and end % play.config.hit_alignment == 0 and end <= len(known.tokens):
        said["checkpoint"] = True
    if external:
        said["num_external_computed_tokens"] = external
    else:
        said.pop("num_external_computed_tokens", None)
    if start:
        said.pop("num_encoder_tokens", None)
    num_free, began = play.manager.num_free_blocks, _counts(play, name)
    value = play.call("allocate_slots", name, count, *([hit] if hit else []), **said)
    if not isinstance(value, WELL):
        few = play.manager.num_free_blocks < min(num_free, play.config.watermark_blocks)
        if few and status is Status.WAITING:
            raise InvariantViolation("ADMIT-EXACT", f"{name!r} leaves less than the watermark")
        if play.manager.num_computed_tokens(name) != end:
            detail = f"request {name!r} counts {play.manager.num_computed_tokens(name)}, not {end}"
            raise InvariantViolation("COMPUTED-RULE", detail)
        num_slots = min(end + options.get("num_lookahead_tokens", 0), limit)
        if not began:
            play.prefixes.begin(known, play.epoch)
        if not start:
            known.encoder = play.prefixes.encode(said.get("num_encoder_tokens", 0))
        play.schedule(known, start, start + external, end, num_slots)
        play.goals["state marked"] += "checkpoint" in said
        play.goals["state hit"] += play.config.has_states and hit is not None
        inside = hit is not None and hit.num_tokens % play.config.block_size > 0
        play.goals["hit inside a block"] += play.config.has_tails and inside
    return value


def append(play: Play, names: Sequence[str], tokens: Sequence[int]) -> Any:
    """Append one token to each request that is computed to its last one."""
    pairs = [
        (name, token)
        for name, token in zip(names, tokens, strict=True)
        if _runs(play, name) and not play.left(name) and not play.known[name].drafts
    ]
    if not pairs:
        return None
    counts = {name: play.manager.num_computed_tokens(name) for name, _ in pairs}
    value = play.call("append", [name for name, _ in pairs], [token for _, token in pairs])
    if isinstance(value, Appended):
        for name, token in pairs[: value.done]:
            play.prefixes.grow(play.known[name], [token])
            start = counts[name]
            play.schedule(play.known[name], start, start, start + 1, start + 1)
    return value


def guess(play: Play, name: str, drafts: Sequence[int]) -> Any:
    """Give a request drafts after its tokens."""
    if not _runs(play, name):
        return None
    value = play.call("add_drafts", name, list(drafts))
    if not isinstance(value, Misuse):
        play.known[name].drafts = list(drafts)
    return value


def accept(play: Play, name: str, count: int) -> Any:
    """Give the verdict on a request's scheduled drafts."""
    if name not in play.known:
        return None
    known = play.known[name]
    scheduled = play.manager.num_computed_tokens(name) - len(known.tokens)
    if scheduled <= 0 or any(each.request_id == name for each in play.passes):
        return None
    count = min(count, scheduled)
    value = play.call("accept", name, count)
    if not isinstance(value, Misuse):
        accepted, known.drafts = known.drafts[:count], []
        known.sampler = None  # perhaps a batch before that of the drafts
        play.prefixes.grow(known, accepted)
    return value


def free(play: Play, name: str) -> Any:
    """Free a request's blocks; it waits."""
    if name not in play.known:
        return None
    value = play.call("free", name)
    if not isinstance(value, Misuse):
        play.leave([name])
    return value


def remove(play: Play, name: str) -> Any:
    """Remove a waiting request."""
    if play.status(name) is not Status.WAITING:
        return None
    value = play.call("remove_request", name)
    if not isinstance(value, Misuse):
        del play.known[name]
    return value


def fork(play: Play, parent: str, child: str, goal: int) -> Any:
    """Fork a child that continues a request's tokens."""
    if not _runs(play, parent) or child in play.known:
        return None
    source = play.known[parent]
    row = play.call("fork", parent, child)
    if not isinstance(row, Misuse):
        request = attrs.evolve(source.request, request_id=child)
        made = attrs.evolve(source, name=child, row=row, request=request, goal=goal, drafts=[])
        made.tokens, made.nodes = list(source.tokens), list(source.nodes)
        same = source.contents is source.nodes
        made.contents = made.nodes if same else list(source.contents)
        made.drop_output()
        made.dropped = None
        play.known[child] = made
    return row


def truncate(play: Play, name: str, num_tokens: int) -> Any:
    """Keep this many of a request's tokens; an engine never cuts inside an image."""
    known = play.known.get(name)
    if known is None or not media_end(known) <= num_tokens <= len(known.tokens):
        return None
    value = play.call("truncate", name, num_tokens)
    if not isinstance(value, Misuse):
        stale = [each for each in known.future if each[1] is not None]
        known.dropped = stale[0] if stale else None
        play.prefixes.cut(known, num_tokens)
        play.leave([name])
    return value


def swap_out(play: Play, names: Sequence[str]) -> Any:
    """Move requests to the host tier."""
    some = [name for name in names if _runs(play, name)]
    if not some:
        return None
    value = play.call("swap_out", some)
    if not isinstance(value, WELL):
        play.leave(some)
    return value


def swap_in(play: Play, names: Sequence[str]) -> Any:
    """Move requests back to the device."""
    some = [name for name in names if play.status(name) is Status.SWAPPED]
    return play.call("swap_in", some) if some else None


def pin(play: Play, name: str, group_id: int, position: int) -> Any:
    """Pin a block of a request."""
    block = _block(play, name, group_id, position)
    if block is None:
        return None
    value = play.call("pin", [block])
    if not isinstance(value, Misuse):
        play.pins.append(block)
    return value


def unpin(play: Play, index: int) -> Any:
    """End a pin."""
    if not play.pins:
        return None
    return play.call("unpin", [play.pins.pop(index % len(play.pins))])


def evict(play: Play, name: str, group_id: int, position: int) -> Any:
    """Withdraw the key of a block of a request."""
    block = _block(play, name, group_id, position)
    if block is None:
        return None
    forget_pinned(play)
    return play.call("evict_blocks", [block])


def store(play: Play, name: str, group_id: int, positions: Sequence[int]) -> Any:
    """Store blocks of a request that have keys in the external store."""
    blocks = [_block(play, name, group_id, position) for position in positions]
    keyed = [block for block in blocks if block is not None and play.manager.has_key(block)]
    if not keyed:
        return None
    value = play.call("store", keyed)
    if not isinstance(value, Misuse):
        for operation in value:
            play.transfers[operation] = Transfer(play.number, False, None)
    return value


def load(play: Play, name: str, num_blocks: int) -> Any:
    """Load the next whole blocks of a waiting request from the external store."""
    if play.status(name) is not Status.WAITING or play.loading(name):
        return None
    hit, step = _hit(play, name), play.config.block_alignment
    start = hit.num_tokens if hit else 0
    most = (len(play.known[name].tokens) - 1 - start) // step
    if most < 1 or not play.config.enable_caching:
        return None
    count = step * min(num_blocks, most)
    value = play.call("load", name, count, *([hit] if hit else []))
    if not isinstance(value, WELL):
        for operation in value:
            play.transfers[operation] = Transfer(play.number, True, name)
        play.prefixes.begin(play.known[name], play.epoch)
        if value:
            play.load_starts[name] = start
    return value


def finish(play: Play, index: int, done: bool) -> Any:
    """End a store or load, done or failed. index: among those that can end, by number."""
    ended = [number for number, each in sorted(play.transfers.items()) if play.has_run(each.batch)]
    if not ended:
        return None
    number = ended[index % len(ended)]
    transfer = play.transfers[number]
    ran = number in play.memory.loads
    done = done and (ran or not transfer.loads)
    if ran:
        key, _, epoch = play.memory.loads[number]
        nodes = play.prefixes.block(key, epoch) if done else None
        for device in play.devices:
            device.arrive(number, nodes)
    value = play.call("complete_operation", number, done)
    del play.transfers[number]
    if transfer.waits is not None and not play.loading(transfer.waits):
        play.load_starts.pop(transfer.waits, None)
        play.settle(transfer.waits)
    return value


def cache(play: Play, name: str, count: int) -> Any:
    """Publish blocks whose caching was delayed."""
    if not _runs(play, name):
        return None
    return play.call("cache_blocks", name, min(count, play.manager.num_computed_tokens(name)))


def trim(play: Play, name: str) -> Any:
    """Give back the blocks that no query sees any more."""
    if not _runs(play, name):
        return None
    count = min(play.manager.num_computed_tokens(name), len(play.known[name].tokens))
    return play.call("remove_skipped_blocks", name, count)


def reset(play: Play) -> Any:
    """Reset all keys, if nothing is held."""
    return play.call("reset_prefix_cache")


def drain(play: Play) -> Any:
    """Take events, statistics and new blocks."""
    follow(play.keys, play.call("take_events"))
    for name in ("take_stats", "take_new_block_ids"):
        play.call(name)
    return None


def fail(play: Play, name: str, offset: int) -> Any:
    """Take the batch, let a load of its forward pass fail, and take back what counts on it."""
    loads = (each for each in play.passes if each.request_id == name and each.loaded > each.start)
    one = next(loads, None)
    if one is None:
        return None
    at, first = play.passes.index(one), one.start + offset % (one.loaded - one.start)
    play.passes[at] = attrs.evolve(one, failed=first)
    if take(play) is None:
        play.passes[at] = one
        return None
    while play.waiting:
        execute(play)
    forget_pinned(play)
    fell = play.call("rewind", [name], first)
    if isinstance(fell, Misuse):
        raise InvariantViolation("LOAD-FAILED", f"the report of {name!r} is refused: {fell}")
    play.leave(list(dict.fromkeys((name, *fell))))
    return fell


def _runs(play: Play, name: str) -> bool:
    """Return whether a request holds device blocks and waits for no load."""
    return play.status(name) is Status.RUNNING and not play.loading(name)


def _counts(play: Play, name: str) -> bool:
    """Return whether a request counts tokens."""
    return play.manager.num_computed_tokens(name) > 0


def _hit(play: Play, name: str) -> Hit | None:
    """Return the cached prefix of a request, looked up in every manager; None for none."""
    hits = [manager.get_computed_blocks(name) for _, manager in play.managers]
    if any(hit != hits[0] for hit in hits):
        raise InvariantViolation("PARITY", f"the hits of {name!r} are {hits}")
    return hits[0] if hits[0].num_tokens else None


def _advice(play: Play, name: str, count: int, hit: Hit | None) -> tuple[int, bool]:
    """Return how many of these tokens to schedule, and whether to mark the state after them."""
    advice = [manager.checkpoint_stop(name, count, hit) for _, manager in play.managers]
    if any(each != advice[0] for each in advice):
        raise InvariantViolation("PARITY", f"the advice for {name!r} is {advice}")
    play.goals["checkpoint_stop"] += 1
    return advice[0]


def _block(play: Play, name: str, group_id: int, position: int) -> int | None:
    """Return a block of a request; None if it has no such block."""
    if play.status(name) is not Status.RUNNING:
        return None
    table = play.manager.get_blocks(name).blocks[group_id % len(play.config.groups)]
    if not table:
        return None
    block = table[position % len(table)]
    return block if block >= int(play.config.null_block) else None
