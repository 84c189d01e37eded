# SPDX-License-Identifier: Apache-2.0
"""A manager with another configuration that makes recorded calls.

Until the runs differ, it makes the call as recorded, with the hits of its own look-ups. Afterwards
it aims for the result of the recorded call: an allocation goes as far, blocks are found by their
keys, and calls without purpose here are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from msgspec import Struct

from kvcore.manager import KVCacheManager
from kvcore.replay.records.filled import HASHED, NONE, Filled, give_hashes, with_larger_blocks
from kvcore.types.commands import Batch, Evict
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Appended, Hit, Refused, Status

BY_BLOCKS = {"pin", "unpin", "store", "evict_blocks"}
STEPS = ("allocate_slots", "load", "append", "swap_in")
"""Calls that schedule slots, or wait for blocks before some can be scheduled."""
ADDS = ("add_request", "fork")
FORGETS = {"cancel", "rewind", "truncate"}
"""Calls that may stop requests which they do not name."""
AVOIDED = object()
"""Marks a recorded free or swap that made space: its request was allocated again later."""
UNMADE = KvcoreError()
"""Marks misuse by content that a record by keys does not have, so that it is not made again."""


@attrs.define
class Tally:
    """A run's counts. computed_tokens: slots that batches wrote, including those computed twice."""

    hit_tokens: int = 0
    computed_tokens: int = 0
    evictions: int = 0
    in_place: int = 0
    covered: int = 0
    delayed: int = 0
    preempted: int = 0
    avoided: int = 0
    dropped: int = 0


class Made(Struct, frozen=True, gc=False):
    """A recorded call of one request, or of none.

    target: computed tokens of the request after the recorded call. value: its value or error. keys:
    those of the blocks that it names. filled: in a record by keys, the hashes that come with it, by
    request.
    """

    number: int
    name: str
    arguments: dict[str, Any]
    target: int = 0
    value: Any = None
    keys: tuple[bytes | None, ...] = ()
    filled: Mapping[str, Filled] = NONE


class Counterpart:
    """One manager with its own configuration, and its figures."""

    first_batch = 0
    """The recorded number of the batch that has number 0 here."""
    scale = 1
    """In a record by keys: its tokens per hash, divided by those of the record."""

    def __init__(self, manager: KVCacheManager, running: Iterable[str], *, same: bool) -> None:
        """running: requests that hold blocks, oldest first. same: block ids equal those of the
        record.
        """
        self.manager, self.same = manager, same
        self.tally = Tally()
        self.hits: dict[str, Hit] = {}
        self.running: dict[str, list[int]] = {each: [] for each in running}
        """Requests that hold blocks, youngest last, with the lengths of their allocations since
        then.
        """
        self.is_idle = True
        """Whether the open batch schedules nothing."""
        self.unborn: set[str] = set()
        """Children whose fork is still pending."""
        self.has_same_rows = True
        """Whether all requests that were added have the rows of the record."""
        self.blocks: dict[int, int] = {}
        """Pinned blocks, and operations below: recorded id -> id here."""
        self.operations: dict[int, int] = {}

    def make(self, call: Made) -> Any:
        """Make a call as it was recorded; returns its value or error."""
        name = call.name
        if call.value is UNMADE:
            return UNMADE
        if name in BY_BLOCKS and not self.same:
            return call.value if is_wrong(call.value) else self._by_blocks(call)
        value = self.run(name, call.arguments, call.target, call.filled)
        if name in ("store", "load") and isinstance(call.value, tuple) and isinstance(value, tuple):
            self.operations |= zip(call.value, value, strict=False)
        return value

    def run(
        self,
        name: str,
        arguments: dict[str, Any],
        target: int = 0,
        filled: Mapping[str, Filled] = NONE,
    ) -> Any:
        """Make a call with the hit that was found here; returns its value or error."""
        if "hit" in arguments:
            arguments = self._with_hit(arguments)
        try:
            if self.first_batch or filled or self.scale > 1:
                value = self.call(name, arguments, filled)
            else:
                value = getattr(self.manager, name)(**arguments)
        except KvcoreError as error:
            return error
        self.note(name, arguments, value, target)
        if name in FORGETS:
            self.forget_idle()
        return value

    def call(self, name: str, arguments: dict[str, Any], filled: Mapping[str, Filled]) -> Any:
        """Make a call with the hashes that come with it; return its value. Raises what it
        raises.
        """
        if self.first_batch and arguments.get("batch") is not None:
            arguments = arguments | {"batch": arguments["batch"] - self.first_batch}
        if filled and name not in HASHED:
            give_hashes(self.manager, filled)
        if self.scale > 1 and name in HASHED:
            arguments = with_larger_blocks(name, arguments, filled, self.scale)
        return getattr(self.manager, name)(**arguments)

    def _with_hit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, with the hit of its request's last look-up here."""
        hit = arguments.get("hit")
        if hit is None or (self.same and isinstance(hit, Hit)):
            return arguments
        return arguments | {"hit": self.hits.get(arguments["request_id"])}

    def perform(self, call: Made) -> Any:
        """Make a call by the rules for runs that differ; return its value or error."""
        try:
            return self._try(call)
        except KvcoreError as error:
            return error

    def _try(self, call: Made) -> Any:
        """Do what `perform` does, but let errors pass."""
        name, arguments, manager = call.name, call.arguments, self.manager
        if name in ("allocate_slots", "load"):
            return self._allocate(call)
        if name in BY_BLOCKS:
            return self._by_blocks(call)
        if name in ("free", "swap_out") and call.value is AVOIDED:
            self.tally.avoided += 1
            return None
        if name == "swap_in" and manager.status(request_of(call)) is not Status.SWAPPED:
            self.tally.covered += 1
            return None
        if name == "complete_operation":
            if arguments["operation"] not in self.operations:
                self.tally.covered += 1
                return None
            arguments = arguments | {"operation": self.operations.pop(arguments["operation"])}
        if name in ("add_tokens", "append"):
            arguments = {name: value for name, value in arguments.items() if name != "batch"}
        value = self.call(name, arguments, call.filled)
        self.note(name, arguments, value, call.target)
        if name == "append":
            return value.refused
        if name in ADDS and value != call.value:
            self.has_same_rows = False
        if name in FORGETS:
            self.forget_idle()
        return value

    def _allocate(self, call: Made) -> Any:
        """Allocate up to the length of the recorded call, after a look-up of its own."""
        options, manager = dict(call.arguments), self.manager
        request_id = options.pop("request_id")
        is_new = manager.status(request_id) is Status.WAITING
        recorded = options.pop("hit", None)
        hit = manager.get_computed_blocks(request_id) if is_new and recorded is not None else None
        hit = hit if hit is not None and hit.num_tokens else None
        start = manager.num_computed_tokens(request_id) + (hit.num_tokens if hit else 0)
        if call.name == "load":
            new = min(call.target - start, options.pop("num_tokens"))
            covered = new <= 0
        else:
            external = options.pop("num_external_computed_tokens", 0)
            filled = call.target - options.pop("num_new_tokens")
            external = max(0, min(external, filled - start))
            new = max(0, call.target - start - external)
            to_come = min(new, options.pop("num_output_placeholders", 0))
            options |= {"num_external_computed_tokens": external}
            options |= {"num_output_placeholders": to_come}
            covered = not (new or external or hit)
        if covered:
            self.tally.covered += 1
            return None
        value = getattr(manager, call.name)(request_id, new, hit, **options)
        if not isinstance(value, Refused):
            made = {"request_id": request_id, "num_new_tokens": new, "hit": hit}
            self.note(call.name, made, value, call.target)
            self.running[request_id].append(call.target)
            if call.name == "load":
                self.operations |= zip(call.value, value, strict=False)
        return value

    def _by_blocks(self, call: Made) -> Any:
        """Make a call that names blocks, using the blocks with their keys here."""
        blocks, find = call.arguments["block_ids"], self.manager.get_cached_block
        if call.name == "unpin":
            here = [self.blocks.pop(block, None) for block in blocks]
        else:
            here = [None if key is None else find(key) for key in call.keys]
        found = [block for block in here if block is not None]
        self.tally.dropped += len(found) < len(here)
        value = getattr(self.manager, call.name)(found) if found else ()
        pairs = [(there, block) for there, block in zip(blocks, here, strict=True) if block]
        if call.name == "pin":
            self.blocks |= pairs
        if call.name == "store":
            kept = [op for op, block in zip(call.value, here, strict=True) if block is not None]
            self.operations |= zip(kept, value, strict=True)
        return value

    def note(self, name: str, arguments: dict[str, Any], value: Any, target: int) -> None:
        """Record the effects of a call: the running requests, and the figures."""
        if isinstance(value, Refused):
            return
        if name == "append":
            self.note_append(value)
        elif name == "take_batch":
            self.note_batch(value)
        elif name == "get_computed_blocks":
            self.hits[arguments["request_id"]] = value
        elif name in ("allocate_slots", "load"):
            tally, request_id, self.is_idle = self.tally, arguments["request_id"], False
            hit = arguments.get("hit")
            tally.hit_tokens += 0 if hit is None else hit.num_tokens
            tally.computed_tokens += arguments.get("num_new_tokens", 0) * (name != "load")
            self.running.setdefault(request_id, [])
        elif name == "fork":
            self.running[arguments["child_id"]] = [target]
            self.unborn.discard(arguments["child_id"])
        elif name in ("free", "remove_request"):
            self.running.pop(arguments["request_id"], None)
        elif name in ("swap_out", "swap_in"):
            self.is_idle &= name == "swap_out"
            for each in arguments["request_ids"]:
                self.running.pop(each, None)
                if name == "swap_in":
                    self.running[each] = []

    def note_append(self, value: Appended) -> None:
        """Record the effects of an append."""
        self.tally.computed_tokens += value.done
        self.is_idle &= not value.done

    def note_batch(self, batch: Batch) -> None:
        """Record what a batch evicts."""
        if batch.keys:  # each eviction has one
            self.tally.evictions += batch.column("kind").tobytes()[::4].count(Evict.kind)

    def forget_idle(self) -> None:
        """Remove requests that hold no more blocks from the running ones."""
        for request_id in list(self.running):
            if self.manager.status(request_id) is not Status.RUNNING:
                self.running.pop(request_id, None)


def request_of(call: Made) -> str:
    """Return the request of a call; an empty id if there is none, or several."""
    arguments = call.arguments
    if call.name == "add_request":
        return str(arguments["request"].request_id)
    several = arguments.get("request_ids", arguments.get("requests", ()))
    one = several[0] if len(several) == 1 else ""
    return str(arguments.get("request_id") or arguments.get("parent_id") or one)


def is_wrong(value: Any) -> bool:
    """Return whether a call was misuse."""
    return isinstance(value, KvcoreError)
