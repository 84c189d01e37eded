# SPDX-License-Identifier: Apache-2.0
"""Calls of a record by keys on a manager: each comes with the hashes of the blocks that it fills.

A hash stands for all tokens up to its block. So it is given only to a request which has as many
tokens as in the record; one that has lost some gets no more hashes, and its new blocks are never
found.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from kvcore.manager import KVCacheManager
from kvcore.record.errors import RecordNeedsText
from kvcore.types.config import Config
from kvcore.types.errors import KvcoreError

HASHED = ("add_request", "add_block_hashes")
"""Calls that have hashes in their arguments."""
NONE: Mapping[str, Filled] = {}


@attrs.frozen
class Filled:
    """Hashes of the next blocks of a request. before: its tokens before the call that fills them.

    fine: tokens per hash.
    """

    before: int
    hashes: list[bytes]
    fine: int

    def per(self, size: int) -> list[bytes]:
        """Return the hashes of blocks of this size, a multiple of `fine`."""
        first, scale = self.before // self.fine, size // self.fine
        return [each for place, each in enumerate(self.hashes, first + 1) if not place % scale]


def check_variant(recorded: Config, config: Config, path: object) -> None:
    """Check that hashes alone tell how a configuration would have run. Raises RecordNeedsText."""
    fine, size = recorded.hash_block_size, config.hash_block_size
    what = None
    if size % fine:
        what = f"a run with blocks of {size} tokens, no multiple of the recorded {fine},"
    elif config.hashing != recorded.hashing:
        what = f"a run with the hashing {config.hashing} instead of {recorded.hashing}"
    elif config.enable_caching and not recorded.enable_caching:
        what = "a run with prefix caching, which was off,"
    elif not set(config.floors) <= set(recorded.floors):
        what = "a run with a floor for a salt that had none"
    if what is not None:
        raise RecordNeedsText(what=what, path=str(path))


def give_hashes(manager: KVCacheManager, filled: Mapping[str, Filled]) -> None:
    """Give requests the hashes of the blocks that the next call fills.

    If that call is refused, they get the same hashes again when it is made later.
    """
    size = manager.config.hash_block_size
    for request_id, each in filled.items():
        with suppress(KvcoreError):  # a request that is not known here
            if manager.num_tokens(request_id) == each.before:
                manager._core.give_hashes(request_id, each.before // size, each.per(size))


def with_larger_blocks(
    name: str, arguments: dict[str, Any], filled: Mapping[str, Filled], scale: int
) -> dict[str, Any]:
    """Return the arguments of a call in HASHED, for blocks that are `scale` times as large."""
    if name == "add_block_hashes":
        (each,) = filled.values()
        return arguments | {"hashes": each.per(scale * each.fine)}
    request = arguments["request"]
    coarse = list(request.block_hashes)[scale - 1 :: scale]
    return {"request": attrs.evolve(request, block_hashes=coarse)}
