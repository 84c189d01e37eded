# SPDX-License-Identifier: Apache-2.0
"""Misuse of vLLM 0.8.5's V1 calls and manager, each error also of the kind that these raised.

Messages name block, request and counts; the call has changed nothing. Calls that the originals
accepted, and that damaged their counts, are refused as well. Source: S001-07, 08,
13, 15, 34, 38, 47, 57, 63, 66, 68, 70 to 73, 85; X-14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.sizing import errors as sizing
from kvcore.types import errors
from kvcore.types.errors import KvcoreError


class TooFewFreeBlocks(KvcoreError):
    """Fewer blocks are free than are needed."""

    message = "Cannot get {needed} free blocks from the pool: {available} of {num_blocks} are free"


class WrongPoolSize(errors.InvalidConfig, AssertionError):
    """A pool has a block at least, the null block."""


class AlreadyHashed(errors.AlreadyPublished, AssertionError):
    """A block with a hash is given another before it lost the first."""


class ForeignBlock(KvcoreError):
    """A block of another pool."""

    message = "{block!r} is none of the {num_blocks} blocks of this pool"


class BeyondMedia(KvcoreError, AssertionError):
    """An index from the end of the media items reaches before the first."""

    message = "media index {index} reaches before the first of {num_items} items"


class NoMediaHash(errors.InvalidExtraKey, AssertionError):
    """A media item without a hash."""


class WindowWithMla(sizing.WindowOnLatent, AssertionError):
    """A sliding window over latent vectors."""


class LayersDiffer(sizing.SpecsDiffer, AssertionError):
    """The layers of a group must keep their cache alike."""


class NoGroupLayer(sizing.EmptyGroup, IndexError):
    """A group must have at least one layer."""


class NothingToCache(sizing.NoLayers, NotImplementedError, AssertionError):
    """A model without layers is of no kind that can be served."""


class NoSuchLayer(sizing.UnknownLayer, KeyError):
    """A group names a layer that the model does not have."""


class MixedLayers(sizing.MixedSpecs, NotImplementedError):
    """One group cannot serve layers of several kinds."""


class RanksDiffer(sizing.GroupKindDiffers, AssertionError):
    """Workers under one manager must keep their groups alike."""


class RankGroupsDiffer(sizing.GroupCountDiffers, AssertionError):
    """Workers under one manager must have the same groups."""


class RankLayersDiffer(sizing.GroupLayersDiffer, AssertionError):
    """Workers that split one model's heads must have the same layers in each group."""


class TooLong(KvcoreError, AssertionError):
    """A request needs more blocks than the model's length allows."""

    message = (
        "request {request!r} has {held} blocks with its hits and needs {needed} more: "
        "max_model_len={max_model_len} allows {most}"
    )


class TokensMissing(errors.TooManyTokens, AssertionError):
    """A block that would be full has fewer tokens."""


class HitsWithoutCaching(errors.CachingDisabled, AssertionError):
    """The call passes hits although prefix caching is off."""


class HitsWhileRunning(errors.HitsOnRunningRequest, AssertionError):
    """Only a request that holds no blocks can take hits."""


class StaleHit(errors.StaleHits, AssertionError):
    """A hit block does not, or no longer, have the request's hash."""


class NotRunningRequest(errors.NotRunning, AssertionError):
    """Only a running request has a common prefix."""

    message = "request {request!r} is {status}, must be RUNNING"


class NotOneGroup(KvcoreError, AssertionError):
    """This manager serves layers of one kind."""

    message = "the configuration has {num_groups} groups, this manager serves one"


@contextmanager
def of_original_kind() -> Iterator[None]:
    """Raise an error of the core as the class above that stands for it, if there is one."""
    try:
        yield
    except KvcoreError as error:
        kinds = (each for each in type(error).__subclasses__() if each.__module__ == __name__)
        raise next(kinds, type(error))(**error.fields) from None
