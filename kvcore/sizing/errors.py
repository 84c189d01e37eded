# SPDX-License-Identifier: Apache-2.0
"""What sizing refuses, each as a type of its own.

What is read from a file names the file and the field; sizes
that do not fit name both sides of the comparison. `fields` also holds what programs need and no
sentence does: the sizes in bytes.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class UnknownDtype(KvcoreError):
    """A number format that no cache here is kept in."""

    message = "dtype {value} is not known; known are {known}"


class InvalidMemory(KvcoreError):
    """What is no amount of memory, or none that a machine has."""

    message = "memory {value}: {reason}"


class WindowOnLatent(KvcoreError):
    """Latent attention (MLA) has no window."""

    message = "a layer of kind {kind} with window {window} cannot keep MLA's latent vectors"


class NoLayers(KvcoreError):
    """There is no layer with a cache."""

    message = "no layer has a cache: there is nothing to size"


class UnknownLayer(KvcoreError):
    """A group names a layer that the model does not have."""

    message = "group {group_id} names layer {layer}, which the model does not have"


class EmptyGroup(KvcoreError):
    """A group has at least one layer."""

    message = "group {group_id} has no layer"


class SpecsDiffer(KvcoreError):
    """Layers of one group keep their cache alike."""

    message = "group {group_id}: layer {layer} is {spec}, its first layer {first_layer} {first}"


class MixedSpecs(KvcoreError):
    """One group cannot serve layers of several kinds; `make_grouped_config` makes several."""

    message = "the layers have {count} kinds that do not become one: {type_ids}"


class NoCacheMemory(KvcoreError):
    """Nothing is left for the cache."""

    message = "no memory is available for the cache blocks ({available} bytes): give the cache more"


class WeightsDoNotFit(NoCacheMemory):
    """The model's weights take all the memory that is used."""

    message = (
        "the weights take {weights} of {usable} ({utilization} of {gpu}): nothing is left for the "
        "cache"
    )


class NotEnoughMemory(KvcoreError):
    """One request of full length does not fit."""

    message = (
        "one request of {max_model_len} tokens needs {needed} of KV cache, {available} are "
        "available{hint}"
    )


class NotEnoughBlocks(KvcoreError):
    """A pool that is set to fewer blocks than one request of full length needs."""

    message = (
        "one request of {max_model_len} tokens needs {needed} blocks{null}, num_blocks is "
        "{num_blocks}{hint}"
    )


class GroupCountDiffers(KvcoreError):
    """Workers under one manager have the same groups."""

    message = "rank {rank} has {count} groups ({type_ids}), rank 0 has {expected} ({first})"


class GroupKindDiffers(KvcoreError):
    """Workers under one manager keep their groups alike."""

    message = "rank {rank}: group {group_id} is {spec}, on rank 0 it is {first}"


class GroupLayersDiffer(KvcoreError):
    """Workers that split one model's heads have the same layers in each group."""

    message = "rank {rank}: group {group_id} lacks {missing} of rank 0 and has {extra} besides"


class UnreadableModel(KvcoreError):
    """A file that holds no description of a model."""

    message = "{file}: {reason}"


class MissingField(KvcoreError):
    """A description without something that the sizes follow from."""

    message = "{file}: field {field} is missing: {reason}"


class InvalidField(KvcoreError):
    """A field whose value no model has."""

    message = "{file}: field {field} is {value}, must be {expected}"


class ContradictoryFields(KvcoreError):
    """Two fields that cannot both be right."""

    message = "{file}: fields {first} and {second} contradict each other: {reason}"


class UnsupportedModel(KvcoreError):
    """A model that keeps something else than blocks of keys and values."""

    message = "{file}: field {field} is {value}: {reason}"


class HeadsDoNotSplit(KvcoreError):
    """Tensor parallelism gives every device as many heads, or a copy of one."""

    message = "{num_heads} {heads} do not split over {tensor_parallel} devices"
