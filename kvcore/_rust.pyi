"""
The compiled twin of the Python core.
"""

from _typeshed import SupportsGetItem
from collections.abc import Iterable
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.event_log import Events
from kvcore.types.retention import KvCacheRetentionConfig
from kvcore.types.values import Appended, Hit, KVCacheBlocks, PrefixCacheStats, Refused, Request, Status, Swapped, Verdict
from typing import Any, SupportsFloat, SupportsIndex, final

__all__ = ["LostKeys", "Manager", "SlotChecker", "Tiers", "check_state", "check_states", "check_world", "crc32c", "hash_block", "hash_blocks", "root_hash"]

@final
class LostKeys:
    """
    The last loss of each key of a manager. `kvcore.explain.observer` is the way to use it.
    """
    def __new__(cls, num_blocks: SupportsIndex, /) -> LostKeys:
        """
        Nothing is lost, and no block has an owner.
        """
    def clear(self, /) -> None:
        """
        Forget all keys.
        """
    def idle(self, block: SupportsIndex, step: SupportsIndex, /) -> int | None:
        """
        The steps since a block had an owner; None if it has one.
        """
    def lose(self, keys: SupportsGetItem[int, SupportsIndex], number: SupportsIndex, /) -> None:
        """
        Note the loss of keys that no command named.
        """
    def mark(self, key: SupportsIndex, /) -> int:
        """
        The mark of a folded key: 2 plus the number of its last loss, or 0.
        """
    def note(self, manager: Manager, start: SupportsIndex, step: SupportsIndex, first: SupportsIndex, apart: bool, /) -> tuple[int, list[tuple[int, int | None]]]:
        """
        Note what a manager's open batch did from its command `start` on; return the number of its
        commands, and the losses.
        """
    def use(self, blocks: SupportsGetItem[int, SupportsIndex], step: SupportsIndex, /) -> None:
        """
        Note that blocks had an owner, for which no command tells: they left its window in the call
        that hit them.
        """

@final
class Manager:
    """
    A manager's state, and what calls do to it. `kvcore.KVCacheManager` is the way to use it.

    A call that raises has changed nothing. Raises ConcurrentCall while another thread's call runs.
    """
    def __new__(cls, config: Config, /) -> Manager:
        """
        The empty state of a configuration. Raises InvalidConfig, PoolTooLarge.
        """
    def accept(self, /, request_id: str, num_accepted: int) -> None:
        """
        Make the first scheduled drafts tokens of the request and drop the others.
        """
    def add_block_hashes(self, request_id: str, hashes: Iterable[bytes], /) -> None:
        """
        Add the engine's hashes of the next full blocks of a request that has its own hashes.
        """
    def add_drafts(self, /, request_id: str, tokens: Any) -> None:
        """
        Put drafts behind the tokens of a request, in place of those before.
        """
    def add_request(self, request: Request, /) -> int:
        """
        Make a request known; returns its row.
        """
    def add_tokens(self, /, request_id: str, tokens: Any, *, num_rejected: int = ..., batch: int | None = None) -> None:
        """
        Add tokens behind those that a request has, into its positions to come first.
        """
    def advance_epoch(self, /, epoch: int | None = None) -> int:
        """
        Begin an epoch, the next one or a later one that is given; returns its number.
        """
    def allocate_slots(self, request_id: str, num_new_tokens: int, hit: Hit | None, /, *, num_lookahead_tokens: int, num_external_computed_tokens: int, num_encoder_tokens: int, reserved_blocks: int, num_output_placeholders: int, delay_cache_blocks: bool, full_sequence_must_fit: bool, checkpoint: bool) -> KVCacheBlocks | Refused:
        """
        Schedule the next tokens of a request; returns the blocks that its tables grew by.
        """
    def append(self, /, requests: Any, tokens: Any | None = None, *, batch: int | None = None) -> Appended:
        """
        One token and one slot more for each request, in order; without tokens, a slot for one that
        is to come. requests: ids, or a buffer of rows.
        """
    def block_keys(self, /, block: int) -> list[int]:
        """
        The key of a device block and its tail keys, folded; none for the null block. Changes
        nothing.
        """
    def cache_blocks(self, /, request_id: str, num_computed_tokens: int) -> None:
        """
        Publish a request's full blocks up to a token count, whose caching was delayed.
        """
    def can_allocate(self, request_id: str, num_new_tokens: int, hit: Hit | None, /, *, num_lookahead_tokens: int, num_external_computed_tokens: int, num_encoder_tokens: int, reserved_blocks: int, num_output_placeholders: int, delay_cache_blocks: bool, full_sequence_must_fit: bool, checkpoint: bool) -> Verdict:
        """
        What `allocate_slots` would say to the same arguments. Changes nothing.
        """
    def cancel(self, /, batch: int) -> None:
        """
        Take back a batch in flight, all later ones and the open one.
        """
    def checkpoint_stop(self, request_id: str, num_new_tokens: int, hit: Hit | None, /) -> tuple[int, bool]:
        """
        Where to end a step so that its state is worth keeping. Changes nothing.
        """
    def complete(self, /, batch: int) -> None:
        """
        Finish the oldest batch in flight, by its number.
        """
    def complete_operation(self, operation: int, done: bool, /) -> None:
        """
        Finish a store or load, done or failed.
        """
    def encode(self, /) -> bytes:
        """
        The canonical bytes of the state. O(pool).
        """
    @property
    def epoch(self, /) -> int:
        """
        The number of the current weights.
        """
    def evict_blocks(self, block_ids: Iterable[int], /) -> None:
        """
        Forget the keys of blocks; their owners keep them.
        """
    def extend_retention(self, request_id: str, retention: KvCacheRetentionConfig, /) -> None:
        """
        Join more wishes to those of a request, for the blocks that it releases from now on.
        """
    def fork(self, /, parent_id: str, child_id: str) -> int:
        """
        Add a child that shares its parent's computed blocks; returns its row.
        """
    def free(self, /, request_id: str) -> None:
        """
        Give back a request's blocks, tail first; its tokens stay.
        """
    def get_block_key(self, /, block: int) -> bytes | None:
        """
        The key of a device block, or else its longest tail key, or None. Changes nothing.
        """
    def get_block_keys(self, /, request_id: str) -> tuple[tuple[bytes, ...], ...]:
        """
        The keys of a request's full blocks, one tuple per group. Changes nothing.
        """
    def get_blocks(self, /, request_id: str) -> KVCacheBlocks:
        """
        The device blocks of a request. Changes nothing.
        """
    def get_cached_block(self, /, key: bytes) -> int | None:
        """
        The device block that a key or tail key finds, or None. Changes nothing.
        """
    def get_computed_blocks(self, /, request_id: str) -> Hit:
        """
        Return the longest cached prefix that leaves a token to compute. Changes nothing.
        """
    def get_num_common_prefix_blocks(self, /, request_id: str) -> list[int]:
        """
        Leading blocks per group that all requests with device blocks hold. Changes nothing.
        """
    def get_row(self, /, request_id: str) -> int:
        """
        The row of a request. Changes nothing.
        """
    def give_hashes(self, request_id: str, first: int, hashes: Iterable[bytes], /) -> None:
        """
        Give a request the hashes of its blocks from `first` on, which the next call fills, when the
        calls of a record by keys are made again; it keeps none that it had from there on. Does
        nothing if it has fewer than `first`.
        """
    def has_key(self, /, block: int) -> bool:
        """
        Whether a device block is findable; the null block counts as found. Changes nothing.
        """
    @property
    def in_flight(self, /) -> tuple[int, ...]:
        """
        The numbers of the batches in flight, oldest first.
        """
    @property
    def is_recording(self, /) -> bool:
        """
        Whether calls are recorded.
        """
    def key_marks(self, /, request_id: str, removed: Any, end: SupportsIndex) -> list[bytes]:
        """
        Of each group the marks of a request's keys that a hit of up to `end` tokens may need, of 4
        bytes each: 1 if the key finds a block, else that of the key in `removed`. The keys of a
        group end at each whole block, or at each hash if hits may end inside its blocks. Changes
        nothing.
        """
    def leave_recording(self, /) -> None:
        """
        Forget the record, if any, which another process goes on writing: nothing is written.
        """
    def load(self, request_id: str, num_tokens: int, hit: Hit | None, /, *, reserved_blocks: int, full_sequence_must_fit: bool) -> tuple[int, ...] | Refused:
        """
        Fill slots for the next tokens of a request from the external store.
        """
    @property
    def num_cached_blocks(self, /) -> int:
        """
        Free device blocks whose content can be hit. O(pool).
        """
    def num_computed_tokens(self, /, request_id: str) -> int:
        """
        Tokens of a request that are computed or scheduled. Changes nothing.
        """
    def num_draft_tokens(self, /, request_id: str) -> int:
        """
        Number of draft tokens of a request. Changes nothing.
        """
    @property
    def num_due_blocks(self, /) -> int:
        """
        Free device blocks that waiting requests will look up; 0 unless eviction is queue_aware.
        """
    @property
    def num_free_blocks(self, /) -> int:
        """
        Device blocks in the free queue.
        """
    @property
    def num_free_host_blocks(self, /) -> int:
        """
        Host blocks in the free queue; 0 without a host tier.
        """
    def num_output_placeholders(self, /, request_id: str) -> int:
        """
        Number of scheduled positions of a request without tokens yet. Changes nothing.
        """
    def num_owners(self, /, block: int) -> int:
        """
        Number of tables, pins and operations that hold a device block. Changes nothing.
        """
    def num_tokens(self, /, request_id: str) -> int:
        """
        Tokens of a request. Changes nothing.
        """
    def open_changes(self, /, start: SupportsIndex) -> tuple[int, list[int], list[tuple[int, int]]]:
        """
        What the open batch has done from one of its commands on: how many commands it has; the
        device blocks that it gave back; those that lost a key, each with that key, folded. Changes
        nothing.
        """
    def pin(self, block_ids: Iterable[int], /) -> None:
        """
        Hold blocks so that their content stays.
        """
    def pin_prefix(self, /, name: str, request_id: str, num_tokens: int) -> int:
        """
        Hold what a hit on a request's first tokens needs, until `unpin_prefix`; returns the tokens
        that are covered.
        """
    @property
    def quarantined_blocks(self, /) -> tuple[int, ...]:
        """
        Device blocks that lost their last owner while a batch in flight uses them, in this order.
        """
    def remove_request(self, /, request_id: str) -> None:
        """
        Forget a request that holds no blocks.
        """
    def remove_skipped_blocks(self, /, request_id: str, total_computed_tokens: int) -> None:
        """
        Give back the blocks that no query at total_computed_tokens or later sees.
        """
    def reset_prefix_cache(self, /) -> bool:
        """
        Forget every key; False, and nothing happens, while any block of any tier is used.
        """
    def restore(self, data: bytes, /) -> None:
        """
        Put the state of canonical bytes in place. Raises DamagedState, PoolTooLarge.
        """
    def rewind(self, request_ids: Iterable[str], num_computed_tokens: int, /) -> tuple[str, ...]:
        """
        Let requests count no more than num_computed_tokens; returns the ids of those that fell.
        """
    def rotate_recording(self, /) -> None:
        """
        Begin a new segment with the state as it is, if there is a record. O(pool).
        """
    def stale_requests(self, /) -> list[str]:
        """
        Return the requests that count tokens of older epochs, in row order. Changes nothing.
        """
    def start_recording(self, files: Any, /) -> None:
        """
        Record every call from now on into these files, a `kvcore.record.recorder.Recorder`.
        """
    def status(self, /, request_id: str) -> Status:
        """
        The tier of a request's blocks. Changes nothing.
        """
    def stop_recording(self, /) -> None:
        """
        End the record, if any.
        """
    def store(self, block_ids: Iterable[int], /) -> tuple[int, ...]:
        """
        Copy blocks to the external store under their keys; returns one operation per block.
        """
    def swap_in(self, request_ids: Iterable[str], /) -> Swapped | Refused:
        """
        Move swapped requests back to the device.
        """
    def swap_out(self, request_ids: Iterable[str], /) -> Swapped | Refused:
        """
        Move the requests' blocks to the host tier, each distinct block once.
        """
    def take_batch(self, /) -> Batch:
        """
        Close and number the open batch.
        """
    def take_events(self, /) -> Events:
        """
        Hand out the events since the last call.
        """
    def take_new_block_ids(self, /) -> list[int]:
        """
        Hand out the blocks that full-attention groups got since the last call, group by group.
        """
    def take_stats(self, /) -> PrefixCacheStats:
        """
        Return the look-up statistics since the last call.
        """
    def tick(self, /, now_ms: int) -> None:
        """
        Say the time in ms: levels whose duration is over end.
        """
    def truncate(self, /, request_id: str, num_tokens: int) -> None:
        """
        Keep the first num_tokens of a request's tokens.
        """
    def unpin(self, block_ids: Iterable[int], /) -> None:
        """
        Undo `pin`.
        """
    def unpin_prefix(self, /, name: str) -> None:
        """
        Let go of what a pin holds.
        """
    def unschedule(self, /, request_id: str, num_tokens: int) -> None:
        """
        Let the open batch compute a request only up to num_tokens; its blocks stay.
        """

@final
class SlotChecker:
    """
    Contents, tables and verified lengths. `kvcore.sanitizer.Sanitizer` is the way to use it.
    """
    def __new__(cls, groups: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex | None, bool, SupportsIndex, bool, SupportsIndex, bool, bool]], num_blocks: SupportsIndex, full: bool, /) -> SlotChecker:
        """
        Follow empty pools of this many blocks.
        """
    def advance_epoch(self, /) -> None:
        """
        Say that the weights changed.
        """
    def begin(self, serial: SupportsIndex, tokens: Any, base: SupportsIndex, parent: SupportsIndex | None, checked: bool, /) -> None:
        """
        Follow a request from now on; a fork may read what its parent may read.
        """
    def copy(self, source: tuple[SupportsIndex, SupportsIndex, SupportsIndex], target: tuple[SupportsIndex, SupportsIndex, SupportsIndex], step: SupportsIndex, moves: bool, /) -> None:
        """
        Copy a block, and empty the source if it moves.
        """
    def cut(self, serial: SupportsIndex, group_id: SupportsIndex, length: SupportsIndex, step: SupportsIndex, /) -> None:
        """
        Shorten a table to this many blocks.
        """
    def drop(self, serial: SupportsIndex, step: SupportsIndex, /) -> None:
        """
        Give up all tables of a request.
        """
    def end(self, serial: SupportsIndex, step: SupportsIndex, /) -> None:
        """
        Give up all tables of a request, and stop following it.
        """
    def events(self, place: tuple[SupportsIndex, SupportsIndex, SupportsIndex], /) -> list[tuple[str, int, int | None, int]]:
        """
        Return the last events of a block, the oldest first.
        """
    def extend(self, serial: SupportsIndex, group_id: SupportsIndex, position: SupportsIndex, blocks: Any, step: SupportsIndex, /) -> None:
        """
        Put blocks into a table from a place on, replacing those there.
        """
    def load(self, serial: SupportsIndex, group_id: SupportsIndex | None, start: SupportsIndex, count: SupportsIndex, step: SupportsIndex, /) -> list[tuple[str, int, int, int, int, int | None, int | None, tuple[int, int, int] | None, tuple[str, int, int | None, int] | None, int]]:
        """
        Write loaded content, like a step that reads nothing.
        """
    def lose(self, place: tuple[SupportsIndex, SupportsIndex, SupportsIndex], step: SupportsIndex, /) -> None:
        """
        Leave a block unwritten.
        """
    def num_bytes(self, /) -> int:
        """
        Return the bytes of contents, events and claims of the device.
        """
    def renew(self, serial: SupportsIndex, /) -> None:
        """
        Let a request that has no blocks expect KV of the current weights.
        """
    def step(self, step: SupportsIndex, serials: Any, starts: Any, counts: Any, drafts: Any, slots: Any, tables: Any, /) -> list[tuple[str, int, int, int, int, int | None, int | None, tuple[int, int, int] | None, tuple[str, int, int | None, int] | None, int]]:
        """
        Write and read what the chunks of a step do; return the errors, at most one per chunk.
        """
    def zero(self, place: tuple[SupportsIndex, SupportsIndex, SupportsIndex], step: SupportsIndex, /) -> None:
        """
        Zero a block.
        """

@final
class Tiers:
    """
    The blocks of one or two tiers and an open batch. `kvcore.legacy.blocks.blocks` is the way to
    use it.
    """
    def __new__(cls, num_blocks: SupportsIndex, num_host_blocks: SupportsIndex, /, *, null_block: bool, eviction: str, order: str) -> Tiers:
        """
        Empty tiers, which have one policy and one order in which blocks are first taken. Raises
        PoolTooLarge.
        """
    def admit(self, blocks: Iterable[int], count: int, keys: Iterable[bytes] | None, tier: str, /) -> tuple[int, ...] | Refused:
        """
        Touch blocks and take `count` others; refused as a whole.

        Raises WrongArgument, InvalidCount, InvalidKey, WrongKey, UnknownBlock, UnusedBlock.
        """
    def append(self, blocks: Iterable[int], num_blocks: int, /) -> int | Refused | None:
        """
        Let the owner of device blocks append behind their content, in `num_blocks` blocks.

        Returns None if the last block can be written as it is; otherwise a new block to put
        behind it, if there were fewer, or a copy to put in its place.

        Raises InvalidCount, UnknownBlock, NoOwner.
        """
    def clear_index(self, tier: str, /) -> None:
        """
        Forget every key.
        """
    def copy(self, block: int, /) -> int | Refused:
        """
        Copy a device block for one of its owners, which moves to the copy that is returned.

        Raises UnknownBlock, NoOwner.
        """
    def copy_in(self, host_block: int, block: int, /) -> None:
        """
        Copy a host block to a device block. Raises NoHostTier, UnknownBlock, NoOwner.
        """
    def copy_out(self, block: int, host_block: int, /) -> None:
        """
        Copy a device block to a host block. Raises NoHostTier, UnknownBlock, NoOwner.
        """
    def dump(self, /) -> tuple[tuple[list[int], list[bytes | None], list[int], list[int], list[tuple[int, tuple[float, int]]], int | None], tuple[list[int], list[bytes | None], list[int], list[int], list[tuple[int, tuple[float, int]]], int | None] | None, Batch]:
        """
        The columns of the device's and the host's blocks, and the open batch.
        """
    def free_blocks(self, tier: str, /) -> tuple[int, ...]:
        """
        The free queue, front first.
        """
    def key_of(self, block: int, tier: str, /) -> bytes | None:
        """
        The key of a block. Raises UnknownBlock.
        """
    def lookup(self, key: bytes, tier: str, /) -> int | None:
        """
        Return the block that a look-up of a key finds. Raises InvalidKey.
        """
    def lookup_prefix(self, keys: Iterable[bytes], tier: str, /) -> tuple[int, ...]:
        """
        Return the blocks that hold the keys' contents, up to the first key without one. Raises
        InvalidKey.
        """
    def move_in(self, host_blocks: Iterable[int], /) -> dict[int, int] | Refused:
        """
        Move one owner of each host block to the device; gives each with its copy, or a refusal.

        Raises NoHostTier, UnknownBlock, DoubleFree.
        """
    def move_out(self, blocks: Iterable[int], /) -> dict[int, int] | Refused:
        """
        Move one owner of each device block to the host; gives each with its copy, or a refusal.

        Raises NoHostTier, UnknownBlock, DoubleFree.
        """
    def num_free(self, tier: str, /) -> int:
        """
        Blocks in the free queue.
        """
    def own(self, block: int, /) -> int | Refused:
        """
        Let one of a device block's owners write; returns the block to write to: it, or a copy.

        Raises UnknownBlock, NoOwner.
        """
    def pin(self, blocks: Iterable[int], tier: str, /) -> None:
        """
        Hold blocks that have an owner or a key. For tests of the pool layer.

        Raises UnknownBlock, UnusedBlock.
        """
    def pins(self, /) -> list[int]:
        """
        The pins of each device block. For tests of the pool layer.
        """
    def publish(self, block: int, key: bytes, tier: str, /) -> None:
        """
        Make a block with an owner findable.

        Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
        """
    def publish_all(self, blocks: Iterable[int], keys: Iterable[bytes], tier: str, /) -> None:
        """
        Make blocks with owners findable, each by its key, in order; all of them or none.

        Raises WrongArgument, InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
        """
    def ref_count(self, block: int, tier: str, /) -> int:
        """
        Owners of a block. Raises UnknownBlock.
        """
    def ref_counts(self, blocks: Iterable[int], tier: str, /) -> tuple[int, ...]:
        """
        Owners of each block. Raises UnknownBlock.
        """
    def release(self, blocks: Iterable[int], tier: str, /) -> None:
        """
        Take one owner from each block, in order. Raises UnknownBlock, DoubleFree.
        """
    def set_priority(self, blocks: Iterable[int], time: Any, length: Any, tier: str, /) -> None:
        """
        Say when blocks were used, and how many tokens their chain has; None changes nothing.

        Raises WrongArgument, UnknownBlock, and InvalidConfig unless eviction is "priority".
        """
    def take(self, count: int, tier: str, /) -> tuple[int, ...] | Refused:
        """
        Give `count` free blocks one owner each; refused as a whole. Raises InvalidCount.
        """
    def take_batch(self, /) -> Batch:
        """
        Close and number the open batch: the commands since the last one.
        """
    def touch(self, blocks: Iterable[int], tier: str, /) -> None:
        """
        Add an owner to each block that has one, or has a key. Raises UnknownBlock, UnusedBlock.
        """
    def unpin(self, blocks: Iterable[int], tier: str, /) -> None:
        """
        Undo `pin`. Raises UnknownBlock, NotPinned.
        """
    def unpublish(self, block: int, tier: str, /) -> None:
        """
        Forget a block's key, if it has one. Raises UnknownBlock.
        """

def check_state(data: bytes, /) -> list[str]:
    """
    The names of the structural properties that do not hold in a state, from its canonical bytes.

    Raises DamagedState.
    """

def check_states(world: Any, /, *, max_states: SupportsIndex | None = None) -> list[tuple[bytes, list[str]]]:
    """
    Every state of a small world as its canonical bytes, with the names of the structural properties
    that do not hold there.
    """

def check_world(world: Any, /, *, symmetry: tuple[bool, bool, bool] = ..., full_keys: bool = False, checks: SupportsGetItem[int, str] | None = None, max_depth: SupportsIndex | None = None, max_states: SupportsIndex | None = None, max_seconds: SupportsFloat | SupportsIndex | None = None, workers: SupportsIndex = 1, progress: Any | None = None) -> Any:
    """
    Explore a world; the report as a dict.

    symmetry: whether requests, blocks and tokens are renamed. full_keys: whether whole names are
    kept, not fingerprints. checks: the properties that count, all unless given. progress: is told
    states, edges, depth, waiting states, seconds and bytes, from time to time.
    """

def crc32c(data: bytes | bytearray, /) -> int:
    """
    The CRC-32C of bytes, as records have it.
    """

def hash_block(parent: bytes, tokens: Any, hashing: str = "sha256", /) -> bytes:
    """
    The hash of one full block of these tokens, which has no extra keys.

    Raises InvalidToken, UnsupportedBuffer, InvalidKey, InvalidConfig.
    """

def hash_blocks(request: Request, parent: bytes, block_size: SupportsIndex, /, *, start: SupportsIndex = 0, hashing: str = "sha256") -> list[bytes]:
    """
    The hashes of a request's full blocks from token `start` on, of which `parent` is before.

    Raises InvalidToken, UnsupportedBuffer, InvalidKey, InvalidConfig, InvalidExtraKey,
    UnsortedMedia, CountMismatch.
    """

def root_hash(seed: bytes, hashing: str = "sha256", /) -> bytes:
    """
    The parent of each request's first block.
    """
