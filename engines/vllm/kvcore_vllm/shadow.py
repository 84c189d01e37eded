# SPDX-License-Identifier: Apache-2.0
"""kvcore behind vLLM's own manager: it gets the same calls, and only its answers are compared.

vLLM's manager decides. Calls for running requests reach kvcore once a step has them all
(later_calls.py), other calls at once. The first call whose answers differ is reported with both
answers and what both sides hold; from then on kvcore gets no more calls. With
KVCORE_SHADOW_EVERY=n, only the answers of every n-th step are compared. The clock is read in one of
STEPS_PER_TIMED steps, since reading it takes as long as a small call.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import gcd
from time import perf_counter_ns
from typing import Any

import attrs
from vllm.logger import init_logger

from kvcore.compat.shadow_steps import read_every, stopped
from kvcore.types.commands import Batch, Evict
from kvcore_vllm.blocks import read_ids
from kvcore_vllm.later_calls import LaterCalls
from kvcore_vllm.pinned import NotServed
from kvcore_vllm.short_ways import KVCacheManager

logger = init_logger("vllm.kvcore")
SIDES = ("vLLM", "kvcore")
COMPARED = ("free", "remove_skipped_blocks", "evict_blocks", "reset_prefix_cache")
"""Calls that both managers get unchanged, and whose answers are compared."""
STEPS_PER_TIMED = 64
MADE = ("new_step_starts", "record_blocks_for_zeroing", "take_new_block_ids", "take_events")
"""Calls that both get; their answers name block ids, which may differ."""


@attrs.define
class Tally:
    """What was seen so far.

    difference: the report of the first difference, None before. same_ids: whether the answers have
    named the same block ids so far; other ids are not a difference. nanoseconds: time in each
    manager and in comparing, over the num_timed steps that were timed. hit_tokens: of all look-ups.
    num_evictions: of each manager.
    """

    difference: str | None = None
    same_ids: bool = True
    num_calls: int = 0
    num_steps: int = 0
    num_timed: int = 0
    nanoseconds: Counter[str] = attrs.field(factory=Counter)
    hit_tokens: Counter[str] = attrs.field(factory=Counter)
    num_evictions: Counter[str] = attrs.field(factory=Counter)
    started: int = attrs.field(factory=perf_counter_ns)

    def report(self) -> str:
        """Log the counts, and return the text."""
        whole = max(1, perf_counter_ns() - self.started)
        scale = max(1, self.num_steps) / max(1, self.num_timed) / 1e9
        own, kvcore, comparing = (self.nanoseconds[each] * scale for each in (*SIDES, "comparing"))
        text = (
            f"kvcore in the shadow of vLLM's manager: {self.num_calls} calls in {self.num_steps} "
            f"steps, {'parted' if self.difference else 'no difference'}, blocks at "
            f"{'the same' if self.same_ids else 'other'} places; vLLM and kvcore: "
            f"{' and '.join(str(self.hit_tokens[side]) for side in SIDES)} hit tokens, "
            f"{' and '.join(str(self.num_evictions[side]) for side in SIDES)} evictions, "
            f"{own:.3f} and {kvcore:.3f} s in the manager (of {self.num_timed} steps that were "
            f"timed, times {scale * 1e9:.1f}); comparing took {comparing:.3f} s, "
            f"{100e9 * comparing / whole:.1f} % of the time"
        )
        logger.info("%s", text)
        return text


class Shadow:
    """Both managers under vLLM's names. Raises NotServed for what kvcore does not serve.

    The report is logged when this object is dropped, at the latest when Python exits.
    """

    def __init__(self, own: Any, kvcore: KVCacheManager) -> None:
        self.own, self.kvcore = own, kvcore
        self.tally = Tally()
        self.block_pool = ShadowPool(self)
        self.place: dict[int, int] = {}  # of blocks that connectors hold: vLLM's id to kvcore's
        self._every = read_every(NotServed)
        self._clock: Callable[[], int] = perf_counter_ns
        sizes = [group.block_size for group in kvcore.compat.config.groups]
        self._later = LaterCalls(own.empty_kv_cache_blocks, gcd(*sizes))
        allocate, publish = own.allocate_slots, own.cache_blocks
        self._untimed = self._later.noting(allocate, publish, self.allocate_slots)
        timed = self._clocked(allocate), self._clocked(publish)
        self._timed = self._later.noting(*timed, self.allocate_slots)
        self._hits: dict[str, Any] = {}
        count_evictions(self)
        for name in COMPARED:
            setattr(self, name, partial(self._compare_both, name, operator.eq))
        for name in MADE:
            setattr(self, name, partial(self._compare_both, name, None))
        weakref.finalize(self, self.tally.report)

    def __getattr__(self, name: str) -> Any:
        """Pass every other call to vLLM's manager alone."""
        return getattr(self.own, name)

    def get_computed_blocks(self, request: Any, *args: Any, **options: Any) -> Any:
        """Return vLLM's hit; kvcore's is kept for `allocate_slots`."""
        return self._look_up("get_computed_blocks", request, *args, **options)

    def get_computed_blocks_for_connector(self, request: Any, *args: Any, **options: Any) -> Any:
        """Return vLLM's hit, as above, with whether it differs between groups."""
        return self._look_up("get_computed_blocks_for_connector", request, *args, **options)

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Allocate slots in both. Returns vLLM's new blocks, or None."""
        counts = (request, num_new_tokens, num_new_computed_tokens)

        def theirs() -> Any:
            hit = self._hits.pop(request.request_id, None) if new_computed_blocks else None
            if hit is not None:
                hit = self.kvcore.truncate_computed_blocks(hit, num_new_computed_tokens)
            return self.kvcore.allocate_slots(*counts, hit, *args, **options)

        mine = partial(self.own.allocate_slots, *counts, new_computed_blocks, *args, **options)
        return self.compare_call(
            "allocate_slots", request.request_id, self._same_blocks, mine, theirs
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Publish a request's full blocks in both."""
        self._compare_both("cache_blocks", None, request, num_computed_tokens)

    def catch_up(self) -> None:
        """Make the calls to kvcore that were put off, and compare the answers."""
        clock, spent = self._clock, self.tally.nanoseconds
        self.tally.num_calls += len(self._later)
        compares = self.tally.num_steps % self._every == 0
        started = clock()
        for name, request, answer, other in self._later.compare(self.kvcore):
            clock_start = clock()
            spent["kvcore"] += clock_start - started
            try:
                same = not compares or self._same_blocks(answer, other)
            except Exception as error:  # whatever it is, vLLM's answers stand
                other, same = error, False
            if not same or isinstance(other, Exception):
                self.part(name, request.request_id, answer, other)
                return
            started = clock()
            spent["comparing"] += started - clock_start
        spent["kvcore"] += clock() - started

    def pop_blocks_for_free(self, request: Any) -> Any:
        """Return vLLM's blocks; `block_pool.free_blocks` gives back those of both managers."""
        calls = (partial(each.pop_blocks_for_free, request) for each in (self.own, self.kvcore))
        return self.compare_call(
            "pop_blocks_for_free", request.request_id, self._note_places, *calls
        )

    def compare_call(
        self,
        name: str,
        request_id: str,
        same: Callable[[Any, Any], bool] | None,
        mine: Callable[[], Any],
        theirs: Callable[[], Any],
    ) -> Any:
        """Return vLLM's answer, compared with kvcore's by `same` if it is given."""
        if self._later:
            self.catch_up()
        self._later.forget(request_id)
        clock = self._clock
        started = clock()
        answer = mine()
        clock_start = clock()
        self.tally.nanoseconds["vLLM"] += clock_start - started
        if self.tally.difference is not None:
            return answer
        self.tally.num_calls += 1
        try:
            other = theirs()
            answered = clock()
            self.tally.nanoseconds["kvcore"] += answered - clock_start
            if same and self.tally.num_steps % self._every == 0 and not same(answer, other):
                self.part(name, request_id, answer, other)
            self.tally.nanoseconds["comparing"] += clock() - answered
        except Exception as error:  # whatever it is, vLLM's answer stands
            self.part(name, request_id, answer, error)
        return answer

    def part(self, name: str, request_id: str, mine: Any, theirs: Any) -> None:
        """Report a difference, and make no more calls to kvcore."""
        self._put_off({})
        sides = []
        for manager in (self.own, self.kvcore):
            try:
                held = [*map(len, manager.get_block_ids(request_id))] if request_id else []
                pool = manager.block_pool
                free = f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks} blocks free"
                sides.append(f"{free}, {held} held by the request")
            except Exception as error:  # this is an error of kvcore too
                sides.append(f"it cannot tell what it holds: {error!r}")
        of_call = f"{name} of request {request_id!r}" if request_id else name
        seen, withdrawn = self.tally, self.kvcore.num_withdrawn
        seen.difference = (
            f"kvcore parts from vLLM's manager in call {seen.num_calls}, step {seen.num_steps}: "
            f"{of_call} gave {shown(mine)} with vLLM's manager ({sides[0]}) and {shown(theirs)} "
            f"with kvcore ({sides[1]}; {withdrawn} keys withdrawn, as their step was not computed)"
        )
        logger.error("%s", self.tally.difference)

    def _put_off(self, calls: Mapping[str, Any]) -> None:
        """Install methods that note their calls; without any, both managers are called at once."""
        for name in self._untimed:
            vars(self).pop(name, None)
        vars(self).update(calls)

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call of vLLM's manager so that its time is counted."""
        spent, clock = self.tally.nanoseconds, perf_counter_ns

        def timed(*args: Any) -> Any:
            started = clock()
            answer = call(*args)
            spent["vLLM"] += clock() - started
            return answer

        return timed

    def _compare_both(self, name: str, same: Any, *args: Any, **options: Any) -> Any:
        if name == "new_step_starts":
            is_timed = self.tally.num_steps % STEPS_PER_TIMED == 0
            self._clock = perf_counter_ns if is_timed else stopped
            if self.tally.difference is None:
                self._put_off(self._timed if is_timed else self._untimed)
            self.tally.num_timed += is_timed
            self.tally.num_steps += 1
        request_id = getattr(args[0], "request_id", "") if args else ""
        calls = (partial(getattr(m, name), *args, **options) for m in (self.own, self.kvcore))
        return self.compare_call(name, request_id, same, *calls)

    def _look_up(self, name: str, request: Any, *args: Any, **options: Any) -> Any:
        def same(mine: Any, theirs: Any) -> bool:
            self.tally.hit_tokens["vLLM"] += mine[1]
            self.tally.hit_tokens["kvcore"] += theirs[1]
            # mine[2] says what vLLM keeps of a window; kvcore keeps all of it.
            is_same = mine[1] == theirs[1] and mine[3:] == theirs[3:]
            return is_same and self._same_blocks(mine[0], theirs[0])

        def theirs() -> Any:
            found = getattr(self.kvcore, name)(request, *args, **options)
            self._hits[request.request_id] = found[0]
            return found

        mine = partial(getattr(self.own, name), request, *args, **options)
        return self.compare_call(name, request.request_id, same, mine, theirs)

    def _same_blocks(self, mine: Any, theirs: Any) -> bool:
        """Return whether both are None or have equally many blocks in each group."""
        if mine is None or theirs is None:
            return mine is theirs
        own, kvcore = read_ids(mine), read_ids(theirs)
        if self.tally.same_ids:
            self.tally.same_ids = list(map(list, own)) == list(map(list, kvcore))
        return list(map(len, own)) == list(map(len, kvcore))

    def _note_places(self, mine: list[Any], theirs: list[Any]) -> bool:
        ids = ([each.block_id for each in blocks] for blocks in (mine, theirs))
        self.place |= dict(zip(*ids, strict=False))
        return len(mine) == len(theirs)


class ShadowPool:
    """vLLM's pool. What connectors hold and give back is held and given back in kvcore's too."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._own = shadow.own.block_pool

    def __getattr__(self, name: str) -> Any:
        """Pass every other call to vLLM's pool."""
        return getattr(self._own, name)

    def touch(self, blocks: Iterable[Any]) -> None:
        """Hold blocks in both pools, so that they are not reused."""
        self._of_both("touch", blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back held blocks in both pools."""
        self._of_both("free_blocks", ordered_blocks)

    def _of_both(self, name: str, blocks: Iterable[Any]) -> None:
        listed, shadow = list(blocks), self._shadow
        pool = shadow.kvcore.block_pool

        def theirs() -> None:
            ids = [each.block_id for each in listed]
            if not shadow.tally.same_ids and not shadow.place.keys() >= set(ids):
                raise LookupError("the blocks that a connector names lie elsewhere in kvcore")
            getattr(pool, name)([pool.block(shadow.place.get(each, each)) for each in ids])

        shadow.compare_call(name, "", None, partial(getattr(self._own, name), listed), theirs)


def shadowed(own: type[Any]) -> Callable[..., Shadow]:
    """Return a function that makes vLLM's manager with kvcore's behind it, by vLLM's arguments."""

    def make(*args: Any, **options: Any) -> Shadow:
        return Shadow(own(*args, **options), KVCacheManager(*args, **options))

    return make


def shown(answer: Any) -> str:
    """Show an answer by the number of its blocks, or as it is."""
    if isinstance(answer, tuple):
        return f"({', '.join(map(shown, answer))})"
    try:
        return f"{[len(ids) for ids in read_ids(answer)]} blocks"
    except AttributeError:
        return repr(answer)[:200]


def count_evictions(shadow: Shadow) -> None:
    """Let both managers count the cached blocks that they evict."""
    pool, core = shadow.own.block_pool, shadow.kvcore.compat.core
    numbers = shadow.tally.num_evictions
    drop, take = pool._maybe_evict_cached_block, core.take_batch

    def dropped(block: Any) -> bool:
        done: bool = drop(block)
        numbers["vLLM"] += done
        return done

    def taken() -> Batch:
        batch = take()
        numbers["kvcore"] += batch.column("kind").tolist().count(Evict.kind)
        return batch

    pool._maybe_evict_cached_block = dropped
    setattr(core, "take_batch", taken)  # noqa: B010 # mypy takes no method by assignment
