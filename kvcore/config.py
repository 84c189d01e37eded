# SPDX-License-Identifier: Apache-2.0
"""What a manager is made for: pool sizes, groups and the options of the core.

Rules: a configuration that cannot work is refused when it is made, with the numbers that would
work. Options compose; none is a fork of the code. Twin: rust/src/config.rs.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import attrs

from kvcore.errors import InvalidConfig

Eviction = Literal["lru", "uncached_first"]
Duplicates = Literal["keep", "merge"]

MAX_BLOCKS = 2**31 - 1
MAX_GROUPS = 64
NO_LIMIT = 2**31 - 1

_EVICTIONS = ("lru", "uncached_first")
_DUPLICATES = ("keep", "merge")
_PROCESS_SEED = os.urandom(32)


@attrs.frozen
class Group:
    """Layers that share block size and retention rule; here full attention.

    block_size: tokens a block. zero_new_blocks: a `Zero` follows each `Allocate` that no copy
    fills.
    """

    block_size: int = 16
    zero_new_blocks: bool = attrs.field(default=False, kw_only=True)


@attrs.frozen
class Config:
    """Sizes and options of one manager.

    num_blocks: blocks of the device pool, the null block included. block_size: tokens a block, for
    the one default group; `groups` replaces it. num_host_blocks: blocks of the host tier, 0 for
    none. max_model_len: longest request in tokens, None for no limit; the pool must hold one such
    request. eviction: which freed block leaves first. duplicates: whether a second block of one
    content stays. num_preallocate_tokens: room added behind a request when it grows. hash_seed:
    root of the key chains, random per process unless given. Raises InvalidConfig.
    """

    num_blocks: int
    block_size: int = 16
    groups: tuple[Group, ...] = attrs.field(default=(), kw_only=True)
    num_host_blocks: int = attrs.field(default=0, kw_only=True)
    max_model_len: int | None = attrs.field(default=None, kw_only=True)
    enable_caching: bool = attrs.field(default=True, kw_only=True)
    null_block: bool = attrs.field(default=True, kw_only=True)
    eviction: Eviction = attrs.field(default="lru", kw_only=True)
    duplicates: Duplicates = attrs.field(default="keep", kw_only=True)
    num_preallocate_tokens: int = attrs.field(default=0, kw_only=True)
    enable_events: bool = attrs.field(default=False, kw_only=True)
    hash_seed: bytes = attrs.field(default=_PROCESS_SEED, kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_options(self)
        if not self.groups:
            object.__setattr__(self, "groups", (Group(self.block_size),))
        _check_groups(self)
        object.__setattr__(self, "block_size", self.groups[0].block_size)
        _check_sizes(self)

    @property
    def num_usable_blocks(self) -> int:
        """Device blocks that can hold tokens."""
        return self.num_blocks - int(self.null_block)

    @property
    def length_limit(self) -> int:
        """Longest request in tokens, as a number."""
        return NO_LIMIT if self.max_model_len is None else self.max_model_len

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of so many tokens holds over all groups."""
        return sum(-(-num_tokens // group.block_size) for group in self.groups)


def _check_options(config: Config) -> None:
    for name in ("enable_caching", "null_block", "enable_events"):
        if not isinstance(getattr(config, name), bool):
            _refuse(config, name, "must be True or False")
    if config.eviction not in _EVICTIONS:
        _refuse(config, "eviction", f"must be one of {', '.join(_EVICTIONS)}")
    if config.duplicates not in _DUPLICATES:
        _refuse(config, "duplicates", f"must be one of {', '.join(_DUPLICATES)}")
    if not isinstance(config.hash_seed, bytes):
        _refuse(config, "hash_seed", "must be bytes")
    _check_count(config, "num_host_blocks", 0)
    _check_count(config, "num_preallocate_tokens", 0)
    if config.max_model_len is not None:
        _check_count(config, "max_model_len", 1)


def _check_groups(config: Config) -> None:
    if len(config.groups) > MAX_GROUPS:
        _refuse(config, "groups", f"at most {MAX_GROUPS} groups")
    for group in config.groups:
        size = group.block_size
        if not _is_int(size) or not 1 <= size <= MAX_BLOCKS:
            raise InvalidConfig(field="block_size", value=size, reason="must be at least 1")
        if size != config.groups[0].block_size:
            sizes = ", ".join(str(each.block_size) for each in config.groups)
            raise InvalidConfig(
                field="groups", value=sizes, reason="all groups must have one block size"
            )


def _check_sizes(config: Config) -> None:
    _check_count(config, "num_blocks", 1)
    null = " and the null block" if config.null_block else ""
    least = len(config.groups)
    if config.num_usable_blocks < least:
        blocks = "1 block" if least == 1 else f"{least} blocks"
        reason = f"one request needs {blocks}{null}, so {least + int(config.null_block)}"
        _refuse(config, "num_blocks", reason)
    if config.max_model_len is not None:
        least = config.blocks_for(config.max_model_len)
        if config.num_usable_blocks < least:
            reason = (
                f"one request of max_model_len={config.max_model_len} tokens needs {least} "
                f"blocks{null}, so {least + int(config.null_block)}"
            )
            _refuse(config, "num_blocks", reason)


def _check_count(config: Config, name: str, least: int) -> None:
    value = getattr(config, name)
    if not _is_int(value) or value < least:
        _refuse(config, name, f"must be an integer of at least {least}")
    if value > MAX_BLOCKS:
        _refuse(config, name, f"must be at most {MAX_BLOCKS}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(config: Config, name: str, reason: str) -> None:
    raise InvalidConfig(field=name, value=repr(getattr(config, name)), reason=reason)
