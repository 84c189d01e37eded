# SPDX-License-Identifier: Apache-2.0
"""Misuse and corruption, each as a type of its own.

Invariants: misuse is a `KvcoreError`: the message names the thing and the numbers, `fields` hold
them, and the state is as before. `tier`: of a block off the device. Twin: rust/src/types/errors.rs.
"""

from __future__ import annotations

from kvcore.types.base_error import AlreadyPublished as AlreadyPublished
from kvcore.types.base_error import BackendMissing as BackendMissing
from kvcore.types.base_error import ConcurrentCall as ConcurrentCall
from kvcore.types.base_error import EmptyPinName as EmptyPinName
from kvcore.types.base_error import EpochWentBack as EpochWentBack
from kvcore.types.base_error import InvalidRetention as InvalidRetention
from kvcore.types.base_error import InvariantViolation as InvariantViolation
from kvcore.types.base_error import KvcoreError as KvcoreError
from kvcore.types.base_error import NoOwner as NoOwner
from kvcore.types.base_error import NothingToPin as NothingToPin
from kvcore.types.base_error import PolicyFailed as PolicyFailed
from kvcore.types.base_error import PoolTooLarge as PoolTooLarge
from kvcore.types.base_error import RepeatedPin as RepeatedPin
from kvcore.types.base_error import StaleRequest as StaleRequest
from kvcore.types.base_error import TimeWentBack as TimeWentBack
from kvcore.types.base_error import TooManyPinned as TooManyPinned
from kvcore.types.base_error import UnknownPin as UnknownPin


class WrongArgument(KvcoreError):
    """An argument of a kind that the call does not take."""

    message = "{name} must be {expected}, not {value!r}"


class InvalidConfig(KvcoreError):
    """A configuration that cannot work."""

    message = "config {field}={value!r}: {reason}"


class GroupsDoNotFit(KvcoreError):
    """One pool has one page size, so that any block can serve any group."""

    message = "groups {groups} have blocks of {sizes} bytes: one pool has one block size"


class UnknownRequest(KvcoreError):
    """No request of this id is known."""

    message = "request {request!r} is not known"


class UnknownRow(UnknownRequest):
    """No request is in this row."""

    message = "request in row {row!r} is not known"


class RepeatedRequest(KvcoreError):
    """A request of this id exists already, or is named twice in one call."""

    message = "request {request!r} {reason}"


class EmptyRequestId(KvcoreError):
    """A request id is a non-empty str that has a UTF-8 form."""

    message = "a request id must be a non-empty str, not {value!r}"


class EmptyTokens(KvcoreError):
    """A request has at least one token; an extension adds at least one."""

    message = "request {request!r} is given no tokens"


class InvalidToken(KvcoreError):
    """A token id is an integer from 0 to 2**32 - 1, or of a request with own hashes from -2**31."""

    message = "token {value!r} at position {position} of the call is not an integer in [0, 2**32)"


class UnsupportedBuffer(KvcoreError):
    """A token buffer is one-dimensional, contiguous, of 1, 2, 4 or 8 byte integers."""

    message = "{name}: a buffer of format {format}, {dimensions}-dimensional, is no row of integers"


class LengthMismatch(KvcoreError):
    """Two arguments of one call must have as many items."""

    message = "{num_requests} requests are given {num_tokens} tokens"


class InvalidCount(KvcoreError):
    """A count is below what the call needs."""

    message = "{name} is {value!r}, must be at least {least}"


class TooManyTokens(KvcoreError):
    """Slots are requested for tokens that the request does not have."""

    message = "request {request!r} has {num_tokens} tokens, slots go up to token {requested}"


class BeyondModelLength(KvcoreError):
    """New tokens would pass the longest length that the model takes."""

    message = "request {request!r} would reach {requested} tokens, the model takes {max_model_len}"


class BeyondComputed(KvcoreError):
    """The call names more tokens than were computed."""

    message = "request {request!r} has {num_computed} computed tokens, the call names {requested}"


class BeforeOpenBatch(BeyondComputed):
    """The call takes back tokens that the open batch does not compute, or not without the rest."""

    message = (
        "request {request!r} cannot fall to {requested}: the open batch keeps its first {num_kept}"
    )


class WrongBlockHashes(KvcoreError):
    """Hashes supplied by an engine have one size, and there is at most one per full block."""

    message = "request {request!r} is given {num_hashes} block hashes: {reason}"


class DraftsPending(KvcoreError):
    """Draft tokens were not yet accepted or dropped."""

    message = "request {request!r} has {num_drafts} draft tokens, accept or drop them first"


class PlaceholdersPending(KvcoreError):
    """Output of a request is still to come, so it takes no drafts."""

    message = "request {request!r} waits for {num_placeholders} tokens to come, add those first"


class NotComputed(KvcoreError):
    """No token can have been sampled: the request's own are not all computed."""

    message = (
        "request {request!r} computed {num_computed} of {num_tokens} tokens: allocate the rest"
    )


class StaleOutput(KvcoreError):
    """A batch sampled this before its request was cut, or scheduled anew, or it was handed in."""

    message = "request {request!r} takes no output of batch {batch}: the first is {output_from}"


class OutputOutOfOrder(KvcoreError):
    """Output fills positions to come in order; the batch in flight does not sample the next one."""

    message = "batch {batch} does not sample token {num_tokens} of request {request!r}"


class BatchNotTaken(KvcoreError):
    """A batch that was not taken yet has sampled nothing."""

    message = "batch {batch} was not taken yet, the open batch is {open_batch}"


class BeyondDrafts(KvcoreError):
    """Only drafts that were scheduled can be accepted."""

    message = "request {request!r} has {num_scheduled} scheduled drafts, {requested} are accepted"


class InOpenBatch(KvcoreError):
    """The open batch is executed later, so what it schedules is not written yet."""

    message = "{kind} {value!r} is in the open batch: take the batch first"


class TooManyInFlight(KvcoreError):
    """As many batches are in flight as the config allows."""

    message = (
        "{num_in_flight} batches are in flight, max_in_flight={max_in_flight}: complete the "
        "oldest or cancel first"
    )


class NotInFlight(KvcoreError):
    """No batch in flight has this number."""

    message = "batch {batch!r} is not in flight; in flight are: {in_flight}"


class BatchOutOfOrder(KvcoreError):
    """Batches are completed in the order of their numbers."""

    message = "batch {batch!r} cannot be completed before batch {oldest}"


class LoadUnfinished(KvcoreError):
    """The request waits for the external store."""

    message = "request {request!r} has {num_operations} unfinished loads: complete or free them"


class LoadUnconfirmed(KvcoreError):
    """A block that rests on external tokens is not stored while their load may fail."""

    message = "block {block!r} rests on external tokens whose load may still fail: store it later"


class WrongLoad(KvcoreError):
    """Only whole blocks with keys can be loaded."""

    message = "request {request!r} cannot load {num_tokens} tokens: {reason}"


class NotPublished(KvcoreError):
    """Only a block with a key can be stored."""

    message = "block {block!r} has no key to be stored under"


class UnknownOperation(KvcoreError):
    """No unfinished operation has this number."""

    message = "there is no unfinished operation {operation!r}"


class HeldByOthers(KvcoreError):
    """Other requests count tokens in blocks that were not written."""

    message = "blocks {blocks} are counted by requests {requests} too: name those in the same call"


class NoEncoderGroup(KvcoreError):
    """Encoder tokens need a cross-attention group."""

    message = "request {request!r} brings {num_encoder_tokens} encoder tokens, no group has them"


class BeyondRequest(KvcoreError):
    """A cut lies outside the request."""

    message = (
        "request {request!r} has {num_tokens} tokens, cannot be cut to {requested!r}: "
        "keep 1 to {num_tokens}"
    )


class HitsOnRunningRequest(KvcoreError):
    """Only a request that holds nothing can bring hits."""

    message = "request {request!r} already holds blocks and brings {num_blocks} hit blocks"


class WrongHit(KvcoreError):
    """The blocks of a hit and its token count do not belong together, or not to this request."""

    message = (
        "request {request!r}: {num_blocks} hit blocks cannot stand for {num_tokens!r} of its "
        "tokens: bring the hit that was found for it"
    )


class StaleHits(KvcoreError):
    """A hit block does not, or no longer, hold the request's key."""

    message = (
        "request {request!r}: block {block} at position {position} does not hold its key: the hit "
        "is of other tokens, or out of date; look up again"
    )


class CachingDisabled(KvcoreError):
    """Hits are given although prefix caching is off."""

    message = "request {request!r} brings {num_blocks} hit blocks, prefix caching is off"


class SwappedOut(KvcoreError):
    """The request's blocks are in the host tier."""

    message = "request {request!r} is swapped out, swap it in first"


class NotSwapped(KvcoreError):
    """The request has nothing in the host tier."""

    message = "request {request!r} is not swapped out"


class NotRunning(KvcoreError):
    """The request holds no blocks."""

    message = "request {request!r} holds no blocks"


class StillHoldsBlocks(KvcoreError):
    """A request is forgotten only after it gave back its blocks."""

    message = "request {request!r} still holds {num_blocks} blocks, free it first"


class HitInOpenBatch(KvcoreError):
    """Other requests count on blocks that this call would leave unwritten."""

    message = (
        "blocks {blocks} were published in the open batch and are counted by requests {requests}: "
        "free those first, or take the batch"
    )


class NoHostTier(KvcoreError):
    """The configuration has no host blocks."""

    message = "there is no host tier: num_host_blocks is 0"


class UnknownBlock(KvcoreError):
    """The pool has no such block, or it is the null block."""

    message = "block {block!r} is not one of the blocks {first} to {last} of this pool"


class DoubleFree(KvcoreError):
    """A block is given back more often than it is held."""

    message = "block {block!r} has {ref_count} owners, the call releases {requested}"


class NotPinned(KvcoreError):
    """A block is unpinned more often than it was pinned."""

    message = "block {block!r} has {num_pins} pins, the call removes {requested}"


class WrongKey(KvcoreError):
    """A block does not, or no longer, have the key that the call expects of it."""

    message = "block {block!r} at position {position} does not have the key of that position"


class UnusedBlock(KvcoreError):
    """A block without owner and key holds nothing that could be kept."""

    message = "block {block!r} has neither owner nor key"


class InvalidKey(KvcoreError):
    """Keys have one size, since a batch carries them one after the other."""

    message = "a key has {expected} bytes, not {size}"


class DamagedState(KvcoreError):
    """Bytes that are no state, or one that breaks a property: then the offset is their end."""

    message = "not an encoded state: {reason} at byte {offset}"


class DamagedBatch(KvcoreError):
    """Columns and keys that are not a batch."""

    message = "batch {batch!r} is damaged: {reason}"


class TraceError(KvcoreError):
    """A text trace that cannot be read."""

    message = "{source}, line {line}: {reason}"


class InvalidExtraKey(KvcoreError):
    """A part of a block's extra keys that no key can be made of."""

    message = "{name} must be {expected}, not {value!r}"


class UnsortedMedia(KvcoreError):
    """Media items are sorted by their first position, and stand in the prompt."""

    message = (
        "request {request!r}: media item {position} takes {length} tokens from {offset} on, must "
        "begin at {first} or later, like the item before it, and end by {num_tokens}"
    )


class CountMismatch(KvcoreError):
    """Two parts of one request do not have the sizes that belong together."""

    message = "request {request!r} is given {given} {name}, must be {expected}"
