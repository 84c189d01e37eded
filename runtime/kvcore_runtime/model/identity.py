# SPDX-License-Identifier: Apache-2.0
"""A digest of everything that determines the keys and values which a model writes into blocks.

Stores name blocks by tokens, which do not identify the model. So put this digest into the hash seed
of the keys, so that other models find nothing, and into the description of files, so that those of
another model are recognised. It covers the model's shape (RoPE, the visibility of each layer), its
mode, element type and kind of device, every weight, and the places of its layers in the groups'
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from kvcore import Group
from kvcore_runtime.cache.layer_groups import place_layers
from kvcore_runtime.model.model import Llama, LlamaWeights


def identify(model: Llama, groups: Sequence[Group]) -> str:
    """Return the digest of a model whose layers are in a manager's groups, 64 hexadecimal digits.

    Reads every weight once, from the device. Raises GroupsDoNotHoldModel, UnequalPages.
    """
    digest = hashlib.sha256(describe(model, groups).encode())
    for name, weight in _named(model.weights):
        digest.update(f"\n{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def describe(model: Llama, groups: Sequence[Group]) -> str:
    """Return what determines keys and values besides the weights: the model's shape, its mode, the
    kind of its device, and the places of its layers; not its longest request. Raises as `identify`
    does.
    """
    visibilities = model.config.layer_visibilities
    config = attrs.evolve(model.config, visibilities=visibilities, max_model_len=1)
    layers = place_layers(config.visibilities, groups)
    return repr((config, model.invariant, model.device.type, layers.places, layers.block_sizes))


def _named(weights: LlamaWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights by name, without a head that is the embedding itself."""
    yield "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for field in attrs.fields(type(layer)):
            yield f"layer {index} {field.name}", getattr(layer, field.name)
    yield "norm", weights.norm
    if weights.head is not weights.embedding:
        yield "head", weights.head
