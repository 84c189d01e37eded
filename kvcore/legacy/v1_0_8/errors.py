# SPDX-License-Identifier: Apache-2.0
"""Misuse of seed 001's calls and of its manager, each error also of the kind that these raised.

Rules: as in `kvcore.types.errors`: messages name block, request and counts, and nothing has
changed. What the originals let pass, and what damaged their counts then, is refused as well.
Source: S001-07, 08, 13, 15, 34, 38, 47, 57, 63, 66, 68, 70 to 73, 85; X-14. Twin: none.
"""

from __future__ import annotations

from kvcore.sizing.errors import (
    EmptyGroup,
    GroupCountDiffers,
    GroupKindDiffers,
    GroupLayersDiffer,
    MixedSpecs,
    NoLayers,
    SpecsDiffer,
    UnknownLayer,
    WindowOnLatent,
)
from kvcore.types.errors import (
    AlreadyPublished,
    AlreadyQueued,
    CachingDisabled,
    HitsOnRunningRequest,
    InvalidConfig,
    InvalidExtraKey,
    KvcoreError,
    NotQueued,
    NotRunning,
    StaleHits,
    TooManyTokens,
)


class NoFreeBlocks(KvcoreError):
    """The free queue is empty."""

    message = "No free blocks available"


class TooFewFreeBlocks(KvcoreError):
    """Fewer blocks are free than are asked for."""

    message = "Cannot get {asked} free blocks from the pool: {available} of {num_blocks} are free"


class WrongPoolSize(InvalidConfig, AssertionError):
    """A pool has a block at least, the null block."""


class NotInQueue(NotQueued, RuntimeError):
    """A block is taken out of a free queue that it is not in."""


class AlreadyInQueue(AlreadyQueued, RuntimeError):
    """A block is in a free queue, and can be in one only, once."""


class LinksBelongToQueue(KvcoreError):
    """The neighbours of a block in the free queue are the queue's to set."""

    message = "block {block}: prev_free_block and next_free_block are set by its queue alone"


class AlreadyHashed(AlreadyPublished, AssertionError):
    """A block with a hash is given another before it lost the first."""


class ForeignBlock(KvcoreError):
    """A block of another pool."""

    message = "{block} is none of the {num_blocks} blocks of this pool"


class NotByHand(KvcoreError):
    """The queue of a pool moves with its blocks' owners."""

    message = "block {block}: a pool's free queue changes by {calls} alone"


class BeyondMedia(KvcoreError, AssertionError):
    """An index from the end of the media items reaches before the first."""

    message = "media index {index} reaches before the first of {num_items} items"


class NoMediaHash(InvalidExtraKey, AssertionError):
    """A media item without a hash."""


class WindowWithMla(WindowOnLatent, AssertionError):
    """A sliding window over latent vectors."""


class LayersDiffer(SpecsDiffer, AssertionError):
    """Layers of one group keep their cache alike."""


class NoGroupLayer(EmptyGroup, IndexError):
    """A group has at least one layer."""


class PagesDiffer(SpecsDiffer, AssertionError):
    """Layers of one group have pages of one size."""


class NothingToCache(NoLayers, NotImplementedError, AssertionError):
    """A model without layers is of no kind that can be served."""


class NoSuchLayer(UnknownLayer, KeyError):
    """A group names a layer that the model does not have."""

    def __str__(self) -> str:
        return ValueError.__str__(self)


class MixedLayers(MixedSpecs, NotImplementedError):
    """One group cannot serve layers of several kinds."""


class RanksDiffer(GroupKindDiffers, AssertionError):
    """Workers under one manager keep their groups alike."""


class RankGroupsDiffer(GroupCountDiffers, AssertionError):
    """Workers under one manager have the same groups."""


class RankLayersDiffer(GroupLayersDiffer, AssertionError):
    """Workers that split one model's heads have the same layers in each group."""


class TooLong(KvcoreError, AssertionError):
    """A request that has all the blocks that the model's length allows asks for more."""

    message = (
        "request {request} holds {held} blocks and brings {num_hits}, asks for {asked} more: "
        "max_model_len={max_model_len} allows {most}"
    )


class TokensMissing(TooManyTokens, AssertionError):
    """A block that would be full has fewer tokens."""


class HitsWithoutCaching(CachingDisabled, AssertionError):
    """Hits make no sense where prefix caching is off."""


class HitsWhileRunning(HitsOnRunningRequest, AssertionError):
    """Only a request that holds nothing can bring hits."""


class StaleHit(StaleHits, AssertionError):
    """A hit block does not, or no longer, have the request's hash."""


class NotRunningRequest(NotRunning, AssertionError):
    """The common prefix is asked for a request that does not run."""

    message = "request {request} is {status}, must be RUNNING"


class NotOneGroup(KvcoreError, AssertionError):
    """This manager serves layers of one kind."""

    message = "the configuration has {num_groups} groups, this manager serves one"
