# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: hit lengths of vLLM's own manager and of kvcore in vLLM's tests of hits.

Loaded with `-p vllm_hits`, as vllm_plugin.py is. vLLM's manager decides, and kvcore gets the same
calls behind it (shadow.py). Each look-up of a test is compared, and after the test one more for
each of its requests. A run fails if lengths differ without one of RULES, or if the tests do not
come out as in COUNTS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attrs
import pytest
import vllm_plugin  # type: ignore[import-not-found] # sets the environment; is on the path
from kvcore_vllm.pinned import NotServed
from kvcore_vllm.shadow import EACH_STEP, Shadow
from kvcore_vllm.short_ways import KVCacheManager
from vllm.v1.core import kv_cache_manager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_outcomes import (  # type: ignore[import-not-found] # the same
    HIT_COUNTS,
    NOT_SERVED,
    judge,
)

Own = kv_cache_manager.KVCacheManager
default_vllm_config = vllm_plugin.default_vllm_config
STATES_INSIDE = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}


@attrs.define
class Seen:
    """What a test shows. rules: those that apply. lengths: of each look-up, vLLM's and kvcore's.
    error: the first difference other than a length. is_whole: whether it ran as it is.
    """

    managers: list[Compared] = attrs.field(factory=list)
    rules: set[str] = attrs.field(factory=set)
    lengths: list[tuple[int, int]] = attrs.field(factory=list)
    error: str | None = None
    is_whole: bool = True


class Compared(Shadow):
    """vLLM's manager with kvcore's behind it, which makes each call at once: tests do not keep to
    the scheduler's order.

    Both are made without what kvcore refuses and hits do not need: states inside a chunk, and for
    kvcore room for speculative tokens.
    """

    now = Seen()
    pair: tuple[Any, KVCacheManager]

    def __new__(cls, kv_cache_config: Any, *args: Any, **options: Any) -> Any:
        """Make both, or only vLLM's manager if kvcore does not serve the model."""
        less = without(kv_cache_config, STATES_INSIDE)
        cls.now.is_whole &= less == kv_cache_config
        own, served = Own(less, *args, **options), without(less, {"num_speculative_blocks": 0})
        try:
            kvcore = KVCacheManager(served, *args, **options)
        except NotServed as refused:
            if "CircularBufferSpec" in str(refused):
                cls.now.rules.add(NOT_SERVED)
            else:
                cls.now.error = str(refused)
            return own
        self = super().__new__(cls)
        self.pair = own, kvcore
        return self

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        own, _ = self.pair
        super().__init__(*self.pair)
        self._timed = self._untimed = {name: self._timed[name] for name in EACH_STEP}
        self.requests: dict[str, Any] = {}
        self.now.managers.append(self)
        pool, take, allocate = own.block_pool, own.block_pool.get_new_blocks, own.allocate_slots
        self._calls = 0

        def allocate_slots(request: Any, *args: Any, **options: Any) -> Any:
            self.requests[request.request_id] = request
            self._calls += 1
            try:
                return allocate(request, *args, **options)
            finally:
                self._calls -= 1

        def get_new_blocks(count: int) -> Any:
            if not self._calls:
                self.now.rules.add("pool")
            return take(count)

        own.allocate_slots, pool.get_new_blocks = allocate_slots, get_new_blocks

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Allocate slots in both; kvcore computes what it has not found."""
        hit = num_new_computed_tokens, new_computed_blocks
        own, kvcore = self.own.coordinator, self.kvcore.coordinator
        kvcore.retention_interval = own.retention_interval  # tests set it
        calls = self._same_blocks, self.own.allocate_slots

        def theirs(request: Any, num_new_tokens: int, *_: Any, **__: Any) -> Any:
            found, num_found, *_ = self._hits.pop(request.request_id, (None, 0))
            if found is not None and num_found > num_new_computed_tokens:
                found = self.kvcore.truncate_computed_blocks(found, num_new_computed_tokens)
            num_used = min(num_found, num_new_computed_tokens)
            num_new = num_new_tokens + num_new_computed_tokens - num_used
            used = found if num_used else None
            return self.kvcore.allocate_slots(request, num_new, num_used, used, *args, **options)

        name = "allocate_slots"
        given = request, num_new_tokens, *hit, *args
        return self.compare_call(name, request.request_id, *calls, theirs, *given, **options)

    def _look_up(self, name: str, request: Any, /, *args: Any, **options: Any) -> Any:
        def same(mine: Any, theirs: Any) -> bool:
            if not self.kvcore.waits_for_state(request):  # vLLM says so when it allocates
                self.now.lengths.append((mine[1], theirs[1]))
            return True

        def theirs(*args: Any, **options: Any) -> Any:
            found = getattr(self.kvcore, name)(*args, **options)
            self._hits[request.request_id] = found
            return found

        calls = same, getattr(self.own, name), theirs
        self.requests[request.request_id] = request
        return self.compare_call(name, request.request_id, *calls, request, *args, **options)

    def take_kv_cache_block_copies(self) -> Any:
        """Return vLLM's copies; kvcore has fewer if its hit was shorter."""
        self.kvcore.block_pool.free_blocks(self.kvcore.take_kv_cache_block_copies()[1])
        answer = self.own.take_kv_cache_block_copies()
        self.copied.update(each.block_id for each in answer[1])
        return answer

    def _same_blocks(self, mine: Any, theirs: Any) -> bool:
        """Return whether both fit, or neither."""
        return (mine is None) == (theirs is None)

    def _note_places(self, mine: list[Any], theirs: list[Any]) -> bool:
        super()._note_places(mine, theirs)
        return True

    def end(self) -> None:
        """Look up every request once more, in a step of its own, and note the rules that apply."""
        own, kvcore, now = self.own.coordinator, self.kvcore.coordinator, self.now
        if self.tally.difference is not None:
            now.error = now.error or self.tally.difference
            return
        self.new_step_starts()
        for request in self.requests.values():
            hashes, most = request.block_hashes, request.num_tokens - 1
            mine, theirs = own.find_longest_cache_hit(hashes, most), kvcore.look_up(hashes, most)
            now.lengths.append((mine[1], theirs.num_tokens))
        noted = {
            "again": own.num_reprefillable_tokens,
            "parts": self.kvcore.parts,
            "pieces": own.enable_partial_hash_hits and self.kvcore.parts is None,
        }
        now.rules.update(rule for rule, applies in noted.items() if applies)


def without(kv_cache_config: Any, fields: dict[str, Any]) -> Any:
    """Return a configuration whose state groups have these fields."""
    groups = [
        replace(group, kv_cache_spec=replace(group.kv_cache_spec, **fields))
        if isinstance(group.kv_cache_spec, MambaSpec)
        else group
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups)


class Lengths:
    """Collects what the tests show, and fails a run in which a length differs without a rule."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.num_look_ups = Counter[bool]()
        self.num_less = 0  # tests that ran without states inside a chunk

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Compare the lengths of a test, which may fail if it runs without what it tests."""
        now = Compared.now = Seen()
        try:
            yield
        except Exception as error:
            if now.is_whole:
                now.error = repr(error)
        self.num_less += not now.is_whole
        for manager in now.managers:
            manager.end()  # a test whose end raises has no verdict, which fails the run
        self.num_look_ups.update(mine == theirs for mine, theirs in now.lengths)
        self.found[item.nodeid] = judge(now.rules, now.lengths, now.error)

    def pytest_sessionfinish(self, session: Any) -> None:
        """Set the exit status to 0 if all tests that ran come out as expected, else to 1."""
        is_expected = Counter(self.found.values()) <= Counter(HIT_COUNTS)
        session.exitstatus = int(not is_expected or len(self.found) != session.testscollected)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write how the tests come out, and those that should not."""
        for name, verdict in self.found.items():
            if verdict not in HIT_COUNTS:
                terminalreporter.write_line(f"{verdict}: {name}")
        for verdict, count in Counter(self.found.values()).most_common():
            expected = HIT_COUNTS.get(verdict, 0)
            note = "" if count == expected else f" (expected: {expected})"
            terminalreporter.write_line(f"{count} tests{note}: {verdict}")
        same, all_of_them = self.num_look_ups[True], self.num_look_ups.total()
        terminalreporter.write_line(
            f"{same} of {all_of_them} hits are as long as vLLM's; {self.num_less} tests ran without"
            " states inside a chunk"
        )


def pytest_configure(config: Any) -> None:
    """Put both managers in the place of vLLM's before a test module is imported."""
    kv_cache_manager.KVCacheManager = Compared
    config.pluginmanager.register(Lengths(), "kvcore-lengths")
