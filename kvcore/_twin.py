# SPDX-License-Identifier: Apache-2.0
"""The compiled twin: the only module that imports it.

If the extension is missing, requesting the backend raises `BackendMissing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcore.types.config import Config
from kvcore.types.errors import BackendMissing
from kvcore.types.keys import Hashing
from kvcore.types.values import Request

try:
    import kvcore._rust as _rust
except ImportError:
    _missing = True
else:
    _missing = False

if TYPE_CHECKING:
    Backend: TypeAlias = _rust.Manager
    Blocks: TypeAlias = _rust.Tiers
    LostKeys: TypeAlias = _rust.LostKeys
    SlotChecker: TypeAlias = _rust.SlotChecker


def available() -> bool:
    """Whether the compiled twin is installed."""
    return not _missing


def make_backend(config: Config) -> Backend:
    """Make a manager backend over the twin. Raises BackendMissing, PoolTooLarge."""
    _check_there()
    return _rust.Manager(config)


def make_tiers(num_blocks: int, num_host_blocks: int, **options: Any) -> Blocks:
    """Make the blocks of `kvcore/legacy/blocks/blocks.py` over the twin. Raises BackendMissing,
    InvalidConfig, PoolTooLarge.
    """
    _check_there()
    return _rust.Tiers(num_blocks, num_host_blocks, **options)


def make_lost_keys(num_blocks: int) -> LostKeys:
    """Make the twin of `kvcore/explain/lost_keys.py`. Raises BackendMissing."""
    _check_there()
    return _rust.LostKeys(num_blocks)


def make_slot_checker(
    groups: Sequence[tuple[Any, ...]], num_blocks: int, full: bool
) -> SlotChecker:
    """Make the twin of `kvcore/sanitizer/slot_checker.py`. Raises BackendMissing."""
    _check_there()
    return _rust.SlotChecker(groups, num_blocks, full)


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash one full block in the twin, like `hash_block` of kvcore.hashing with its defaults.

    Raises BackendMissing, InvalidKey, InvalidToken.
    """
    if _missing:
        _check_there()
    return _rust.hash_block(parent, tokens)


def hash_blocks(
    tokens: Sequence[int], parent: bytes, block_size: int, hashing: Hashing
) -> list[bytes]:
    """Hash the full blocks of tokens after a parent in the twin. Raises BackendMissing,
    InvalidToken.
    """
    _check_there()
    request = Request("hashed", tokens)
    hashes: list[bytes] = _rust.hash_blocks(request, parent, block_size, hashing=hashing)
    return hashes


def crc32c(data: bytes | bytearray) -> int:
    """Compute the checksum of records in the twin. Raises BackendMissing."""
    _check_there()
    return _rust.crc32c(data)


def check_world(world: Any, **options: Any) -> dict[str, Any]:
    """Run the compiled search of the checker: kvcore/check/search/twin_search.py.

    Raises BackendMissing.
    """
    _check_there()
    found: dict[str, Any] = _rust.check_world(world, **options)
    return found


def check_state(data: bytes) -> list[str]:
    """Return the names of the properties that a state's bytes break, checked in the twin. Raises
    BackendMissing, DamagedState.
    """
    _check_there()
    return _rust.check_state(data)


def _check_there() -> None:
    if _missing:
        reason = "the extension kvcore._rust is not built; `make twin` builds it"
        raise BackendMissing(backend="rust", reason=reason)
