# SPDX-License-Identifier: Apache-2.0
"""Images in prompts, and an encoder whose cache and budget are too small for all of them.

Images follow from the tokens, so prompts that begin alike have the same ones, and few images occur
in many prompts. The model that the runs name takes no images, so its scheduler gets an encoder
cache here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

BETWEEN = 8
"""Tokens between places where an image may begin."""
CACHE_SIZE, BUDGET = 40, 32
"""Embeddings in the encoder's cache, and those that it computes in a step."""


def images_of(prompt: Sequence[int]) -> list[MultiModalFeatureSpec]:
    """Return the images of a prompt, in order: of up to 25 kinds, each with its own length."""
    images = []
    place = BETWEEN
    while place + 2 <= len(prompt):
        first, second = prompt[place - 2 : place]
        kind, length = f"image {first} {second}", 4 + 5 * first + second
        if first != second:
            if place + length >= len(prompt):
                break  # so that longer prompts have the same images, and this one
            position = PlaceholderRange(offset=place, length=length)
            item = MultiModalKwargsItem.dummy()
            images.append(MultiModalFeatureSpec(item, "image", kind, position))
            place += length
        place += BETWEEN
    return images


def add_encoder(scheduler: Any) -> None:
    """Give a scheduler what it has for a model that takes images."""
    scheduler.max_num_encoder_input_tokens = BUDGET
    scheduler.encoder_cache_manager = EncoderCacheManager(CACHE_SIZE)
