# SPDX-License-Identifier: Apache-2.0
"""Errors for misuse of vLLM 0.8.5's V1 calls and manager, with the types that these raised.

Messages name block, request and counts; the call has changed nothing. Calls that the originals
accepted although they damaged their counts are refused as well. Source: S001-07, 08, 13, 15, 34,
38, 47, 57, 63, 66, 68, 70 to 73, 85; X-14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.sizing import errors as sizing
from kvcore.types import errors
from kvcore.types.errors import KvcoreError


class TooFewFreeBlocks(KvcoreError):
    """Fewer blocks are free than a call needs."""

    message = "Cannot get {needed} free blocks from the pool: {available} of {num_blocks} are free"


class WrongPoolSize(errors.InvalidConfig, AssertionError):
    """A pool must have at least one block, the null block."""


class AlreadyHashed(errors.AlreadyPublished, AssertionError):
    """A block that still has a hash is given another one."""


class ForeignBlock(KvcoreError):
    """A block belongs to another pool."""

    message = "{block!r} is not one of the {num_blocks} blocks of this pool"


class BeyondMedia(KvcoreError, AssertionError):
    """An index from the end of the media items reaches before the first."""

    message = "media index {index} reaches before the first of {num_items} items"


class NoMediaHash(errors.InvalidExtraKey, AssertionError):
    """A media item has no hash."""


class WindowWithMla(sizing.WindowOnLatent, AssertionError):
    """MLA, which caches latent vectors, cannot have a sliding window."""


class LayersDiffer(sizing.SpecsDiffer, AssertionError):
    """The layers of a group must have equal cache specs."""


class NoGroupLayer(sizing.EmptyGroup, IndexError):
    """A group must have at least one layer."""


class NothingToCache(sizing.NoLayers, NotImplementedError, AssertionError):
    """A model without layers cannot be served."""


class NoSuchLayer(sizing.UnknownLayer, KeyError):
    """A group names a layer that the model does not have."""


class MixedLayers(sizing.MixedSpecs, NotImplementedError):
    """One group cannot serve layers of several kinds."""


class RanksDiffer(sizing.GroupKindDiffers, AssertionError):
    """Workers under one manager must have groups of the same kinds."""


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
    """A request has too few tokens for a block that would be full."""


class HitsWithoutCaching(errors.CachingDisabled, AssertionError):
    """The call passes hits although prefix caching is off."""


class HitsWhileRunning(errors.HitsOnRunningRequest, AssertionError):
    """Only a request that holds no blocks can take hits."""


class StaleHit(errors.StaleHits, AssertionError):
    """A hit block does not have, or no longer has, the request's hash."""


class NotRunningRequest(errors.NotRunning, AssertionError):
    """Only a running request has a common prefix."""

    message = "request {request!r} is {status}, must be RUNNING"


class NotOneGroup(KvcoreError, AssertionError):
    """This manager serves layers of one kind."""

    message = "the configuration has {num_groups} groups, this manager serves one"


@contextmanager
def of_original_kind() -> Iterator[None]:
    """Convert errors of the core to their subclasses in this module, if there are any."""
    try:
        yield
    except KvcoreError as error:
        kinds = (each for each in type(error).__subclasses__() if each.__module__ == __name__)
        raise next(kinds, type(error))(**error.fields) from None
