# SPDX-License-Identifier: Apache-2.0
"""Misuse and corruption, each with a type of its own; those of other files by their names, too.

Invariants: misuse is a `KvcoreError`: its message names the thing and the numbers, `fields` hold
them, and the state is unchanged. `tier`: of a block that is not on the device. Twin:
rust/src/types/errors.rs.
"""

from __future__ import annotations

from kvcore.types.base_error import BackendMissing as BackendMissing
from kvcore.types.base_error import ConcurrentCall as ConcurrentCall
from kvcore.types.base_error import InvariantViolation as InvariantViolation
from kvcore.types.base_error import KvcoreError as KvcoreError
from kvcore.types.base_error import PoolTooLarge as PoolTooLarge
from kvcore.types.pool_errors import AlreadyPublished as AlreadyPublished
from kvcore.types.pool_errors import DoubleFree as DoubleFree
from kvcore.types.pool_errors import EmptyPinName as EmptyPinName
from kvcore.types.pool_errors import EpochWentBack as EpochWentBack
from kvcore.types.pool_errors import InvalidKey as InvalidKey
from kvcore.types.pool_errors import InvalidRetention as InvalidRetention
from kvcore.types.pool_errors import NoHostTier as NoHostTier
from kvcore.types.pool_errors import NoOwner as NoOwner
from kvcore.types.pool_errors import NothingToPin as NothingToPin
from kvcore.types.pool_errors import NotPinned as NotPinned
from kvcore.types.pool_errors import PolicyFailed as PolicyFailed
from kvcore.types.pool_errors import RepeatedPin as RepeatedPin
from kvcore.types.pool_errors import StaleRequest as StaleRequest
from kvcore.types.pool_errors import TimeWentBack as TimeWentBack
from kvcore.types.pool_errors import TooManyPinned as TooManyPinned
from kvcore.types.pool_errors import UnknownBlock as UnknownBlock
from kvcore.types.pool_errors import UnknownPin as UnknownPin
from kvcore.types.pool_errors import UnusedBlock as UnusedBlock
from kvcore.types.pool_errors import WrongKey as WrongKey


class WrongArgument(KvcoreError):
    """An argument has the wrong type or value."""

    message = "{name} must be {expected}, not {value!r}"


class InvalidConfig(KvcoreError):
    """The configuration cannot work."""

    message = "config {field}={value!r}: {reason}"


class GroupsDoNotFit(KvcoreError):
    """All blocks of a pool must have one size, so that any block can serve any group."""

    message = "groups {groups} have blocks of {sizes} bytes: one pool has one block size"


class UnknownRequest(KvcoreError):
    """There is no request with this id."""

    message = "request {request!r} is not known"


class UnknownRow(UnknownRequest):
    """No request is in this row."""

    message = "request in row {row!r} is not known"


class RepeatedRequest(KvcoreError):
    """The request exists already, or is named twice in one call."""

    message = "request {request!r} {reason}"


class EmptyRequestId(KvcoreError):
    """A request id must be a non-empty str that can be encoded as UTF-8."""

    message = "a request id must be a non-empty str, not {value!r}"


class EmptyTokens(KvcoreError):
    """A request needs at least one token, and an extension must add at least one."""

    message = "request {request!r} was given no tokens"


class InvalidToken(KvcoreError):
    """A token id must be in [0, 2**32), or at least -2**31 if the request has its own hashes."""

    message = (
        "token {value!r} at position {position} of the call is not an integer from {least} to "
        "4294967295"
    )


class UnsupportedBuffer(KvcoreError):
    """A token buffer must be one-dimensional, contiguous, of integers of 1, 2, 4 or 8 bytes."""

    message = "{name}: {dimensions}-dimensional buffer of format {format} is not a row of integers"


class LengthMismatch(KvcoreError):
    """Two arguments of a call must have the same length."""

    message = "{num_requests} requests were given {num_tokens} tokens"


class InvalidCount(KvcoreError):
    """A count is no integer, or below what the call needs."""

    message = "{name} is {value!r}, must be an integer of at least {least}"


class TooManyTokens(KvcoreError):
    """The call requests slots for tokens that the request does not have."""

    message = "request {request!r} has {num_tokens} tokens, but slots would reach token {requested}"


class BeyondModelLength(KvcoreError):
    """New tokens would exceed the maximum length of the model."""

    message = "request {request!r} would reach {requested} tokens: max_model_len is {max_model_len}"


class BeyondComputed(KvcoreError):
    """The call names more tokens than were computed."""

    message = "request {request!r} has {num_computed} computed tokens: the call names {requested}"


class BeforeOpenBatch(BeyondComputed):
    """The call takes back tokens that the open batch does not compute, or cannot drop alone."""

    message = (
        "request {request!r} cannot fall to {requested}: the open batch keeps its first {num_kept}"
    )


class WrongBlockHashes(KvcoreError):
    """Hashes supplied by an engine must have one size, and at most one per full block."""

    message = "request {request!r} was given {num_hashes} block hashes: {reason}"


class DraftsPending(KvcoreError):
    """The request has drafts that were not yet accepted or dropped."""

    message = "request {request!r} has {num_drafts} draft tokens: accept or drop them first"


class PlaceholdersPending(KvcoreError):
    """The request still waits for output, so it cannot get drafts."""

    message = "request {request!r} waits for {num_placeholders} tokens of output: add those first"


class NotComputed(KvcoreError):
    """No token can have been sampled, since some tokens of the request are not computed."""

    message = (
        "request {request!r} computed {num_computed} of {num_tokens} tokens: allocate the rest"
    )


class StaleOutput(KvcoreError):
    """The output is stale: its request was cut or rescheduled since, or has already got it."""

    message = "request {request!r} takes no output of batch {batch}: the first is {output_from}"


class OutputOutOfOrder(KvcoreError):
    """This batch does not sample the next position; `expected` does, or none if that is None."""

    message = (
        "batch {batch} does not sample token {num_tokens} of request {request!r} "
        "(expected batch: {expected})"
    )


class BatchNotTaken(KvcoreError):
    """The batch was not taken yet, so it has sampled nothing."""

    message = "batch {batch} was not taken yet: the open batch is {open_batch}"


class BeyondDrafts(KvcoreError):
    """Only drafts that were scheduled can be accepted."""

    message = "request {request!r} has {num_scheduled} scheduled drafts, cannot accept {requested}"


class InOpenBatch(KvcoreError):
    """The open batch was not executed yet, so its positions are not written."""

    message = "{kind} {value!r} is in the open batch: take the batch first"


class TooManyDrafts(KvcoreError):
    """A state cannot be cut back, so the one after a draft has its own place. Two tokens to come
    in one step are a draft and the token after it.
    """

    message = (
        "request {request!r} schedules {num_drafts} drafts or tokens to come: a step of state "
        "groups takes {most}"
    )


class NoStateGroup(KvcoreError):
    """Only recurrent states are kept by a call."""

    message = "request {request!r} marks a checkpoint, but there is no state group"


class UnalignedCheckpoint(KvcoreError):
    """A state is kept only where a hit can end, and for known tokens."""

    message = (
        "request {request!r} with {num_tokens} tokens marks the state after {requested}: it must "
        "be after a multiple of {multiple} known ones"
    )


class TooManyInFlight(KvcoreError):
    """The maximum number of batches is in flight."""

    message = (
        "{num_in_flight} batches are in flight, max_in_flight={max_in_flight}: complete the "
        "oldest or cancel first"
    )


class NotInFlight(KvcoreError):
    """No batch in flight has this number."""

    message = "batch {batch!r} is not in flight; in flight are: {in_flight}"


class BatchOutOfOrder(KvcoreError):
    """Batches must be completed in the order of their numbers."""

    message = "batch {batch!r} cannot be completed before batch {oldest}"


class LoadUnfinished(KvcoreError):
    """The request waits for the external store."""

    message = "request {request!r} has {num_operations} unfinished loads: complete or free them"


class LoadUnconfirmed(KvcoreError):
    """A block that rests on external tokens cannot be stored while their load may fail."""

    message = "block {block!r} rests on external tokens whose load may still fail: store it later"


class WrongLoad(KvcoreError):
    """Only whole blocks with keys can be loaded."""

    message = "request {request!r} cannot load {num_tokens} tokens: {reason}"


class NotPublished(KvcoreError):
    """Only a block with a key can be stored."""

    message = "block {block!r} has no key, so it cannot be stored"


class UnknownOperation(KvcoreError):
    """No unfinished operation has this number."""

    message = "there is no unfinished operation {operation!r}"


class HeldByOthers(KvcoreError):
    """Other requests also count tokens of blocks that were not written."""

    message = "requests {requests} also count blocks {blocks}: name them in the same call"


class NoEncoderGroup(KvcoreError):
    """Encoder tokens need a cross-attention group."""

    message = "request {request!r} brings {num_encoder_tokens} encoder tokens: no group takes them"


class BeyondRequest(KvcoreError):
    """The cut is outside the request."""

    message = (
        "request {request!r} has {num_tokens} tokens and cannot be cut to {requested!r}: keep 1 "
        "to {num_tokens}"
    )


class HitsOnRunningRequest(KvcoreError):
    """Only a request that holds no blocks can take hits."""

    message = "request {request!r} holds blocks, but the call passes {num_blocks} hit blocks"


class WrongHit(KvcoreError):
    """The blocks of a hit do not match its token count, or not this request."""

    message = (
        "request {request!r}: {num_blocks} hit blocks cannot stand for {num_tokens!r} of its "
        "tokens: bring the hit that was found for it"
    )


class StaleHits(KvcoreError):
    """A hit block does not have, or no longer has, the request's key."""

    message = (
        "request {request!r}: block {block} at position {position} does not hold its key: the hit "
        "is of other tokens, or out of date; look up again"
    )


class CachingDisabled(KvcoreError):
    """The call passes hits although prefix caching is off."""

    message = "request {request!r} gets {num_blocks} hit blocks, but prefix caching is off"


class SwappedOut(KvcoreError):
    """The request's blocks are in the host tier."""

    message = "request {request!r} is swapped out: swap it in first"


class NotSwapped(KvcoreError):
    """The request has nothing in the host tier."""

    message = "request {request!r} is not swapped out"


class NotRunning(KvcoreError):
    """The request holds no blocks."""

    message = "request {request!r} holds no blocks"


class StillHoldsBlocks(KvcoreError):
    """A request can be removed only after its blocks are freed."""

    message = "request {request!r} still holds {num_blocks} blocks: free it first"


class HitInOpenBatch(KvcoreError):
    """Other requests count blocks that this call would leave unwritten."""

    message = (
        "blocks {blocks} were published in the open batch and are counted by requests {requests}: "
        "free those first, or take the batch"
    )


class DamagedState(KvcoreError):
    """The bytes are not a state, or break a property of states; then the offset is their end."""

    message = "not an encoded state: {reason} at byte {offset}"


class DamagedBatch(KvcoreError):
    """The columns and keys are not a batch."""

    message = "batch {batch!r} is damaged: {reason}"


class TraceError(KvcoreError):
    """A text trace cannot be read."""

    message = "{source}, line {line}: {reason}"


class InvalidExtraKey(KvcoreError):
    """A part of a request's extra keys has the wrong form."""

    message = "{name} must be {expected}, not {value!r}"


class UnsortedMedia(KvcoreError):
    """Media items must be sorted by their first position and lie in the prompt."""

    message = (
        "request {request!r}: media item {position} covers {length} tokens from {offset} on; it "
        "must begin at {first} or later, like the item before it, and end by {num_tokens}"
    )


class CountMismatch(KvcoreError):
    """The sizes of two parts of a request do not match."""

    message = "request {request!r} was given {given} {name}, expected {expected}"
