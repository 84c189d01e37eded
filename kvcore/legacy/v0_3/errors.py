# SPDX-License-Identifier: Apache-2.0
"""Errors for misuse of the early block managers; each also has the type that the original raised.

Messages name block, sequence and counts; the call has changed nothing. Calls that the originals
accepted although they lost blocks are refused as well. Source: S003-02, 03, 05, 07, 20, 21, 26;
X-14.
"""

from __future__ import annotations

from kvcore.types.errors import DoubleFree, KvcoreError


class OutOfMemory(KvcoreError):
    """A call needs more blocks than are free; check first (`can_allocate`, `can_append_slot`)."""

    message = (
        "Out of memory! No free blocks are available. {who} needs {needed}, {available} of "
        "{num_blocks} blocks on the {device} are free"
    )


class AlreadyFreed(DoubleFree):
    """A block without an owner is freed."""

    message = "Double free! {block!r} is already freed."


class ForeignBlock(KvcoreError):
    """A block belongs to another allocator."""

    message = "{block!r} is none of the {num_blocks} blocks of this allocator on the {device}"


class UnknownSequence(KvcoreError, KeyError):
    """A sequence has no block table."""

    message = "sequence {sequence} has no block table: {num_tables} sequences have one"


class NoWaitingSequence(KvcoreError, IndexError):
    """A group without a waiting sequence cannot be admitted."""

    message = "group {group!r} has no waiting sequence: {num_seqs} have another status"


class EmptyTable(KvcoreError, IndexError):
    """A sequence without blocks has no last block to write."""

    message = "sequence {sequence} has no blocks and no tokens"


class WrongWindow(KvcoreError, AssertionError):
    """A sliding window must be one or more whole blocks."""

    message = "sliding_window is {sliding_window}, must be a positive multiple of {block_size}"


class WrongWatermark(KvcoreError, AssertionError):
    """A watermark must be a share of the blocks."""

    message = "watermark is {watermark!r}, must be at least 0"


class OnOtherDevice(KvcoreError, AssertionError):
    """A sequence's blocks are not on the device that a call needs."""

    message = "block {block!r} of sequence {sequence} is on the {device}, must be on the {expected}"


class PrefixNotReady(KvcoreError, AssertionError):
    """A group with a prefix can be swapped in only after that prefix has been computed."""

    message = (
        "the prefix of group {group!r} must be allocated and computed: allocated is {allocated}, "
        "computed is {computed}"
    )


class WrongPrefix(KvcoreError, AssertionError):
    """A shared prefix must be whole blocks."""

    message = "a prefix of {num_tokens} tokens is not whole blocks of {block_size} tokens"


class PrefixTooLong(KvcoreError):
    """A prefix is longer than a prompt that should begin with it."""

    message = "group {group!r} has {num_blocks} blocks of tokens, its prefix has {num_prefix}"


class UnknownPrefix(KvcoreError):
    """This manager does not hold the blocks of a prefix."""

    message = "a prefix of {num_tokens} tokens is not held by this manager"


class AlreadyAllocated(KvcoreError):
    """A sequence already has a block table; a second one would lose the blocks of the first."""

    message = "sequence {sequence} has a table of {num_blocks} blocks: free it first"


class StrangeSequence(KvcoreError, KeyError):
    """A group does not have a sequence of this id."""

    message = "sequence {sequence} is not one of the {num_seqs} of group {group!r}"


class KnownSequence(KvcoreError):
    """A group already has a sequence of this id."""

    message = "group {group!r} has a sequence {sequence}: remove it first"


class BlockTooFull(KvcoreError, AssertionError):
    """More tokens are appended than a logical block has empty slots."""

    message = "block {block!r} has {num_slots} empty slots, {given} tokens are appended"


class NoLastToken(KvcoreError, AssertionError):
    """A logical block without tokens has no newest token."""

    message = "block {block!r} has no tokens"


class NoLogprob(KvcoreError, AssertionError):
    """The log-probabilities given for a position do not include its token."""

    message = "token {token} of sequence {sequence} is not in its {num_logprobs} logprobs"
