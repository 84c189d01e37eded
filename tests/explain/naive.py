# SPDX-License-Identifier: Apache-2.0
"""The causes of missed tokens by their definitions, from a full history and in quadratic time.

The history is read from the states before and after each call of the Python core: every text and
every computed prefix that ever was, and for each key how it was last lost. What a request counted
when it gave up its blocks was computed; what a cancel, a failed load or the open batch took back
was not. Nothing here is shared with `kvcore.explain`. It knows full, sliding and chunked groups.
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
    *("not_published", "lost", "groups_disagree", "unused"),
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
        self.texts: set[tuple[int, Any, Labels]] = set()
        self.computed: set[tuple[Any, Labels, int]] = set()
        self.admitted: set[str] = set()
        self.ever: set[bytes] = set()
        self.lost: dict[bytes, Lost] = {}
        self.owned = [0] * state.config.num_blocks

    def note(self, name: str, state: State, *args: Any, hit: Hit | None = None) -> None:
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
        self._note_lost(name, before, args)
        self.ever |= {key for key in state.device.keys if key is not None}
        self.owned = [
            self.step if was else last
            for last, was in zip(self.owned, before.device.ref_counts, strict=True)
        ]
        for block in () if hit is None else chain.from_iterable(hit.blocks.blocks):
            self.owned[block] = self.step
        if name in ("free", "swap_out", "truncate"):
            self._settle(before, args)
        self.step += name == "take_batch"

    def explain(self, request_id: str, used: int, external: int) -> list[tuple[str, Lost | None]]:
        """Return the cause of each token that an admission missed, by the state before it."""
        request, mine = self.state.requests[request_id], self.extra[request_id]
        config, text = self.state.config, self._labels(request_id, request)
        sizes = [group.block_size for group in config.groups]
        computed = self.computed | self._counts(self.state)
        lengths: dict[str, int] = {}
        lengths["old_epoch"] = max(
            (num_equal(text, its) for extra, its, _ in computed if extra == mine), default=0
        )
        lengths["partial_block"] = max(
            (
                num_equal(text, its)
                for extra, its, epoch in computed
                if extra == mine and epoch == self.state.epoch
            ),
            default=0,
        )
        earlier = [each for each in self.texts if each[0] < self.numbers[request_id]]
        same = [num_equal(text, its) for _, extra, its in earlier if extra == mine]
        lengths["not_computed"] = max([*same, lengths["old_epoch"]])
        lengths["namespace"] = max(
            [*(num_equal(plain(text), plain(its)) for *_, its in earlier), lengths["not_computed"]]
        )
        fresh, most = lengths["partial_block"], len(text) - 1
        starts = [at for at in range(fresh + 1) if all(at % size == 0 for size in sizes)]
        lengths["last_token"] = starts[-1]
        lengths["draft_drop"] = max(at for at in starts if at == 0 or at <= most)
        drops = [size * config.drops_last_hit(g) for g, size in enumerate(sizes)]
        starts = [at for at in starts if not at or at + max(drops) <= min(most, fresh)]
        lengths["not_published"] = starts[-1]
        now = {key for key in self.state.device.keys if key is not None}
        groups = range(len(sizes))
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
                lost = self._lost_at(request, least, token // sizes[least], now)
                cause = "evicted" if lost[2] in TAKERS.values() else "withdrawn"
            causes.append((cause, lost))
        return causes

    def _counts(self, state: State) -> set[tuple[Any, Labels, int]]:
        """Return what requests count as computed now: extra keys, labels, epoch."""
        return {
            (self.extra[name], self._labels(name, request)[: request.num_computed], request.epoch)
            for name, request in state.requests.items()
        }

    def _settle(self, before: State, args: Any) -> None:
        """Note what requests had computed that gave up blocks, without the open batch."""
        names = args[0] if isinstance(args[0], list) else [args[0]]
        for name in names:
            request, record = before.requests[name], before.batch.scheduled.get(name)
            count = request.num_computed
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

    def _finds(self, request: RequestState, g: int, at: int, keys: Collection[bytes]) -> bool:
        """Return whether a group can resume at a token if these keys are there."""
        config, group = self.state.config, self.state.config.groups[g]
        size, first = group.block_size, 0
        if group.kind == "chunked_local":
            assert group.window is not None
            first = at // group.window * group.window // size
        elif group.window is not None:
            first = min(max(0, at - group.window + 1) // size, at // size - 1)
        end = at // size + config.drops_last_hit(g)
        return not at or all(request.key(config, g, n) in keys for n in range(first, end))

    def _lost_at(self, request: RequestState, g: int, block: int, now: set[bytes]) -> Lost:
        """Return how a block's key was lost. If it was not, return the cause of the nearest missing
        block before it, else after it.
        """
        config = self.state.config
        num_hashed = request.num_hashed(config, g)
        for n in (*range(block, -1, -1), *range(block + 1, num_hashed)):
            key = request.key(config, g, n)
            if key in self.ever and key not in now:
                return self.lost[key]
        raise AssertionError(f"block {block} was never lost")

    def _note_lost(self, name: str, before: State, args: Any) -> None:
        there, kind = set(self.state.device.keys), TAKERS.get(name, name)
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
            key = before.device.keys[block]
            if key is not None and key not in there:
                idle = 0 if before.device.ref_counts[block] else self.step - self.owned[block]
                self.lost[key] = (takers.get(block), self.call, kind, self.step, idle)


def used_tokens(hit: Hit | None) -> int:
    """Return how many tokens an allocation takes from a hit."""
    return 0 if hit is None else hit.num_tokens


def plain(labels: Labels) -> tuple[int, ...]:
    """Return the tokens of labels."""
    return tuple(token for token, *_ in labels)
