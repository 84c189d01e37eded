# SPDX-License-Identifier: Apache-2.0
"""Checks for groups of encoder-decoder models in V0's managers.

A group without `is_encoder_decoder` has no encoder. Neither a sliding window nor prefix caching
works with an encoder; the error's fields name the request. Source: S002-72.
"""

from __future__ import annotations

from typing import Any

from kvcore.legacy.v0.errors import NotSupported, require
from kvcore.legacy.v0.sequences import GroupLike, SequenceLike

STR_NOT_IMPL_ENC_DEC_SWA = "a sliding window is not supported with an encoder yet"
STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE = "prefix caching is not supported with an encoder yet"
"""The full texts of the errors, which engines may compare as they do with the original's."""


def encoder_of(seq_group: GroupLike) -> SequenceLike | None:
    """Return a group's encoder sequence; None if it has no encoder. Raises WrongCall."""
    group: Any = seq_group
    has_encoder = getattr(group, "is_encoder_decoder", None)
    if has_encoder is None or not has_encoder():
        return None
    encoder: SequenceLike | None = group.get_encoder_seq()
    if encoder is None:
        require(False, "request {name!r} has no encoder sequence", name=group.request_id)
    return encoder


def check_no_caching_or_swa_for_blockmgr_encdec(block_mgr: Any, seq_group: GroupLike) -> None:
    """Raise NotSupported if a group has an encoder and the manager a window or caching."""
    if block_mgr.max_block_sliding_window is None and not block_mgr.enable_caching:
        return
    group: Any = seq_group
    has_encoder = getattr(group, "is_encoder_decoder", None)
    if has_encoder is None or not has_encoder():
        return
    window, name = block_mgr.sliding_window, group.request_id
    text = STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE if window is None else STR_NOT_IMPL_ENC_DEC_SWA
    raise NotSupported(reason=text, request=name, window=window)
