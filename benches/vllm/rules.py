# SPDX-License-Identifier: Apache-2.0
"""Explain why two sides differ, by their managers' calls and the keys that kvcore withdrew.

A rule is a decision of kvcore that docs/from_vllm.md lists. Under it a block loses a key that it
keeps in vLLM, so it cannot be found any more, and is reused earlier once it is free. A difference
is explained only if the first call that differs shows this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import attrs

RULES = {
    "unwritten": "its request gave way in the step that schedules it, so no step writes the block",
    "unsure": "its request is over before the step that loads the block, which may still fail",
    "failed": "a load failed behind it, and the step that computes it again is not over",
    "other part": "another block begins with the same tokens; vLLM gives such a part no key",
    "given up": "vLLM refuses a call for copies that only keep what is cached; kvcore drops these",
}
"""Rule name -> why a block lost its key, or a request got blocks on one side only."""

FREES = ("free", "pop_blocks_for_free")
LOOK_UPS = ("get_computed_blocks", "get_computed_blocks_for_connector")

Call = tuple[str, str, list[int] | None]
"""A call, its request, and the blocks that it found or that the request then holds."""


@attrs.define
class Watch:
    """Records the calls of a manager, and the keys that they withdraw.

    has_key: tells whether a block has a key. state_groups: numbers of the groups with recurrent
    states. ends: requests whose last step ends at a whole block. starts: request -> position at
    which its last allocation began to compute. lost: block without a key -> the rule, as of the
    first call after it, counted from the start of the step. taken: blocks that a request took in
    this step and that have lost no key since: they have other content from the next step on.
    given_up: requests for which copies were given up in this step.
    """

    manager: Any
    block_size: int
    has_key: Callable[[int], bool]
    state_groups: tuple[int, ...] = ()
    calls: list[Call] = attrs.field(factory=list)
    ends: set[str] = attrs.field(factory=set)
    starts: dict[str, int] = attrs.field(factory=dict)
    lost: dict[int, str] = attrs.field(factory=dict)
    taken: set[int] = attrs.field(factory=set)
    scheduled: set[str] = attrs.field(factory=set)
    given_up: set[str] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        for name in LOOK_UPS:
            self._replace(name, self._look_up)
        for name in FREES:
            self._replace(name, self._free)
        self._replace("allocate_slots", self._allocate)
        self._replace("take_new_block_ids", self._end_schedule)

    def begin(self) -> None:
        """Begin a step: forget lost keys of blocks that have a key again or other content."""
        self.calls.clear()
        self.scheduled.clear()
        self.given_up.clear()
        kept = self.lost.keys() - self.taken - self.keyed(self.lost)
        self.lost = {block: self.lost[block] for block in kept}
        self.taken.clear()

    def watch_tokens(self, compat: Any) -> None:
        """Also record tokens that a shadow schedules by `append`, besides the manager's calls."""
        append, append_within_blocks = compat.append, compat.append_within_blocks

        def recorded(requests: Iterator[Any]) -> Any:
            given: list[Any] = []

            def noted() -> Iterator[Any]:
                for each in requests:
                    given.append(each)
                    yield each

            rest = append_within_blocks(noted())
            for request in given if rest is None else given[:-1]:
                self._allocate("allocate_slots", lambda _: compat.empty_kv_cache_blocks, request)
            return rest

        compat.append = lambda request: self._allocate("allocate_slots", append, request)
        compat.append_within_blocks = recorded

    def keyed(self, blocks: Iterable[int]) -> set[int]:
        """Return those of the blocks that have a key."""
        return {block for block in blocks if self.has_key(block)}

    def _replace(self, name: str, around: Callable[..., Any]) -> None:
        call = getattr(self.manager, name)
        setattr(self.manager, name, lambda *args, **options: around(name, call, *args, **options))

    def _look_up(self, name: str, call: Any, request: Any, *args: Any, **options: Any) -> Any:
        found = call(request, *args, **options)
        self.calls.append((name, request.request_id, flat(found[0])))
        return found

    def _allocate(self, name: str, call: Any, request: Any, *args: Any, **options: Any) -> Any:
        request_id, counted = request.request_id, request.num_computed_tokens
        before = flat(self.manager.get_blocks(request_id)) or []
        parts = getattr(self.manager, "parts", None)
        num_given_up = parts.num_given_up if parts else 0
        grown = call(request, *args, **options)
        if parts and parts.num_given_up > num_given_up:
            self.given_up.add(request_id)
        table = flat(self.manager.get_blocks(request_id)) or []
        if counted < self.starts.get(request_id, 0):
            # A block that is computed again has no key until the step ends. Other tables are not
            # read: a query of keys makes the core process what waits for the end of the step.
            self.lost |= dict.fromkeys({*table} - self.keyed(table), "failed")
        else:
            self.taken |= {*table} - {*before}
        self.calls.append((name, request_id, None if grown is None else table))
        if grown is not None:
            self.scheduled.add(request_id)
            num_external = options.get("num_external_computed_tokens", 0)
            num_hit = args[1] if len(args) > 1 else options.get("num_new_computed_tokens", 0)
            counted += num_hit + num_external
            self.starts[request_id] = counted
            whole = (counted + (args[0] if args else 1)) % self.block_size == 0
            (self.ends.add if whole else self.ends.discard)(request_id)
        return grown

    def _free(self, name: str, call: Any, request: Any) -> Any:
        request_id, counted = request.request_id, request.num_computed_tokens
        before = self._keyed_of(request_id)
        rule = "unwritten" if request_id in self.scheduled else "unsure"
        again: set[int] = set()
        if counted < self.starts.pop(request_id, 0):
            # One group: vLLM lowers a count to a block's start in no other cache.
            again = set(self.manager.get_block_ids(request_id)[0][counted // self.block_size :])
        if request_id in self.scheduled & self.ends:  # vLLM has given the states their keys
            tables = self.manager.get_block_ids(request_id)
            before |= {tables[number][-1] for number in self.state_groups}
        answer = call(request)
        for block in before - self.keyed(before):
            self.lost[block] = "failed" if block in again else rule
            self.taken.discard(block)  # it still holds the content whose key it lost
        self.calls.append((name, request_id, None))
        return answer

    def _end_schedule(self, name: str, call: Any) -> Any:
        del name
        self.scheduled.clear()
        return call()

    def _keyed_of(self, request_id: str) -> set[int]:
        return self.keyed(flat(self.manager.get_blocks(request_id)) or ())


def flat(blocks: Any) -> list[int] | None:
    """Return the block ids of a result, without the null block."""
    if blocks is None:
        return None
    return [block for ids in blocks.get_block_ids() for block in ids if block]


def explain(vllm: Watch, kvcore: Watch, *, has_parts: bool = False) -> str:
    """Return the rule that explains the first call whose results differ, or an empty string."""
    for own, ours in zip(vllm.calls, kvcore.calls, strict=False):
        if own == ours:
            continue
        if has_parts and own[:2] == ours[:2]:
            if own[2] is None and own[1] in kvcore.given_up:
                return "given up"
            if own[0] in LOOK_UPS and len(own[2] or ()) == len(ours[2] or ()):
                return "other part"
        if own[:2] != ours[:2] or own[2] is None or ours[2] is None:
            return ""
        return rule_of(kvcore.lost, own[2], ours[2], is_look_up=own[0] in LOOK_UPS)
    return ""


def rule_of(lost: dict[int, str], own: list[int], ours: list[int], *, is_look_up: bool) -> str:
    """Return the rule that explains the first block that differs in two results, or ""."""
    # vLLM found a block that lost its key here, or kvcore reused a block without a key.
    pairs = zip_longest(*((own, ours) if is_look_up else (ours, own)))
    return next((lost.get(block, "") for block, other in pairs if block != other), "")


def unexplained_keys(vllm: Watch, kvcore: Watch, num_blocks: int) -> set[int]:
    """Return the blocks that have a key on one side only, without a rule that explains it."""
    every = range(1, num_blocks)
    return (vllm.keyed(every) ^ kvcore.keyed(every)) - kvcore.lost.keys()
