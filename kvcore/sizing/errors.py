# SPDX-License-Identifier: Apache-2.0
"""Errors of sizing, each with a type of its own.

Errors of a file name the file and the field; errors of sizes name both sides of the comparison.
`fields` has sizes in bytes, which the messages show in larger units.
"""

from __future__ import annotations

import json
from typing import Any

from kvcore.sizing.amounts import format_gib, format_memory, listed, longest_hint
from kvcore.types.errors import KvcoreError


class SizingError(KvcoreError):
    """The base class of the errors in this file."""

    fields: dict[str, Any]


class UnknownDtype(SizingError):
    """The number format is not supported for a cache."""

    message = "dtype {value} is not known; known are {known}"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {**self.fields, "known": listed(self.fields["known"])}


class InvalidMemory(SizingError):
    """The value is not an amount of memory, or an impossible one."""

    message = "memory {value}: {reason}"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        value = self.fields["value"]
        return {
            **self.fields,
            "value": f"{value} bytes" if isinstance(value, int) else repr(value),
        }


class WindowOnLatent(SizingError):
    """Latent attention (MLA) has no window."""

    message = "a layer of kind {kind} with window {window} cannot keep MLA's latent vectors"


class NoLayers(SizingError):
    """No layer has a cache."""

    message = "no layer has a cache: there is nothing to size"


class NoInterval(SizingError):
    """Nothing says how often the states of a model are kept."""

    message = (
        "no layer keeps all tokens, whose blocks would give it: say how many tokens lie between"
        " two kept states (--checkpoint-interval)"
    )


class NoStates(SizingError):
    """An interval between kept states is given, and the model has no states."""

    message = (
        "no layer keeps a state, of which one would be kept every {interval} tokens: omit"
        " --checkpoint-interval"
    )


class UnknownLayer(SizingError):
    """A group names a layer that the model does not have."""

    message = "group {group_id} names layer {layer}, which the model does not have"


class EmptyGroup(SizingError):
    """A group must have at least one layer."""

    message = "group {group_id} has no layer"


class SpecsDiffer(SizingError):
    """The layers of a group must keep their cache alike."""

    message = "group {group_id}: layer {layer} is {spec}, its first layer {first_layer} {first}"


class MixedSpecs(SizingError):
    """One group cannot serve layers of several kinds; `make_grouped_config` makes several."""

    message = "the layers have {count} kinds that do not become one: {type_ids}"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {**self.fields, "type_ids": listed(self.fields["type_ids"])}


class NoCacheMemory(SizingError):
    """No memory is left for the cache."""

    message = "no memory is available for the cache blocks ({available} bytes): give the cache more"


class WeightsDoNotFit(NoCacheMemory):
    """The model's weights take all the usable memory."""

    message = (
        "the weights take {weights_bytes} of {usable_bytes} ({utilization} of {gpu_bytes}): "
        "nothing is left for the cache"
    )

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return self.fields | {
            name: format_memory(self.fields[name])
            for name in ("weights_bytes", "usable_bytes", "gpu_bytes")
        }


class NotEnoughMemory(SizingError):
    """One request of full length does not fit."""

    message = (
        "one request of {max_model_len} tokens needs {needed_bytes} of KV cache, but "
        "{available_bytes} are available{hint}"
    )

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {
            **self.fields,
            "needed_bytes": format_gib(self.fields["needed_bytes"]),
            "available_bytes": format_gib(self.fields["available_bytes"]),
            "hint": longest_hint(self.fields["longest_model_len"]),
        }


class NotEnoughBlocks(SizingError):
    """The pool has fewer blocks than one request of full length needs."""

    message = (
        "one request of {max_model_len} tokens needs {needed} blocks{null}, num_blocks is "
        "{num_blocks}{hint}"
    )

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {
            **self.fields,
            "null": " with the null block" if self.fields["null_block"] else "",
            "hint": longest_hint(self.fields["longest_model_len"]),
        }


class GroupCountDiffers(SizingError):
    """Workers under one manager must have the same groups."""

    message = "rank {rank} has {count} groups ({type_ids}), rank 0 has {expected} ({first})"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return self.fields | {name: listed(self.fields[name]) for name in ("type_ids", "first")}


class GroupKindDiffers(SizingError):
    """Workers under one manager must keep their groups alike."""

    message = "rank {rank}: group {group_id} is {spec}, on rank 0 it is {first}"


class GroupLayersDiffer(SizingError):
    """Workers that split one model's heads must have the same layers in each group."""

    message = "rank {rank}: group {group_id} lacks {missing} of rank 0 and has {extra} besides"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return self.fields | {name: listed(self.fields[name]) for name in ("missing", "extra")}


class UnreadableModel(SizingError):
    """The file does not describe a model."""

    message = "{file}: {reason}"


class MissingField(SizingError):
    """The description lacks a field that the sizes depend on."""

    message = "{file}: field {field} is missing: {reason}"


class InvalidField(SizingError):
    """A field has an impossible value."""

    message = "{file}: field {field} is {value}, must be {expected}"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {**self.fields, "value": json.dumps(self.fields["value"])}


class ContradictoryFields(SizingError):
    """Two fields contradict each other."""

    message = "{file}: fields {first} and {second} contradict each other: {reason}"


class UnsupportedModel(SizingError):
    """The model caches something other than blocks of keys and values."""

    message = "{file}: field {field} is {value}: {reason}{of_type}"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        value, of_type = self.fields["value"], ""
        if self.fields["field"] != "model_type" and "model_type" in self.fields:
            family = self.fields["model_type"]
            of_type = f" (model_type is {json.dumps(family)})" if family else " (no model_type)"
        shown = "set" if isinstance(value, dict | list) else json.dumps(value)
        return {**self.fields, "value": shown, "of_type": of_type}


class HeadsDoNotSplit(SizingError):
    """Tensor parallelism must give every device the same number of heads, or a copy of one."""

    message = "{num_heads} {heads} do not split over {tensor_parallel} devices"


class UnevenBlocks(SizingError):
    """Under context parallelism each rank keeps the same number of a block's tokens."""

    message = "blocks of {block_size} tokens do not split over {context_parallel} ranks"


class UnevenHashes(SizingError):
    """Hits end at multiples of a hash's tokens, which must fill the blocks of every group."""

    message = "hashes of {hash_block_size} tokens do not fill blocks of {block_sizes} tokens"

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return {**self.fields, "block_sizes": listed(map(str, self.fields["block_sizes"]))}
