# SPDX-License-Identifier: Apache-2.0
"""Managers with one mistake each, which the checks of a user's own manager must find."""

from __future__ import annotations

from typing import Any

from kvcore import Config, KVCacheManager

CONFIG = Config(2, 2, null_block=False)


class Wrong(KVCacheManager):
    """The Python manager with a mistake in one method."""

    def __init__(self) -> None:
        super().__init__(CONFIG, "python")


class Raises(Wrong):
    def free(self, request_id: str) -> None:
        raise RuntimeError(request_id)


class Refuses(Wrong):
    def allocate_slots(self, *_: Any, **__: Any) -> Any:
        return None


class Stops(Wrong):
    def append(self, *_: Any, **__: Any) -> Any:
        return None


class Mixes(Wrong):
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple([0 for _ in ids] for ids in super().get_block_ids(request_id))


class Unmade(Wrong):
    def __init__(self) -> None:
        raise OSError("no pool")
