# SPDX-License-Identifier: Apache-2.0
"""The requests that the core knows, kept in step with the engine's objects.

A request is added when it is first seen; afterwards only new tokens and hashes are passed on. A
finished request is removed when it is freed. A request that holds no blocks for another reason
(preempted, never admitted) rests: its tokens and keys stay, so that it comes back without hashing,
until MAX_RESTING others rest after it; then it is added anew when it is seen again. If the id of a
resting request comes with another object, it is another request. Drafts are settled when their
request is seen after its batch: those that the engine's new tokens repeat are accepted, the others
dropped. What was scheduled before its token is known stays until the engine has the token or counts
less.
"""

from __future__ import annotations

from kvcore.compat.engine_request import (
    EngineRequest,
    cached_request,
    is_finished,
    read_drafts,
    read_hashes,
    read_tokens,
    uncached_request,
)
from kvcore.compat.errors import TokensChanged
from kvcore.compat.registered_request import RegisteredRequest
from kvcore.compat.steps import Steps
from kvcore.manager import KVCacheManager as Core
from kvcore.types.engine_counts import RequestCounts

MAX_RESTING = 1024


class RequestRegistry:
    """Adds, extends and forgets requests of the core.

    own_hashes, keep_tokens: as of the manager.
    """

    def __init__(self, core: Core, steps: Steps, *, own_hashes: bool, keep_tokens: bool) -> None:
        self._core = core
        self._steps = steps
        self._own_hashes = own_hashes
        self._keep_tokens = keep_tokens
        largest = max(group.block_size for group in core.config.groups)
        self._num_slots = core.config.num_usable_blocks * largest
        self.known: dict[str, RegisteredRequest] = {}
        self._resting: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the core knows a request with this id."""
        return name in self.known

    def bring(
        self, request: EngineRequest, seen: RequestCounts, end: int | None = None
    ) -> RegisteredRequest:
        """Synchronise a request with its object: tokens, hashes, and drafts of a finished batch.

        end: tokens of a known request are read up to here, since the engine may replace uncomputed
        ones. Raises what `add_request`, `add_tokens` and `add_block_hashes` raise, and
        TokensChanged.
        """
        name = seen.name
        known = self.known.get(name)
        if known is not None and name in self._resting and known.is_another(request):
            self._forget(name)
            known = None
        if known is None:
            return self._add(request, seen)
        known.request = request
        known.look_at()
        if name in self._resting:
            self._resting[name] = self._resting.pop(name)
        if name in self._steps:
            return known
        end = seen.num_tokens if end is None else min(end, seen.num_tokens)
        return self._extend(known, seen, end)

    def decoding(self, request: EngineRequest) -> RegisteredRequest | None:
        """Return the request if it is known by this object, holds blocks and has no drafts."""
        known = self.known.get(getattr(request, "request_id", ""))
        return known if known and known.request is request and known.num_computed else None

    def hold(self, known: RegisteredRequest, seen: RequestCounts, counted: int, end: int) -> None:
        """Note that a request holds blocks, and that it is scheduled up to end."""
        self._resting.pop(seen.name, None)
        known.counted, known.end = counted, max(known.end, end)

    def note_counts(self, known: RegisteredRequest, name: str) -> None:
        """Note the core's count of a request that holds blocks, if it can continue by `append`."""
        if known.drafts or name in self._resting:
            return
        tokens, size = self._core.num_tokens(name), self._core.config.hash_block_size
        if known.num_hashes is None or known.num_hashes == tokens // size:
            known.num_computed = self._core.num_computed_tokens(name)
            known.num_ahead = known.num_computed - tokens

    def put_drafts(self, known: RegisteredRequest, seen: RequestCounts, count: int) -> int:
        """Set a request's drafts to this many; return how many tokens are to come instead.

        Drafts are tokens whose ids the engine knows, if no other token is to come. The number is at
        most one more than the pool has slots.
        """
        count = max(0, min(count, self._num_slots + 1))
        if not count and not known.drafts:
            return 0
        ahead = not known.drafts and self._core.num_output_placeholders(seen.name)
        drafts = [] if ahead else read_drafts(known.request, count)
        if drafts or known.drafts:
            self._core.add_drafts(seen.name, drafts)
            known.drafts = drafts
        return count - len(drafts)

    def leave(self, known: RegisteredRequest, request: EngineRequest, name: str) -> None:
        """Keep a request that gave back its blocks, or forget it if it is finished."""
        if is_finished(request):
            self._forget(name)
            return
        known.request, known.num_computed, known.decodes = request, 0, False
        known.counted = known.end = 0
        if known.drafts:
            known.drafts = []
        self._rest(name)

    def _add(self, request: EngineRequest, seen: RequestCounts) -> RegisteredRequest:
        config = self._core.config
        last_token = read_tokens(request, max(0, seen.num_tokens - 1), seen.num_tokens)
        if config.enable_caching:
            made, num_tokens = cached_request(
                request,
                seen,
                config.hash_block_size,
                own_hashes=self._own_hashes,
                keep_tokens=self._keep_tokens,
                has_events=config.enable_events,
            )
        else:
            made, num_tokens = uncached_request(
                request, seen, own_hashes=self._own_hashes, keep_tokens=self._keep_tokens
            )
        if num_tokens < seen.num_tokens:  # the prompt given as embeddings
            last_token = read_tokens(request, max(0, num_tokens - 1), num_tokens)
        row = self._core.add_request(made)
        own = made.block_hashes if config.enable_caching else None
        num_hashes = None if own is None else len(own)
        is_read = self._keep_tokens or config.enable_events or own is None
        known = RegisteredRequest(request, row, int(last_token[0]), is_read, num_hashes)
        known.last_hash = own[-1] if own else b""
        self.known[seen.name] = known
        self._rest(seen.name)
        if num_tokens < seen.num_tokens:
            self._extend(known, seen, seen.num_tokens)
        return known

    def _extend(self, known: RegisteredRequest, seen: RequestCounts, end: int) -> RegisteredRequest:
        """Add the tokens up to `end` that are new since the request was last seen.

        Settles scheduled drafts, and drops positions to come that the engine no longer counts.
        """
        core, name = self._core, seen.name
        num_known = core.num_tokens(name)
        if seen.num_tokens < num_known:
            return self._replace(known, seen, num_known)
        if known.drafts:
            end = max(end, min(seen.num_tokens, seen.num_computed))
        end = max(num_known, end)
        last_and_new = read_tokens(known.request, num_known - 1, end)
        if known.last_token is not None and int(last_and_new[0]) != known.last_token:
            return self._replace(known, seen, num_known)
        new = last_and_new[1:]
        if known.drafts:
            accepted = self._settle(known, seen, new, num_known)
            known.last_token = int(last_and_new[accepted])
            new = new[accepted:]
        if len(new):
            rejected = max(0, core.num_computed_tokens(name) - seen.num_computed)
            core.add_tokens(name, new, num_rejected=rejected)
            known.last_token = int(new[-1])
        self._add_hashes(known, end)
        return known

    def _replace(
        self, known: RegisteredRequest, seen: RequestCounts, num_known: int
    ) -> RegisteredRequest:
        """Add a request again whose tokens changed. Raises TokensChanged while it holds blocks."""
        if seen.name not in self._resting:
            raise TokensChanged(request=seen.name, num_known=num_known)
        self._forget(seen.name)
        return self._add(known.request, seen)

    def _settle(
        self, known: RegisteredRequest, seen: RequestCounts, new: list[int], num_known: int
    ) -> int:
        """Accept the scheduled drafts that the new tokens repeat; return their number."""
        most = min(len(new), len(known.drafts), max(0, seen.num_computed - num_known))
        accepted = 0
        while accepted < most and int(new[accepted]) == known.drafts[accepted]:
            accepted += 1
        self._core.accept(seen.name, accepted)
        known.drafts = []
        return accepted

    def _add_hashes(self, known: RegisteredRequest, num_tokens: int) -> None:
        hashes = read_hashes(known.request)
        if known.num_hashes is None or hashes is None:
            return
        num_full = num_tokens // self._core.config.hash_block_size
        new = list(hashes[known.num_hashes : num_full])
        if new:
            self._core.add_block_hashes(known.request.request_id, new)
            known.num_hashes += len(new)
            known.last_hash = new[-1]

    def _rest(self, name: str) -> None:
        resting = self._resting
        resting.pop(name, None)
        resting[name] = None
        if len(resting) > MAX_RESTING:
            self._forget(next(iter(resting)))

    def _forget(self, name: str) -> None:
        self._core.remove_request(name)
        del self.known[name]
        if name in self._resting:
            del self._resting[name]
