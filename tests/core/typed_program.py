# SPDX-License-Identifier: Apache-2.0
"""Every call of the manager, in a program that type checkers read strictly.

`make check` has mypy and pyright read it: `if not` tells a refusal from granted blocks or a swap,
and no value needs a cast. test_typed_program.py runs it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from kvcore import (
    Appended,
    Batch,
    BlockStored,
    Config,
    CopyOnWrite,
    Events,
    Group,
    Hit,
    KVCacheBlocks,
    KVCacheManager,
    KvCacheRetentionConfig,
    KvcoreError,
    LoRA,
    MediaItem,
    PrefixCacheStats,
    Reason,
    Refused,
    Request,
    State,
    Status,
    Swapped,
    Verdict,
)
from kvcore.errors import UnknownRequest
from kvcore.explain.explanation import Missed
from kvcore.explain.refusal import ExplainedRefusal
from kvcore.record.recorder import Recorder


def admit(manager: KVCacheManager, request: Request) -> KVCacheBlocks:
    """Allocate slots for all tokens of a new request. Raises MemoryError for a refusal."""
    name, row = request.request_id, manager.add_request(request)
    hit: Hit = manager.get_computed_blocks(name)
    num_new: int = manager.num_tokens(name) - hit.num_tokens
    verdict: Verdict = manager.can_allocate(name, num_new, hit)
    got = manager.allocate_slots(name, num_new, hit)
    if not got:
        refused: Refused = got
        reason: Reason = refused.reason
        raise MemoryError(f"{reason.value}: {refused.needed} blocks of {refused.available}")
    assert (verdict, manager.get_row(name)) == (Verdict.OK, row)
    ids: tuple[list[int], ...] = got.get_block_ids()
    return got + got.new_empty() if any(ids) else got


def requests_and_tokens(manager: KVCacheManager) -> None:
    """Add, grow, fork, cut and remove requests."""
    media = [MediaItem("picture", 2, 3)]
    admit(manager, Request("a", range(9), lora=LoRA("name"), media=media, cache_salt="tenant"))
    taken: Batch = manager.take_batch()
    manager.complete(taken.number)
    appended: Appended = manager.append(["a"])
    if appended.refused is not None:
        raise MemoryError(appended.refused.needed)
    to_come: int = manager.num_output_placeholders("a")
    manager.complete(manager.take_batch().number)
    manager.add_tokens("a", [9], num_rejected=to_come - 1, batch=taken.number)
    row: int = manager.fork("a", "b")
    manager.append(iter(["a", "b"]), [10, 11])
    batch = manager.take_batch()
    copies: list[int] = [each.target for each in batch if isinstance(each, CopyOnWrite)]
    assert (len(copies), row) == (1, manager.get_row("b"))
    manager.complete(batch.number)
    manager.add_drafts("b", [12, 13])
    assert (manager.num_draft_tokens("b"), manager.num_computed_tokens("b")) == (2, 11)
    manager.add_drafts("b", [])
    manager.add_tokens("b", [12])
    if manager.allocate_slots("b", 1, num_lookahead_tokens=1):
        manager.complete(manager.take_batch().number)
    manager.add_drafts("b", [13])
    manager.allocate_slots("b", 1)
    manager.complete(manager.take_batch().number)
    manager.accept("b", 1)
    manager.unschedule("b", manager.num_computed_tokens("b"))
    manager.truncate("b", 8)
    fell: tuple[str, ...] = manager.rewind(["a", "b"], 4)
    shared: list[int] = manager.get_num_common_prefix_blocks("a")
    manager.remove_skipped_blocks("a", 4)
    assert (fell, shared) == (("a", "b"), [1])
    for name in ("a", "b"):
        manager.free(name)
        manager.remove_request(name)


def blocks_and_tiers(manager: KVCacheManager) -> None:
    """Swap, pin, store, load and reset blocks."""
    admit(manager, Request("c", range(20, 29)))
    manager.complete(manager.take_batch().number)
    out = manager.swap_out(["c"])
    if not out:
        raise MemoryError(out.needed)
    moved: Swapped = out
    waiting: tuple[int, ...] = manager.quarantined_blocks
    assert len(waiting) == 3
    status: Status = manager.status("c")
    assert (moved.num_copied, status, manager.num_free_host_blocks) == (3, Status.SWAPPED, 1)
    back = manager.swap_in(["c"])
    if not back:
        raise MemoryError(back.pending)
    assert (back.num_copied, back.num_found) == (1, 2)
    manager.complete(manager.take_batch().number)
    blocks: KVCacheBlocks = manager.get_blocks("c")
    (ids,) = manager.get_block_ids("c")
    keys: tuple[tuple[bytes, ...], ...] = manager.get_block_keys("c")
    assert blocks.blocks == (tuple(ids),)
    assert [manager.has_key(block) for block in ids] == [True, True, False]
    key: bytes | None = manager.get_block_key(ids[0])
    cached: int | None = None if key is None else manager.get_cached_block(key)
    assert (key, cached) == (keys[0][0], ids[0])
    manager.pin(ids[:1])
    owners: int = manager.num_owners(ids[0])
    assert owners == 2
    manager.unpin(ids[:1])
    stored: tuple[int, ...] = manager.store(ids[:1])
    manager.complete(manager.take_batch().number)
    for operation in stored:
        manager.complete_operation(operation, True)
    manager.evict_blocks(ids[:2])
    manager.free("c")
    loaded = manager.load("c", 4)
    if isinstance(loaded, Refused):
        raise MemoryError(loaded.needed)
    manager.cancel(manager.take_batch().number)
    for operation in loaded:
        manager.complete_operation(operation, False)
    manager.free("c")
    manager.complete(manager.take_batch().number)
    emptied: bool = manager.reset_prefix_cache()
    epoch: int = manager.advance_epoch()
    now: int = manager.epoch
    stale: list[str] = manager.stale_requests()
    assert (emptied, len(keys[0]), manager.usage, epoch, now, stale) == (True, 2, 0.0, 1, 1, [])


def delayed(manager: KVCacheManager) -> None:
    """Use an engine's own hashes, delayed caching, and the drains."""
    manager.take_new_block_ids()  # those of the calls before
    manager.add_request(Request("d", range(40, 48), block_hashes=[b"h" * 32]))
    manager.add_block_hashes("d", [b"i" * 32])
    manager.allocate_slots("d", 8, delay_cache_blocks=True)
    manager.cache_blocks("d", 8)
    new: list[int] = manager.take_new_block_ids()
    assert len(new) == 2
    in_flight: tuple[int, ...] = (manager.take_batch().number,)
    assert manager.in_flight == in_flight
    events: Events = manager.take_events()
    sizes: set[int] = {each.block_size for each in events if isinstance(each, BlockStored)}
    stats: PrefixCacheStats = manager.take_stats()
    rate: float = stats.hit_rate
    assert (sizes, rate, manager.num_free_blocks) == ({4}, 0.0, 14)


def lasting(backend: Literal["rust", "python"], folder: Path) -> None:
    """Keep content, explain what was lost, and record it all."""
    config = Config(9, 4, eviction="retention", max_model_len=16, max_pinned_blocks=2)
    manager = KVCacheManager(config, backend=backend, explain_entries=8)
    manager.start_recording(Recorder(folder))
    manager.add_request(Request("e", range(9)))
    stop: tuple[int, bool] = manager.checkpoint_stop("e", 9)
    assert stop == (9, False)
    manager.allocate_slots("e", 9)
    manager.take_batch()
    held: int = manager.pin_prefix("system", "e", 8)
    due: int = manager.num_due_blocks
    cached: int = manager.num_cached_blocks
    manager.tick(5)
    manager.extend_retention("e", KvCacheRetentionConfig(decode_retention_priority=80))
    assert (held, due, cached, manager.epoch) == (8, 0, 0, 0)
    manager.add_tokens("e", [9])
    fits: ExplainedRefusal = manager.explain_refusal("e", 1)
    missed: Missed | None = manager.explain_miss("e")
    assert (fits.verdict, missed is None) == (Verdict.OK, False)
    manager.unpin_prefix("system")
    manager.stop_recording()


def play(backend: Literal["rust", "python"]) -> KVCacheManager | None:
    """Do all of it on one manager; return None if an error is not as it must be."""
    config = Config(
        *(17, 4),
        groups=(Group(4),),
        num_host_blocks=4,
        max_in_flight=1,
        enable_events=True,
        record_new_blocks=True,
    )
    manager = KVCacheManager(config, backend=backend)
    requests_and_tokens(manager)
    blocks_and_tiers(manager)
    delayed(manager)
    with TemporaryDirectory() as folder:
        lasting(backend, Path(folder))
    data: bytes = manager.encode()
    manager.restore(data)
    manager.restore(bytearray(data))
    state: State = manager.state()
    manager.check()
    try:
        manager.free("nobody")
    except UnknownRequest as error:
        wrong: KvcoreError = error
        fields: dict[str, object] = wrong.fields
        return manager if fields["request"] and state.requests else None
    return None
