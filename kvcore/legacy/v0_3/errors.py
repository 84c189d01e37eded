# SPDX-License-Identifier: Apache-2.0
"""Misuse of the early block managers, each error also of the kind that their original raised.

Messages name block, sequence and counts; the call has changed nothing. Calls that the originals
accepted, and that lost blocks, are refused as well. Source: S003-02, 03, 05, 07, 20, 21, 26; X-14.
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
    """A block without owner is given back."""

    message = "Double free! {block!r} is already freed."


class ForeignBlock(KvcoreError):
    """A block of another allocator."""

    message = "{block!r} is none of the {num_blocks} blocks of this allocator on the {device}"


class UnknownSequence(KvcoreError, KeyError):
    """No block table of this sequence is known."""

    message = "sequence {sequence} has no block table: {num_tables} sequences have one"


class NoWaitingSequence(KvcoreError, IndexError):
    """A group is admitted by its first waiting sequence."""

    message = "group {group!r} has no waiting sequence: {num_seqs} have another status"


class EmptyTable(KvcoreError, IndexError):
    """A sequence without blocks has no last one to write."""

    message = "sequence {sequence} has no blocks and no tokens"


class WrongWindow(KvcoreError, AssertionError):
    """A sliding window is some whole blocks."""

    message = "a window of {sliding_window} tokens is no multiple of {block_size} tokens above 0"


class WrongWatermark(KvcoreError, AssertionError):
    """A watermark is a share of the blocks."""

    message = "watermark is {watermark!r}, must be at least 0"


class OnOtherDevice(KvcoreError, AssertionError):
    """A call needs a sequence's blocks on one device and finds them on the other."""

    message = "block {block!r} of sequence {sequence} is on the {device}, must be on the {expected}"


class PrefixNotReady(KvcoreError, AssertionError):
    """A group with a prefix is swapped in only behind that prefix."""

    message = (
        "the prefix of group {group!r} must be allocated and computed: allocated is {allocated}, "
        "computed is {computed}"
    )


class WrongPrefix(KvcoreError, AssertionError):
    """A shared prefix is some whole blocks."""

    message = "a prefix of {num_tokens} tokens is not whole blocks of {block_size} tokens"


class PrefixTooLong(KvcoreError):
    """A prefix is part of each prompt that has it."""

    message = "group {group!r} has {num_blocks} blocks of tokens, its prefix has {num_prefix}"


class UnknownPrefix(KvcoreError):
    """A prefix whose blocks this manager does not hold."""

    message = "a prefix of {num_tokens} tokens is not held by this manager"


class AlreadyAllocated(KvcoreError):
    """A sequence has one block table; another would lose the first one's blocks."""

    message = "sequence {sequence} has a table of {num_blocks} blocks: free it first"


class StrangeSequence(KvcoreError, KeyError):
    """A group does not have a sequence of this id."""

    message = "sequence {sequence} is none of the {num_seqs} of group {group!r}"


class KnownSequence(KvcoreError):
    """A group has one sequence of each number."""

    message = "group {group!r} has a sequence {sequence}: remove it first"


class BlockTooFull(KvcoreError, AssertionError):
    """More tokens than a logical block has slots."""

    message = "block {block!r} has {num_slots} empty slots, {given} tokens are appended"


class NoLastToken(KvcoreError, AssertionError):
    """The newest token of a logical block without tokens."""

    message = "block {block!r} has no tokens"


class NoLogprob(KvcoreError, AssertionError):
    """The log-probabilities of a token's place have that token among them."""

    message = "token {token} of sequence {sequence} is none of the {num_logprobs} logprobs"
