# SPDX-License-Identifier: Apache-2.0
"""The engine's steps: decides when the open batch of the core is over, and keeps its commands.

A batch ends when the engine starts a step, when a runtime takes the commands, or when a request of
the batch shows that the step was scheduled: its computed count has passed its start in the batch,
or it has more tokens. A request that is freed before that leaves the batch, so that nothing it
published stays findable. Each call looks at one such request besides its own, so the cost of a call
does not grow with the batch.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

from kvcore.compat.engine_request import EngineRequest, read_tokens, see
from kvcore.compat.errors import CommandsNotKept, NoSlotLeft, UnreadCommands
from kvcore.compat.registered_request import RegisteredRequest
from kvcore.manager import KVCacheManager as Core
from kvcore.types.commands import Batch
from kvcore.types.engine_counts import RequestCounts

MAX_UNREAD_BATCHES = 64

Scheduled: TypeAlias = tuple[EngineRequest, int, int, int]
"""A request of the open batch; its tokens and its count when it was scheduled first; and where the
batch's computation begins, behind hits and external tokens.
"""


class Steps:
    """Closes the core's batches.

    keep_commands: whether closed batches are kept for `take`, at most MAX_UNREAD_BATCHES.
    are_reported: whether the engine reports the end of each step, so that it need not be found by
    counts. first: the request that the open batch scheduled first, if any. mark: stands for the
    open batch. waiting: requests of the batch that each get a slot in a block of their own, not yet
    passed to the core, with their new tokens (all or none). hashes: own hashes of the blocks that
    these fill. noted_later: requests of the batch whose token the core already has, to be noted the
    same way.
    """

    def __init__(self, core: Core, *, keep_commands: bool, are_reported: bool) -> None:
        self._core = core
        self.are_reported = are_reported
        self._keeps = keep_commands
        self._unread: list[Batch] = []
        self._scheduled: dict[str, Scheduled] = {}
        self.first: Scheduled | None = None
        self.mark = object()
        self.waiting: list[RegisteredRequest] = []
        self.noted_later: list[RegisteredRequest] = []
        self.tokens = array("I")
        self.hashes: dict[RegisteredRequest, bytes] = {}
        self._late: dict[str, int] = {}
        self._changed = False

    def __contains__(self, name: str) -> bool:
        """Whether the open batch schedules this request."""
        return name in self._scheduled

    @property
    def is_over(self) -> bool:
        """Whether the first request of the open batch shows that it is over."""
        if self.first is None:
            return False
        request, before, _, start = self.first
        return bool(request.num_computed_tokens > start or request.num_tokens > before)

    def change(self) -> None:
        """Note that the open batch may have commands."""
        self._changed = True

    def schedule(self, name: str, scheduled: Scheduled) -> None:
        """Note that the open batch computes this request's tokens from its start on."""
        self._changed = True
        if name not in self._scheduled:
            self._scheduled[name] = scheduled
            if self.first is None:
                self.first = scheduled

    def begin(self, scheduled: Scheduled) -> None:
        """Note the request that the open batch schedules first, waiting or passed on."""
        self.first, self._changed = scheduled, True

    def has_key(self, block_id: int) -> bool:
        """Return whether a block is findable, after all calls so far."""
        self.settle()
        return self._core.has_key(block_id)

    def settle(self) -> None:
        """Pass the waiting requests, whose slots were promised, to the core."""
        noted_later, self.noted_later = self.noted_later, []
        self._note(noted_later)
        self._note(self._hand_over())

    def _note(self, decoded: list[RegisteredRequest]) -> None:
        for known in decoded:
            start, request = known.num_computed - 1, known.request
            num_tokens = known.num_computed - known.num_ahead
            self._scheduled[request.request_id] = (request, num_tokens, start, start)

    def _hand_over(self) -> list[RegisteredRequest]:
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return waiting
        tokens, self.tokens = self.tokens, array("I")
        hashes, self.hashes = self.hashes, {}
        rows = array("I", [known.row for known in waiting])
        done = self._core.append(rows, tokens or None)
        if done.refused is not None:
            for known in waiting[done.done :]:
                count = self._core.num_tokens(known.request.request_id)
                known.last_token = int(read_tokens(known.request, count - 1, count)[0])
                known.look_at()
                hashes.pop(known, None)
        for known, block_hash in hashes.items():
            self.publish(known, block_hash)
        if done.refused is not None:
            raise NoSlotLeft(request=waiting[done.done].request.request_id)
        return waiting

    def publish(self, known: RegisteredRequest, block_hash: bytes) -> None:
        """Pass a request's own hash of its next full block to the core; the block becomes
        findable.
        """
        name, num_hashes = known.request.request_id, (known.num_hashes or 0) + 1
        self._core.add_block_hashes(name, [block_hash])
        self._core.cache_blocks(name, num_hashes * self._core.config.hash_block_size)
        known.num_hashes, known.last_hash = num_hashes, block_hash

    def count_before(self, name: str) -> int:
        """Return the engine's count of a request of the open batch when it was first scheduled."""
        return self._scheduled[name][2]

    def publish_later(self, name: str, num_tokens: int) -> None:
        """Publish a request's blocks up to a number of tokens when the open batch is closed."""
        self._late[name] = num_tokens

    def leave(self, name: str) -> None:
        """Forget the notes about a request that gave back its blocks."""
        self._changed = True
        if self._scheduled.pop(name, None) is not None:
            self.first = next(iter(self._scheduled.values()), None)
            self._late.pop(name, None)

    def notice(self, seen: RequestCounts) -> bool:
        """Close the open batch if this request, or the batch's first, shows that it is over.

        Returns whether the open batch schedules the request.
        """
        if self.waiting or self.noted_later:
            self.settle()
        if self.first is None:
            return False
        own = self._scheduled.get(seen.name)
        if self.are_reported:
            return own is not None
        over = own is not None and (seen.num_computed > own[3] or seen.num_tokens > own[1])
        over = over or self.is_over
        if over:
            self.close()
        return own is not None and not over

    def notice_known(self, name: str) -> None:
        """Do the same for a request given by its id."""
        self.settle()
        own = self._scheduled.get(name)
        if own is not None:
            self.notice(see(own[0]))

    def close(self) -> None:
        """Close the open batch if it is not empty. Raises UnreadCommands."""
        if not self._changed:
            return
        if self._keeps and len(self._unread) >= MAX_UNREAD_BATCHES:
            raise UnreadCommands(num_batches=len(self._unread))
        self._hand_over()
        batch = self._core.take_batch()
        self.mark = object()
        self._changed = False
        if self._keeps:
            self._unread.append(batch)
        late, self._late = self._late, {}
        self._scheduled.clear()
        self.noted_later.clear()
        self.first = None
        for name, num_tokens in late.items():
            self._core.cache_blocks(name, num_tokens)

    def take(self) -> list[Batch]:
        """Close the open batch and return all batches not returned yet. Raises CommandsNotKept."""
        if not self._keeps:
            raise CommandsNotKept
        read, self._unread = self._unread, []
        self.close()
        read += self._unread
        self._unread = []
        return read
