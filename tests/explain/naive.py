# SPDX-License-Identifier: Apache-2.0
"""The causes of missed tokens by their definitions, from a full history and in quadratic time.

The history is read from the states before and after each call of the Python core: every text and
every computed prefix that ever was, and for each key how it was last lost. What a request counted
when it gave up its blocks was computed; what a cancel, a failed load or the open batch took back
was not. Nothing here is shared with `kvcore.explain`. It knows full, sliding, chunked and state
groups, and hits inside blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from kvcore.state.state import RequestState, State
from kvcore.types.values import Hit

Lost = tuple[str | None, int, str, int, int]
"""Request, call, kind, step, and steps since the block last had an owner."""
ROWS = (
    *("namespace", "not_computed", "old_epoch", "partial_block", "last_token", "draft_drop"),
    *("not_published", "no_checkpoint", "lost", "groups_disagree", "unused"),
)
TAKERS = {"allocate_slots": "prompt", "append": "decode", "swap_in": "swap_in", "load": "load"}
Labels = tuple[Any, ...]
"""The tokens of a text, each with the media there."""


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the leading elements that are equal."""
    pairs = list(zip(one, other, strict=False))
    return next((n for n, (mine, its) in enumerate(pairs) if mine != its), len(pairs))


class Naive:
    """A history of calls."""

    def __init__(self, state: State) -> None:
        self.state, self.step, self.call = state, 0, 0
        self.num_requests = 0
        self.numbers: dict[str, int] = {}
        self.extra: dict[str, Any] = {}
        self.prompts: dict[str, int] = {}
        self.media: dict[str, Any] = {}
        self.load_starts: dict[str, int] = {}
        self.texts: set[tuple[int, Any, Labels]] = set()
        self.computed: set[tuple[Any, Labels, int]] = set()
        self.admitted: set[str] = set()
        self.ever: set[bytes] = set()
        self.lost: dict[bytes, Lost] = {}
        self.owned = [0] * state.config.num_blocks

    def note(
        self, name: str, state: State, *args: Any, hit: Hit | None = None, refused: bool = False
    ) -> None:
        """Add a call that was made, and the state after it. hit: owned by the call, at least."""
        before, self.state = self.state, state
        self.call += 1
        if name in ("add_request", "fork"):
            new = args[0] if name == "add_request" else None
            request_id = new.request_id if new else args[1]
            self.extra[request_id] = (new.cache_salt, new.lora) if new else self.extra[args[0]]
            self.media[request_id] = new.media if new else self.media[args[0]]
            self.prompts[request_id] = len(new.tokens) if new else self.prompts[args[0]]
            self.numbers[request_id] = self.num_requests = self.num_requests + 1
            self.admitted.discard(request_id)
        for request_id, request in state.requests.items():
            labels = self._labels(request_id, request)
            self.texts.add((self.numbers[request_id], self.extra[request_id], labels))
            if any(map(len, request.tables)):
                self.admitted.add(request_id)
        if name == "advance_epoch":
            self.ever.clear()
        if name == "load":
            self.load_starts[args[0]] = state.requests[args[0]].num_computed - args[1]
        self._note_lost(name, before, args)
        self.ever |= all_keys(state)
        self.owned = [
            self.step if was else last
            for last, was in zip(self.owned, before.device.ref_counts, strict=True)
        ]
        for block in () if hit is None else chain.from_iterable(hit.blocks.blocks):
            self.owned[block] = self.step
        if name in ("free", "swap_out", "truncate") and not refused:
            self._settle(before, args)
        self.step += name == "take_batch"

    def explain(self, request_id: str, used: int, external: int) -> list[tuple[str, Lost | None]]:
        """Return the cause of each token that an admission missed, by the state before it."""
        request = self.state.requests[request_id]
        text, now = self._labels(request_id, request), all_keys(self.state)
        lengths = self._known(request_id, text)
        starts = self._starts(lengths, len(text) - 1)
        groups = range(len(self.state.config.groups))
        attention = [g for g in groups if self.state.config.groups[g].kind != "state"]
        lengths["no_checkpoint"] = max(
            at for at in starts if all(self._finds(request, g, at, self.ever) for g in attention)
        )
        once = lengths["lost"] = max(
            at for at in starts if all(self._finds(request, g, at, self.ever) for g in groups)
        )
        starts = [at for at in starts if at <= once]
        own = [max(at for at in starts if self._finds(request, g, at, now)) for g in groups]
        lengths["groups_disagree"] = min(own)
        lengths["unused"] = max(
            at for at in starts if all(self._finds(request, g, at, now) for g in groups)
        )
        least = own.index(min(own))
        causes: list[tuple[str, Lost | None]] = []
        for token in range(used, lengths["namespace"]):
            cause = [row for row in ROWS if token < lengths[row]][-1]
            lost = None
            if token < used + external:
                cause = "external"
            elif cause == "lost":
                lost = self._lost_at(request, least, token, once, now)
                cause = "evicted" if lost[2] in TAKERS.values() else "withdrawn"
            causes.append((cause, lost))
        return causes

    def _known(self, request_id: str, text: Labels) -> dict[str, int]:
        """Return the lengths that are known and computed, by the cause of the tokens below."""
        mine = self.extra[request_id]
        computed = self.computed | self._counts(self.state)
        ever = [num_equal(text, its) for extra, its, _ in computed if extra == mine]
        fresh = [
            num_equal(text, its)
            for extra, its, epoch in computed
            if extra == mine and epoch == self.state.epoch
        ]
        earlier = [each for each in self.texts if each[0] < self.numbers[request_id]]
        same = [num_equal(text, its) for _, extra, its in earlier if extra == mine]
        same += ever
        bare = [num_equal(plain(text), plain(its)) for *_, its in earlier]
        return {
            "namespace": max([*bare, *same], default=0),
            "not_computed": max(same, default=0),
            "old_epoch": max(ever, default=0),
            "partial_block": max(fresh, default=0),
        }

    def _starts(self, lengths: dict[str, int], most: int) -> list[int]:
        """Return where a look-up may end, and add the lengths that depend on it. most: tokens that
        it may find.
        """
        config, unit = self.state.config, self.state.config.hash_block_size
        attention = [g for g, each in enumerate(config.groups) if each.kind != "state"]
        sizes = [unit if config.has_tails else config.groups[g].block_size for g in attention]
        fresh = lengths["partial_block"]
        starts = [at for at in range(fresh + 1) if all(at % size == 0 for size in sizes)]
        lengths["last_token"] = starts[-1]
        lengths["draft_drop"] = max(at for at in starts if at == 0 or at <= most)
        drops = [size * config.drops_last_hit(g) for g, size in zip(attention, sizes, strict=True)]
        starts = [at for at in starts if not at or at + max(drops) <= min(most, fresh)]
        lengths["not_published"] = starts[-1]
        return starts

    def _counts(self, state: State) -> set[tuple[Any, Labels, int]]:
        """Return what requests count as computed now: extra keys, labels, epoch."""
        return {
            (self.extra[name], self._labels(name, request)[: self._there(request)], request.epoch)
            for name, request in state.requests.items()
        }

    def _there(self, request: RequestState) -> int:
        """Return what a request counts, without tokens that a load has not brought yet."""
        count = request.num_computed
        return min(count, self.load_starts[request.request_id]) if request.num_loading else count

    def _settle(self, before: State, args: Any) -> None:
        """Note what requests had computed that gave up blocks, without the open batch."""
        names = args[0] if isinstance(args[0], list) else [args[0]]
        for name in names:
            request = before.requests[name]
            record = before.batch.scheduled[request.row]
            count = self._there(request)
            count = count if record is None else min(count, record.num_computed_before)
            labels = self._labels(name, request)[:count]
            self.computed.add((self.extra[name], labels, request.epoch))

    def _labels(self, name: str, request: RequestState) -> Labels:
        """Return the tokens of a request, each with its media."""
        items = self.media[name]
        return tuple(
            (
                token,
                *(
                    (each.identifier, at - each.offset)
                    for each in items
                    if each.offset <= at < each.offset + each.length
                ),
            )
            for at, token in enumerate(request.tokens)
        )

    def _needs(self, request: RequestState, g: int, at: int) -> list[tuple[int, bytes | None]]:
        """Return the keys that a group needs to resume at a token, each with the first token that
        it stands for; None for a key that the request does not have.
        """
        config, group = self.state.config, self.state.config.groups[g]
        size, unit, first = group.block_size, config.hash_block_size, 0
        if group.kind == "state":
            return [(at - unit, self._key(request, g, at))]
        if group.kind == "chunked_local":
            assert group.window is not None
            first = at // group.window * group.window // size
        elif group.window is not None:
            first = min(max(0, at - group.window + 1) // size, -(-at // size) - 1)
        ends, drops = [at], config.drops_last_hit(g)
        if drops:
            ends.append(at + (unit if config.has_tails else size))
        whole = range(first * size, ends[-1] // size * size, size)
        needs = [(start, self._key(request, g, start + size)) for start in whole]
        parts = [(end // size * size, self._key(request, g, end)) for end in ends if end % size]
        return needs + parts

    def _key(self, request: RequestState, g: int, at: int) -> bytes | None:
        unit = self.state.config.hash_block_size
        has_hash = at <= len(request.block_hashes) * unit
        return request.key_at(self.state.config, g, at) if has_hash else None

    def _finds(self, request: RequestState, g: int, at: int, keys: Collection[bytes]) -> bool:
        """Return whether a group can resume at a token if these keys are there."""
        return not at or all(key in keys for _, key in self._needs(request, g, at))

    def _lost_at(
        self, request: RequestState, g: int, token: int, once: int, now: set[bytes]
    ) -> Lost:
        """Return how the key of a token was lost. If it was not, return the cause of the nearest
        missing key before it, else after it. once: where the group was found at some time.
        """
        config = self.state.config
        size, unit = config.groups[g].block_size, config.hash_block_size
        num_tokens = len(request.block_hashes) * unit
        if config.groups[g].kind == "state":
            size = unit
        ends = [*range(size, num_tokens + 1, size)]
        if config.has_tails and config.groups[g].kind != "state":
            dropped = [once + unit] if config.drops_last_hit(g) else []
            ends = [*range(size, once + 1, size), *([once] if once % size else []), *dropped]
        keys = [self._key(request, g, end) for end in ends]
        block = token // size
        for key in (*keys[block::-1], *keys[block + 1 :]):
            if key in self.ever and key not in now:
                return self.lost[key]
        raise AssertionError(f"token {token} was never lost")

    def _note_lost(self, name: str, before: State, args: Any) -> None:
        there, kind = all_keys(self.state), TAKERS.get(name, name)
        takers: dict[int, str] = {}
        named = args[0] if args and isinstance(args[0], list) else []
        named = [each for each in named if each in self.state.requests]
        for request_id in dict.fromkeys([*named, *self.state.requests]):
            request, old = self.state.requests[request_id], before.requests.get(request_id)
            for g, table in enumerate(request.tables):
                had = set(enumerate(old.tables[g])) if old is not None else set()
                new = (block for place, block in enumerate(table) if (place, block) not in had)
                takers |= dict.fromkeys(new, request_id)
        if name == "allocate_slots":
            done = before.requests[args[0]].num_computed
            kind = "prompt" if done < self.prompts[args[0]] else "decode"
        for block in (*range(len(self.owned)), *takers):  # of equal keys the last one taken counts
            idle = 0 if before.device.ref_counts[block] else self.step - self.owned[block]
            for key in block_keys(before, block) - there:
                self.lost[key] = (takers.get(block), self.call, kind, self.step, idle)


def used_tokens(hit: Hit | None) -> int:
    """Return how many tokens an allocation takes from a hit."""
    return 0 if hit is None else hit.num_tokens


def block_keys(state: State, block: int) -> set[bytes]:
    """Return the keys of a block, also those of its parts."""
    key, tails = state.device.keys[block], state.device.tails
    return set(() if key is None else (key,)) | set(tails.keys(block) if tails else ())


def all_keys(state: State) -> set[bytes]:
    """Return all keys of the device."""
    return set().union(*(block_keys(state, block) for block in range(state.device.num_blocks)))


def plain(labels: Labels) -> tuple[int, ...]:
    """Return the tokens of labels."""
    return tuple(token for token, *_ in labels)
