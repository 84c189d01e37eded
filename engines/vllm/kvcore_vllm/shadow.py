# SPDX-License-Identifier: Apache-2.0
"""kvcore behind vLLM's own manager: it gets the same calls, and only its answers are compared.

vLLM's manager decides. Calls for running requests reach kvcore once a step has them all, those that
give back finished ones before the next other call (later_calls.py), and the rest at once. The first
call whose answers differ is reported with both answers and what both sides hold; from then on
kvcore gets no more calls. With KVCORE_SHADOW_EVERY=n, only the answers of every n-th step are
compared. The clock is read in one of STEPS_PER_TIMED steps, since reading it takes as long as a
small call.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import attrs
from vllm.logger import init_logger

from kvcore.compat.shadow_steps import read_every, stopped
from kvcore_vllm.blocks import read_ids
from kvcore_vllm.later_calls import LaterCalls
from kvcore_vllm.pinned import NotServed
from kvcore_vllm.shadow_pool import ShadowPool, count_evictions
from kvcore_vllm.short_ways import KVCacheManager

logger = init_logger("vllm.kvcore")
SIDES = ("vLLM", "kvcore")
COMPARED = ("remove_skipped_blocks", "evict_blocks", "reset_prefix_cache")
"""Calls that both managers get unchanged, and whose answers are compared."""
STEPS_PER_TIMED = 64
BLOCK_ID = operator.attrgetter("block_id")
MADE = ("record_blocks_for_zeroing", "take_new_block_ids")
"""Calls that both get; their answers name block ids, which may differ."""
EACH_STEP = {"_begin_step": "new_step_starts", "take_new_block_ids": "take_new_block_ids"}
"""Calls of each step without arguments and without compared answers, by the shadow's names."""


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

    _begin_step: Callable[[], None]

    def __init__(self, own: Any, kvcore: KVCacheManager) -> None:
        self.own, self.kvcore = own, kvcore
        self.tally = Tally()
        self.block_pool = ShadowPool(self)
        self.place: dict[int, int] = {}  # of blocks that connectors hold: vLLM's id to kvcore's
        self._every = read_every(NotServed)
        self._clock: Callable[[], int] = perf_counter_ns
        self.copied = Counter[int]()  # vLLM's ids of blocks held for copies; kvcore holds none
        unit = kvcore.compat.config.hash_block_size
        self._later = LaterCalls(own.empty_kv_cache_blocks, unit)
        noted = own.allocate_slots, own.cache_blocks, own.free
        self._untimed = self._later.noting(*noted, self)
        allocate, publish, give_back = map(self._clocked, noted)
        self._timed = self._later.noting(allocate, publish, give_back, self)
        for place, name in EACH_STEP.items():
            self._untimed[place] = self._without_clock(name)
            self._timed[place] = partial(self._call_both, name, None)
        self._hits: dict[str, Any] = {}
        count_evictions(self)
        self._alone = {
            name: getattr(own, name)
            for name, _ in inspect.getmembers(type(own), callable)
            if not name.startswith("_")
        }
        for name in self._alone.keys() - vars(Shadow).keys():
            setattr(self, name, self._alone[name])  # __getattr__ would add to each call
        for name in COMPARED:
            setattr(self, name, partial(self._call_both, name, operator.eq))
        for name in MADE if kvcore.events is None else (*MADE, "take_events"):
            setattr(self, name, partial(self._call_both, name, None))
        weakref.finalize(self, self.tally.report)

    def __getattr__(self, name: str) -> Any:
        """Return what else vLLM's manager has."""
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
        calls = self._same_blocks, self.own.allocate_slots, self._allocate_behind
        given = request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, *args
        return self.compare_call("allocate_slots", request.request_id, *calls, *given, **options)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Publish a request's full blocks in both."""
        self._call_both("cache_blocks", None, request, num_computed_tokens)

    def free(self, request: Any) -> None:
        """Give back a request's blocks in both."""
        self._call_both("free", None, request)

    def frees_later(self, request: Any) -> bool:
        """Return whether kvcore may give back a request's blocks later: a preempted one, which is
        counted anew, at once.
        """
        return request.is_finished() and self.kvcore.can_free_later

    def take_kv_cache_block_copies(self) -> Any:
        """Return vLLM's copies, if kvcore makes as many."""
        answer = self.own.take_kv_cache_block_copies()
        if self.kvcore.parts is None and not any(answer):
            self.tally.num_calls += 1  # neither makes copies
            return answer

        def same(mine: Any, theirs: Any) -> bool:
            return len(mine[0]) == len(theirs[0])

        def theirs() -> Any:
            copies, held = self.kvcore.take_kv_cache_block_copies()
            if held:
                self.kvcore.block_pool.free_blocks(held)
            return copies, held

        self.compare_call("take_kv_cache_block_copies", "", same, lambda: answer, theirs)
        self.copied.update(each.block_id for each in answer[1])
        return answer

    def new_step_starts(self) -> None:
        """Begin a step in both, and choose whether it is timed."""
        tally = self.tally
        is_timed = tally.num_steps % STEPS_PER_TIMED == 0
        if is_timed is not (self._clock is perf_counter_ns) or not tally.num_steps:
            self._clock = perf_counter_ns if is_timed else stopped
            vars(self).update(self._timed if is_timed else self._untimed)
        tally.num_timed += is_timed
        tally.num_steps += 1
        self._begin_step()

    def catch_up(self) -> None:
        """Make the calls to kvcore that were put off, and compare the answers."""
        clock, spent = self._clock, self.tally.nanoseconds
        self.tally.num_calls += len(self._later)
        compares = self.tally.num_steps % self._every == 0
        started = clock()
        found = unknown = "allocate_slots", "", None
        try:
            for name, request, answer, other in self._later.compare(self.kvcore):
                clock_start = clock()
                spent["kvcore"] += clock_start - started
                found = name, request.request_id, answer
                is_error = isinstance(other, Exception)
                if is_error or (compares and not self._same_blocks(answer, other)):
                    self.part(*found, other)
                    return
                started, found = clock(), unknown
                spent["comparing"] += started - clock_start
        except Exception as error:  # whatever it is, vLLM's answers stand
            self.part(*found, error)
        spent["kvcore"] += clock() - started

    def pop_blocks_for_free(self, request: Any) -> Any:
        """Return vLLM's blocks; `block_pool.free_blocks` gives back those of both managers."""
        return self._call_both("pop_blocks_for_free", self._note_places, request)

    def compare_call(
        self,
        name: str,
        request_id: str,
        same: Callable[[Any, Any], bool] | None,
        mine: Callable[..., Any],
        theirs: Callable[..., Any],
        /,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Return vLLM's answer, compared with kvcore's by `same` if it is given."""
        tally, later, clock = self.tally, self._later, self._clock
        if tally.difference is not None:
            return mine(*args, **options)
        if later.decoded or later.others:
            self.catch_up()
        if request_id:
            later.forget(request_id)
        started = clock()
        answer = mine(*args, **options)
        clock_start = clock()
        if tally.difference is not None:  # found while catching up
            return answer
        tally.num_calls += 1
        try:
            other = theirs(*args, **options)
            answered = clock()
            if same and tally.num_steps % self._every == 0 and not same(answer, other):
                self.part(name, request_id, answer, other)
        except Exception as error:  # whatever it is, vLLM's answer stands
            self.part(name, request_id, answer, error)
            return answer
        if clock is not stopped:
            spent = tally.nanoseconds
            spent["vLLM"] += clock_start - started
            spent["kvcore"] += answered - clock_start
            spent["comparing"] += clock() - answered
        return answer

    def part(self, name: str, request_id: str, mine: Any, theirs: Any) -> None:
        """Report a difference, and leave all further calls to vLLM's manager."""
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
        vars(self).update(self._alone)

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call of vLLM's manager so that its time is counted."""
        spent, clock = self.tally.nanoseconds, perf_counter_ns

        def timed(*args: Any) -> Any:
            started = clock()
            answer = call(*args)
            spent["vLLM"] += clock() - started
            return answer

        return timed

    def _without_clock(self, name: str) -> Callable[[], Any]:
        """Return a call of both for steps that are not timed; its answers are not compared."""
        own, tally, later = getattr(self.own, name), self.tally, self._later

        def both() -> Any:
            if later.decoded or later.others:
                self.catch_up()
            answer = own()
            if tally.difference is None:
                tally.num_calls += 1
                try:
                    getattr(self.kvcore, name)()
                except Exception as error:  # whatever it is, vLLM's answer stands
                    self.part(name, "", answer, error)
            return answer

        return both

    def _call_both(self, name: str, same: Any, /, *args: Any, **options: Any) -> Any:
        request_id = getattr(args[0], "request_id", "") if args else ""
        calls = getattr(self.own, name), getattr(self.kvcore, name)
        return self.compare_call(name, request_id, same, *calls, *args, **options)

    def _look_up(self, name: str, request: Any, /, *args: Any, **options: Any) -> Any:
        def same(mine: Any, theirs: Any) -> bool:
            self.tally.hit_tokens["vLLM"] += mine[1]
            self.tally.hit_tokens["kvcore"] += theirs[1]
            if self.kvcore.waits_for_state(request):  # vLLM says so when it allocates
                return True
            # mine[2] says what is kept of a window; both read it from the request.
            is_same = mine[1] == theirs[1] and mine[3:] == theirs[3:]
            return is_same and self._same_blocks(mine[0], theirs[0])

        def theirs(*args: Any, **options: Any) -> Any:
            found = getattr(self.kvcore, name)(*args, **options)
            self._hits[request.request_id] = found
            return found

        calls = same, getattr(self.own, name), theirs
        return self.compare_call(name, request.request_id, *calls, request, *args, **options)

    def _allocate_behind(
        self, request: Any, num_new: int, num_hit: int, blocks: Any, *args: Any, **options: Any
    ) -> Any:
        """Allocate slots in kvcore, which has its own blocks of the hit."""
        found = self._hits.pop(request.request_id, None) if blocks else None
        hit = found and found[0]
        if found and found[1] > num_hit:
            hit = self.kvcore.truncate_computed_blocks(hit, num_hit)
        return self.kvcore.allocate_slots(request, num_new, num_hit, hit, *args, **options)

    def _same_blocks(self, mine: Any, theirs: Any) -> bool:
        """Return whether both are None or have equally many blocks in each group."""
        if mine is None or theirs is None:
            return mine is theirs
        tally = self.tally
        for blocks, ids in zip(mine.blocks, read_ids(theirs), strict=True):
            if tally.same_ids:
                tally.same_ids = [*map(BLOCK_ID, blocks)] == [*ids]
            if len(blocks) != len(ids):
                return False
        return True

    def _note_places(self, mine: list[Any], theirs: list[Any]) -> bool:
        ids = ([each.block_id for each in blocks] for blocks in (mine, theirs))
        self.place |= dict(zip(*ids, strict=False))
        return len(mine) == len(theirs)


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
