# SPDX-License-Identifier: Apache-2.0
"""Misuse of what a pool keeps: blocks, their keys, pinned prefixes, and what decides how long
content stays (epochs, wishes with their time, policies). `tier`: of a block that is not on the
device.
"""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class NoHostTier(KvcoreError):
    """The configuration has no host blocks."""

    message = "there is no host tier: num_host_blocks is 0"


class UnknownBlock(KvcoreError):
    """The pool has no such block, or it is the null block."""

    message = "block {block!r} is not one of the blocks {first} to {last} of this pool"


class DoubleFree(KvcoreError):
    """A block is released more often than it is owned."""

    message = "block {block!r} has {ref_count} owners, but the call releases {requested}"


class UnusedBlock(KvcoreError):
    """A block with neither owner nor key has no content to keep."""

    message = "block {block!r} has neither owner nor key"


class NoOwner(KvcoreError):
    """A block must have an owner to be copied or taken over."""

    message = "block {block!r} has no owner"


class WrongKey(KvcoreError):
    """A block does not have, or no longer has, the key that the call expects."""

    message = "block {block!r} at position {position} does not have the key of that position"


class InvalidKey(KvcoreError):
    """All keys must have one size, since a batch concatenates them."""

    message = "a key has {expected} bytes, not {size}"


class AlreadyPublished(KvcoreError):
    """A block has at most one key."""

    message = "block {block!r} already has a key"


class EmptyPinName(KvcoreError):
    """The name of a pin is a non-empty str that has a UTF-8 form."""

    message = "the name of a pin must be a non-empty str, not {value!r}"


class UnknownPin(KvcoreError):
    """No pin of a prefix has this name."""

    message = "there is no pin {pin!r}"


class NotPinned(KvcoreError):
    """A block is unpinned more often than it was pinned."""

    message = "block {block!r} has {num_pins} pins, but the call removes {requested}"


class RepeatedPin(KvcoreError):
    """A pin of this name exists already."""

    message = "pin {pin!r} is there already: unpin it first"


class NothingToPin(KvcoreError):
    """None of the request's first tokens could be found later."""

    message = "of the first {requested} tokens of request {request!r} none can be pinned: {reason}"


class TooManyPinned(KvcoreError):
    """Pins of prefixes would hold more blocks than the config allows."""

    message = "with pin {pin!r} {num_blocks} blocks are pinned, max_pinned_blocks={most}"


class EpochWentBack(KvcoreError):
    """The number of the weights can only rise."""

    message = "epoch {epoch!r} cannot follow epoch {current}: it must be from {least} to {most}"


class StaleRequest(KvcoreError):
    """A request that began with older weights cannot load content, which is of the new ones."""

    message = "request {request!r} is of epoch {epoch}, the weights are of epoch {current}"


class InvalidRetention(KvcoreError):
    """A level, a range or a duration of a retention wish is invalid."""

    message = "retention {value!r}: {reason}"


class TimeWentBack(KvcoreError):
    """The time of a manager never falls."""

    message = "time {now_ms!r} ms cannot follow {current}: it must be from {current} to {most}"


class PolicyFailed(KvcoreError):
    """An eviction policy raised, or returned an invalid block or place."""

    message = "policy {policy}: {hook} {reason}"
