# SPDX-License-Identifier: Apache-2.0
"""Errors of cache, tables and batch application, each with a type of its own.

The guard's errors report what a batch or a forward pass did wrong: the cache must not be used
afterwards. All others are raised before anything has changed.
"""

from __future__ import annotations

from typing import Any

from kvcore_runtime.errors import KvcoreRuntimeError


class CacheError(KvcoreRuntimeError):
    """The base class of the errors in this file."""


class InvalidLayout(CacheError):
    """The layout is impossible."""

    message = "layout {field}={value}: {reason}"


class InvalidSize(CacheError):
    """A size of a cache or of tables is invalid."""

    message = "{name}={value} must be an integer of at least {least}"


class UnevenShares(CacheError):
    """Ranks that share the tokens of blocks have equal shares, in whole runs."""

    message = (
        "blocks of {block_size} tokens do not split into runs of {interleave} for {num_ranks} ranks"
    )


class NoMemory(CacheError):
    """The system does not give the memory of a tier or of tables."""

    message = "{num_bytes} bytes of memory cannot be had: {reason}"


class GroupsDoNotHoldModel(CacheError):
    """The manager's groups do not hold the layers of the model."""

    message = "the groups do not fit the model: {reason}"


class UnequalPages(CacheError):
    """Blocks of all groups come from one pool, so they must have the same size in bytes."""

    message = (
        "group {group_id} has {layers} layers with blocks of {block_size} tokens, "
        "group {first} has {first_layers} with blocks of {first_block_size}: "
        "their pages differ in size"
    )


class LayerOutOfRange(CacheError):
    """The cache has no such layer."""

    message = "layer {layer} is not one of the {num_layers} layers 0 to {last}"


class GroupOutOfRange(CacheError):
    """The cache has no such group."""

    message = "group {group_id} is not one of the {num_groups} groups 0 to {last}"


class BlockOutOfRange(CacheError):
    """The tier has no such block."""

    message = "block {block} is not one of the {num_blocks} blocks of the {tier} tier"


class UnequalLists(CacheError):
    """Two lists that belong together must be equally long."""

    message = "{first_name} has {num_first} items and {second_name} has {num_second}"


def lengths_differ(first: str, num_first: int, second: str, num_second: int) -> UnequalLists:
    """Make the error for two lists, given by their names."""
    return UnequalLists(
        first_name=first, num_first=num_first, second_name=second, num_second=num_second
    )


class CopyHazard(CacheError):
    """Copies that run together must not write a block twice, or write a block that another one
    reads.
    """

    message = "block {block} of the {tier} tier is {how} in one set of copies"


class LayoutMismatch(CacheError):
    """Copies need tiers with the same layout."""

    message = (
        "pages of {source_bytes} bytes in {source_pieces} pieces cannot go to "
        "pages of {target_bytes} bytes in {target_pieces} pieces"
    )


class ParcelMismatch(CacheError):
    """Blocks can be handed over only between engines with equal blocks."""

    fields: dict[str, Any]
    message = "blocks of {sent} were sent to an engine with blocks of {expected}"

    def shown(self) -> dict[str, object]:
        """Describe the fields for the message: shapes and types."""
        return {
            name: ", ".join(f"{list(each.page_shape)} {each.dtype}" for each in layouts)
            for name, layouts in self.fields.items()
        }


class BatchNotNext(CacheError):
    """CMD-ONCE: each batch must be applied exactly once, in number order."""

    message = "batch {number} is applied, but batch {expected} is next"


class UnsupportedCommand(CacheError):
    """This runtime does not know the kind of a command."""

    message = "batch {number} holds a command of kind {kind}, which this runtime does not apply"


class BadSegments(CacheError):
    """Segment numbers must not fall within a batch."""

    message = "batch {number}: segment {segment} follows segment {previous}"


class TableOutOfRange(CacheError):
    """A table change lies outside the persistent tensors."""

    message = "{name} {value} is outside the block tables, which take {name}s 0 to {last}"


class TableGap(CacheError):
    """A row's table would be set or cut past its end."""

    message = "row {row}, group {group_id}: the table would reach {length} blocks with one missing"


class SlotsOverflow(CacheError):
    """A step has more tokens than the slot mapping holds."""

    message = "{num_tokens} slots are requested, the slot mapping holds {max_tokens}"


class BeyondTable(CacheError):
    """Slots are requested for positions that the row's table does not cover."""

    message = (
        "row {row}, group {group_id}: position {position} needs {needed} blocks, "
        "the table has {length}"
    )


class StaleRead(CacheError):
    """A block without owner, or content that was never written, was read."""

    message = "step {step}, request {request}: reads block {block}: {reason}"


class WrongContent(CacheError):
    """Content of another request, or of another position, was read."""

    message = (
        "step {step}, request {request}: group {group_id}, block {block} does not hold position "
        "{position}"
    )


class TablesDiffer(CacheError):
    """A row's table differs from the manager's state."""

    message = "row {row}, group {group_id}: the table is {found}, expected {expected}"


class NotSkipped(CacheError):
    """Batches can be skipped only forward."""

    message = "batch {number} cannot be the next one, {expected} is"


class UnownedWrite(CacheError):
    """A command writes a block without owner."""

    message = "step {step}: {command} writes block {block}, which has no owner"


class NoTier(CacheError):
    """A batch stores or loads, but the runtime has no external tier."""

    message = "batch {number} holds operation {operation}, and there is no tier to carry it out"


class TierUnusable(CacheError):
    """A tier cannot be set up."""

    message = "{place}: {reason}"


class TierError(CacheError):
    """The base class of errors that make a single store or load fail; its block is unchanged."""


class BlockMissing(TierError):
    """The tier has nothing under this key."""

    message = "there is no block {key} in {place}"


class TierFailed(TierError):
    """The tier could not be read or written."""

    message = "block {key} in {place}: {reason}"
