# SPDX-License-Identifier: Apache-2.0
"""Misuse of the first manager with prefix caching, each error also of the original's kind.

Messages name request, block and counts; the call has changed nothing. Source: S004-05, 10, 16;
X-14.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class UnallocatedRequest(KvcoreError, KeyError):
    """Slots are appended to a request that `allocate_slots` gave none."""

    message = "request {request!r} has no blocks: {num_requests} requests have some"


class AlreadyAllocated(KvcoreError):
    """A request has one table; another would lose the first one's blocks."""

    message = "request {request!r} has {num_blocks} blocks: append to them, or free them first"


class InputsNotInKeys(KvcoreError):
    """Blocks are found by tokens alone; with other inputs they would answer for other contents."""

    message = "request {request!r} has {field}, which is in no key of a block: turn caching off"


class BlockInUse(KvcoreError):
    """A block forgets its tokens while requests have it in their table."""

    message = "block {block} has {num_owners} owners: free their requests first"


class NoTokensLeft(KvcoreError, RuntimeError):
    """The call requests slots for tokens that the request does not have."""

    message = "request {request!r} has {num_tokens} tokens, none behind the {num_computed} computed"


class TooFewTokens(KvcoreError, AssertionError):
    """Slots are appended for tokens that the request does not have."""

    message = (
        "request {request!r} has {num_tokens} tokens, slots are wanted up to token {requested}"
    )


class HitsWithoutCaching(KvcoreError, AssertionError):
    """Computed blocks are given although caching is off."""

    message = "request {request!r} brings {num_blocks} computed blocks, caching is off"
