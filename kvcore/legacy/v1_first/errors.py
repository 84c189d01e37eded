# SPDX-License-Identifier: Apache-2.0
"""Errors for misuse of the first manager with prefix caching, with the original's types.

Messages name request, block and counts; the call has changed nothing. Source: S004-05, 10, 16;
X-14.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class UnallocatedRequest(KvcoreError, KeyError):
    """Slots are appended to a request that has none from `allocate_slots`."""

    message = "request {request!r} has no blocks: {num_requests} requests have some"


class AlreadyAllocated(KvcoreError):
    """A request already has a table; a second one would lose the blocks of the first."""

    message = "request {request!r} has {num_blocks} blocks: append to them, or free them first"


class InputsNotInKeys(KvcoreError):
    """A request has inputs that are not part of a block's key, which covers tokens alone."""

    message = "request {request!r} has {field}, which block keys do not cover: turn caching off"


class BlockInUse(KvcoreError):
    """A block is reset while requests have it in their tables."""

    message = "block {block} has {num_owners} owners: free their requests first"


class NoTokensLeft(KvcoreError, RuntimeError):
    """The call requests slots for tokens that the request does not have."""

    message = "request {request!r} has {num_tokens} tokens, {num_computed} of them are computed"


class TooFewTokens(KvcoreError, AssertionError):
    """Slots are appended for tokens that the request does not have."""

    message = (
        "request {request!r} has {num_tokens} tokens, slots are requested up to token {requested}"
    )


class HitsWithoutCaching(KvcoreError, AssertionError):
    """Computed blocks are given although caching is off."""

    message = "request {request!r} has {num_blocks} computed blocks, but caching is off"
