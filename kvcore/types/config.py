# SPDX-License-Identifier: Apache-2.0
"""A manager's configuration: pool sizes, groups and the options of the core.

Invariants: a configuration that cannot work is refused when it is made, and the error names numbers
that would work. All options can be combined.
Twin: rust/src/types/config.rs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Literal, NoReturn, get_args

import attrs
from immutables import Map

from kvcore.types.arguments import read_count, read_int, read_scalars
from kvcore.types.errors import GroupsDoNotFit, InvalidConfig, InvalidExtraKey
from kvcore.types.extra_inputs import check_text
from kvcore.types.groups import Group, admission_cap, most_states
from kvcore.types.keys import HASHINGS, MAX_GROUPS, Hashing
from kvcore.types.policy import EvictionPolicy

EvictionName = Literal[
    "lru", "uncached_first", "queue_aware", "lru2", "s3fifo", "learned", "retention"
]
Eviction = EvictionName | EvictionPolicy
Duplicates = Literal["keep", "merge"]
Publish = Literal["scheduled", "completed"]

MAX_BLOCKS = 2**31 - 1
MAX_EPOCH = 2**31 - 1
MAX_FLOORS = 16
MAX_IN_FLIGHT = 62
NO_LIMIT = 2**31 - 1


class _Default(int):
    """A number that was left at its default."""


DEFAULT_BLOCK_SIZE: int = _Default(16)

EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
_DUPLICATES = ("keep", "merge")
_PUBLISH = ("scheduled", "completed")
ATTRIBUTES = {"hash_block_size": "hash_unit"}  # arguments that are kept under another name
_PROCESS_SEED = os.urandom(32).hex().encode()


@attrs.frozen
class Config:
    """Sizes and options of one manager.

    num_blocks: blocks of the device pool, the null block included. block_size: tokens per block, of
    the default group or of the first given. num_host_blocks: blocks of the host tier, 0 for none.
    max_model_len: longest request in tokens, None for no limit; the pool must hold it.
    max_num_batched_tokens: most tokens that one step computes of a request, None for max_model_len;
    it bounds what a windowed group holds. eviction: the name of the policy that decides which freed
    block leaves first, or your own `EvictionPolicy` (Python backend only). duplicates: whether a
    second block with the same content is kept. num_preallocate_tokens: slots allocated ahead when a
    request grows. watermark_blocks: blocks that an admission leaves free. use_eagle: a hit leaves
    its last matched block to be computed, in the groups flagged `eagle`, or in all but state groups
    if none is flagged. record_new_blocks: keep the ids that `take_new_block_ids` returns. hashing:
    "sha256", vLLM's "sha256_cbor", the faster "siphash", for which only who sees hashes can
    construct collisions, or "xxh3", for which anyone can. hash_seed: root of the key chains, a
    secret; default: random per process; UTF-8 text for sha256_cbor. max_in_flight: taken batches
    that may be in flight at a time; 0: taking a batch completes it. publish: whether full blocks
    become findable when their last token is scheduled, or when its batch is completed. hide_salts:
    events contain a digest of a request's salt instead of the salt. epoch: number of the weights at
    the start; `advance_epoch` raises it. max_pinned_blocks: most blocks that pins of prefixes hold,
    None for a quarter of the pool, or what one of max_model_len leaves if that is less; a number
    needs max_model_len. floors: for requests of a cache salt, how many blocks of their content
    requests of other salts leave cached; needs max_model_len. hash_block_size: tokens per hash, a
    divisor of every block size; below their greatest common divisor, the default, hits may end
    inside blocks, at its multiples. Raises InvalidConfig, GroupsDoNotFit.
    """

    num_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    groups: tuple[Group, ...] = attrs.field(default=(), kw_only=True)
    num_host_blocks: int = attrs.field(default=0, kw_only=True)
    max_model_len: int | None = attrs.field(default=None, kw_only=True)
    max_num_batched_tokens: int | None = attrs.field(default=None, kw_only=True)
    enable_caching: bool = attrs.field(default=True, kw_only=True)
    null_block: bool = attrs.field(default=True, kw_only=True)
    eviction: Eviction = attrs.field(default="lru", kw_only=True)
    duplicates: Duplicates = attrs.field(default="keep", kw_only=True)
    num_preallocate_tokens: int = attrs.field(default=0, kw_only=True)
    watermark_blocks: int = attrs.field(default=0, kw_only=True)
    use_eagle: bool = attrs.field(default=False, kw_only=True)
    enable_events: bool = attrs.field(default=False, kw_only=True)
    record_new_blocks: bool = attrs.field(default=False, kw_only=True)
    hashing: Hashing = attrs.field(default="sha256", kw_only=True)
    hash_seed: bytes = attrs.field(default=_PROCESS_SEED, kw_only=True, repr=False)
    max_in_flight: int = attrs.field(default=0, kw_only=True)
    publish: Publish = attrs.field(default="scheduled", kw_only=True)
    hide_salts: bool = attrs.field(default=False, kw_only=True)
    epoch: int = attrs.field(default=0, kw_only=True)
    max_pinned_blocks: int | None = attrs.field(default=None, kw_only=True)
    floors: Mapping[str, int] = attrs.field(default=Map(), kw_only=True, repr=False)
    hash_unit: int | None = attrs.field(
        default=None, kw_only=True, repr=False, alias="hash_block_size"
    )
    """The argument hash_block_size; None if it is the default."""
    hash_block_size: int = attrs.field(init=False, eq=False)
    """Number of tokens per block hash."""
    has_tails: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether hits may end inside blocks, which then have tail keys."""
    hit_alignment: int = attrs.field(init=False, eq=False, repr=False)
    """Hits end at multiples of this: of the tokens per block hash if they may end inside blocks,
    else whole blocks of all groups but state groups, whose checkpoints decide which ones.
    """
    block_alignment: int = attrs.field(init=False, eq=False, repr=False)
    """The least number of tokens in whole blocks of all groups."""
    length_limit: int = attrs.field(init=False, eq=False, repr=False)
    """The longest request in tokens, never None."""
    tracks_batches: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether batches remember their effects on requests."""
    has_windows: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether any group gives back blocks that no later query reads."""
    has_states: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether any group keeps recurrent states."""
    scales: tuple[int, ...] = attrs.field(init=False, eq=False, repr=False)
    """Number of hashes per block of each group."""

    def __attrs_post_init__(self) -> None:
        _read_floors(self)
        read_scalars(self)
        _check_options(self)
        groups = self.groups
        if not isinstance(groups, tuple | list) or not all(isinstance(g, Group) for g in groups):
            _refuse(self, "groups", "must be a tuple of Group")
        if not self.groups:
            default = self.block_size is DEFAULT_BLOCK_SIZE
            size = int(DEFAULT_BLOCK_SIZE) if default else self.block_size
            object.__setattr__(self, "groups", (Group(size),))
        _check_groups(self)
        sizes = [group.block_size for group in self.groups]
        if self.block_size is not DEFAULT_BLOCK_SIZE and self.block_size != sizes[0]:
            _refuse(self, "block_size", f"the first group has {sizes[0]} tokens per block")
        object.__setattr__(self, "block_size", sizes[0])
        _check_hash_unit(self, common := math.gcd(*sizes))
        limit, fine = self.max_model_len, self.hash_unit or common
        has_tails = fine < common and self.enable_caching
        whole = (g.block_size for g in self.groups if not g.is_state)
        derived = {
            "hash_unit": fine if fine < common else None,
            "hash_block_size": fine,
            "has_tails": has_tails,
            "hit_alignment": fine if has_tails else math.lcm(fine, *whole),
            "block_alignment": math.lcm(*sizes),
            "length_limit": NO_LIMIT if limit is None else limit,
            "tracks_batches": self.max_in_flight > 0 or self.publish == "completed",
            "has_windows": any(group.is_windowed for group in self.groups),
            "has_states": any(group.is_state for group in self.groups),
            "scales": tuple(size // fine for size in sizes),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _check_sizes(self)

    @property
    def host_eviction(self) -> Eviction:
        """The policy of the host tier, whose blocks have no keys."""
        if self.eviction == "retention":
            return "uncached_first"
        return self.eviction if self.eviction in ("lru", "uncached_first") else "lru"

    @property
    def num_usable_blocks(self) -> int:
        """Device blocks that can hold tokens."""
        return self.num_blocks - int(self.null_block)

    @property
    def most_pinned(self) -> int:
        """Most blocks that pins of prefixes hold."""
        if self.max_pinned_blocks is not None:
            return self.max_pinned_blocks
        spare = self.num_usable_blocks - self.watermark_blocks
        if self.max_model_len is not None:
            spare -= self.blocks_for(self.max_model_len)
        return min(self.num_usable_blocks // 4, spare - sum(self.floors.values()))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Return the salts that have floors, in the order of their tenants' numbers, from 1."""
        return tuple(sorted(self.floors))

    def tenant_of(self, salt: str | None) -> int:
        """Return the tenant of requests with this salt; 0 if it has no floor."""
        return 1 + self.tenants.index(salt) if salt in self.floors else 0

    def max_rows(self, num_requests: int) -> int:
        """Return how many rows block tables need for `num_requests` requests at a time.

        This includes a row for each request that left in the open batch or in a batch in flight. A
        request that is added and removed in the same batch needs one more. Raises InvalidCount.
        """
        return read_count("num_requests", num_requests) * (self.max_in_flight + 2)

    def drops_last_hit(self, group_id: int) -> bool:
        """Return whether a hit leaves this group's last matched block to be computed."""
        group, flagged = self.groups[group_id], any(each.eagle for each in self.groups)
        return self.use_eagle and (group.eagle or not (flagged or group.is_state))

    def cap(self, group_id: int, num_to_come: int = 0) -> int | None:
        """Return the most blocks that a request holds at once in a group; None if the group keeps
        everything.

        num_to_come: its scheduled positions whose tokens are not yet known.
        """
        if self.groups[group_id].is_state:
            return most_states(self.groups[group_id], num_to_come)
        limit = self.length_limit
        step = (self.max_num_batched_tokens or limit) + num_to_come
        return admission_cap(self.groups[group_id], step, limit)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds in all groups until it has `num_tokens`
        tokens. Raises InvalidCount.
        """
        total, num_tokens = 0, read_count("num_tokens", num_tokens)
        for index, group in enumerate(self.groups):
            blocks = -(-num_tokens // group.block_size) + group.draft_states
            cap = self.cap(index)
            if not group.is_cross:
                total += blocks if cap is None else min(blocks, cap)
        return total


def _check_options(config: Config) -> None:
    flags = ("enable_caching", "null_block", "use_eagle", "enable_events", "record_new_blocks")
    for name in (*flags, "hide_salts"):
        if not isinstance(getattr(config, name), bool):
            _refuse(config, name, "must be True or False")
    choices = {
        "eviction": EVICTIONS,
        "duplicates": _DUPLICATES,
        "hashing": HASHINGS,
        "publish": _PUBLISH,
    }
    for name, values in choices.items():
        value = getattr(config, name)
        if name == "eviction" and isinstance(value, EvictionPolicy):
            continue
        if not isinstance(value, str) or value not in values:
            _refuse(config, name, f"must be one of {', '.join(values)}")
    if not isinstance(config.hash_seed, bytes):
        _refuse(config, "hash_seed", "must be bytes")
    if config.hashing == "sha256_cbor" and not _is_text(config.hash_seed):
        _refuse(config, "hash_seed", "must be UTF-8 text for sha256_cbor")
    counts = ("num_host_blocks", "num_preallocate_tokens", "watermark_blocks", "max_in_flight")
    for name in (*counts, "epoch"):
        _check_count(config, name, 0)
    if config.max_in_flight > MAX_IN_FLIGHT:
        _refuse(config, "max_in_flight", f"must be at most {MAX_IN_FLIGHT}")
    for name in ("max_model_len", "max_num_batched_tokens"):
        if getattr(config, name) is not None:
            _check_count(config, name, 1)
    if config.max_pinned_blocks is not None:
        _check_count(config, "max_pinned_blocks", 0)


def _check_groups(config: Config) -> None:
    if len(config.groups) > MAX_GROUPS:
        _refuse(config, "groups", f"at most {MAX_GROUPS} groups")
    pages = [(index, group.page_bytes) for index, group in enumerate(config.groups)]
    given = [(index, size) for index, size in pages if size is not None]
    if len({size for _, size in given}) > 1:
        raise GroupsDoNotFit(
            groups=[index for index, _ in given], sizes=[size for _, size in given]
        )
    kinds = [group.kind for group in config.groups]
    for group in config.groups:
        reason = None
        if group.is_windowed and not config.null_block:
            kind = "state group" if group.is_state else "group with a window"
            reason = f"a {kind} needs the null block"
        if group.is_cross and config.enable_caching:
            reason = "cross-attention blocks are never cached: set enable_caching=False"
        if group.eagle and not config.use_eagle:
            reason = "a group is flagged eagle, but use_eagle is off"
        if all(each.is_cross for each in config.groups):
            reason = "cross-attention needs a group beside it that holds the request's own tokens"
        if reason is not None:
            raise InvalidConfig(field="groups", value=kinds, reason=reason)
    if math.lcm(*(group.block_size for group in config.groups)) > MAX_BLOCKS:
        sizes = [group.block_size for group in config.groups]
        reason = f"the least common multiple of the block sizes must be at most {MAX_BLOCKS}"
        raise InvalidConfig(field="groups", value=sizes, reason=reason)


def _check_hash_unit(config: Config, common: int) -> None:
    """Raise InvalidConfig unless hits may end at multiples of the given hash_block_size.

    common: the greatest common divisor of the block sizes.
    """
    if config.hash_unit is None:
        return
    _check_count(config, "hash_block_size", 1)
    if common % config.hash_unit:
        reason = f"must divide the block sizes, whose greatest common divisor is {common}"
        _refuse(config, "hash_block_size", reason)
    if config.hash_unit < common and config.eviction not in ("lru", "uncached_first"):
        reason = "hits inside blocks need the eviction policy lru or uncached_first"
        _refuse(config, "hash_block_size", reason)
    if config.hash_unit < common and config.floors:
        _refuse(config, "hash_block_size", "hits inside blocks cannot be combined with floors")


def _check_sizes(config: Config) -> None:
    _check_count(config, "num_blocks", 1)
    null = " and the null block" if config.null_block else ""
    least = len(config.groups)
    kept = config.watermark_blocks
    rest = f"{null}, {kept} stay free" if kept else null
    more = kept + int(config.null_block)
    if config.num_usable_blocks < least + kept:
        blocks = "1 block" if least == 1 else f"{least} blocks"
        reason = f"one request needs {blocks}{rest}, so {least + more}"
        _refuse(config, "num_blocks", reason)
    if config.max_model_len is not None:
        least = config.blocks_for(config.max_model_len)
        if config.num_usable_blocks < least + kept:
            reason = (
                f"one request of max_model_len={config.max_model_len} tokens needs {least} "
                f"blocks{rest}, so {least + more}"
            )
            _refuse(config, "num_blocks", reason)
    if config.max_pinned_blocks or config.floors:
        _check_claims(config)


def _check_claims(config: Config) -> None:
    """Raise InvalidConfig unless what is kept for good leaves room for one request."""
    longest, pinned = config.max_model_len, config.max_pinned_blocks or 0
    field, kept = ("floors", "floors") if config.floors else ("max_pinned_blocks", "pinned blocks")
    if longest is None:
        _refuse(config, field, f"needs max_model_len: one request must fit beside the {kept}")
    least = config.blocks_for(longest) + config.watermark_blocks
    if config.num_usable_blocks < pinned + sum(config.floors.values()) + least:
        beside = f"them and {pinned} pinned blocks" if config.floors and pinned else "them"
        reason = (
            f"beside {beside} one request of max_model_len={longest} tokens needs {least} blocks "
            f"of {config.num_usable_blocks}"
        )
        _refuse(config, field, reason)


def _read_floors(config: Config) -> None:
    """Keep the floors as a value that cannot change. Raises InvalidConfig."""
    try:
        floors = dict(config.floors.items())
    except AttributeError:
        raise InvalidConfig(
            field="floors", value=config.floors, reason="must be a mapping of salts to blocks"
        ) from None
    floors = {salt: size if size is True else read_int(size) for salt, size in floors.items()}
    object.__setattr__(config, "floors", Map(floors))
    if len(floors) > MAX_FLOORS:
        _refuse(config, "floors", f"at most {MAX_FLOORS} floors")
    for salt, size in floors.items():
        if not _is_salt(salt):
            _refuse(config, "floors", "each is for a cache salt, a text that is not empty")
        if type(size) is not int or not 1 <= size <= MAX_BLOCKS:
            _refuse(config, "floors", f"each must be an integer from 1 to {MAX_BLOCKS}")


def _check_count(config: Config, name: str, least: int) -> None:
    value = getattr(config, ATTRIBUTES.get(name, name))
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(config, name, f"must be an integer of at least {least}")
    if value > MAX_BLOCKS:
        _refuse(config, name, f"must be at most {MAX_BLOCKS}")


def _is_salt(salt: object) -> bool:
    try:
        check_text("cache_salt", salt)
    except InvalidExtraKey:
        return False
    return True


def _is_text(seed: bytes) -> bool:
    try:
        seed.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse(config: Config, name: str, reason: str) -> NoReturn:
    value = getattr(config, ATTRIBUTES.get(name, name))
    if name == "floors":  # salts may be secret
        value = [value[salt] for salt in sorted(value, key=str)]
    raise InvalidConfig(field=name, value=value, reason=reason)
