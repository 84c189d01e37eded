# SPDX-License-Identifier: Apache-2.0
"""Bad calls: each raises a typed error and leaves the encoded state as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore import Hit, KVCacheBlocks, KvcoreError, LoRA, MediaItem, PromptEmbeds, Request
from tests.oracle.engine import Engine
from tests.oracle.finding import Finding, demand

BadCall = tuple[str, tuple[Any, ...], dict[str, Any]]
WRONG_TOKENS: tuple[Any, ...] = ([], [-(2**31) - 1], [2**32], ["a"], [1.5], {1}, None)
WRONG_COUNTS: tuple[Any, ...] = (-1, None, "1", 2.5, 10**9)


def misuse(e: Engine) -> None:
    """Make a call that no state allows."""
    name, args, options = e.rng.choice(list(bad_calls(e)))
    before = e.manager.encode()
    try:
        value = e.manager.call(name, *args, **options)
    except KvcoreError:
        demand(e.manager.encode() == before, f"{name}{args!r} is misuse and changed the state")
    else:
        raise Finding(f"{name}{args!r} {options!r} is misuse and gives {value!r}")


def bad_calls(e: Engine) -> Iterator[BadCall]:
    """Yield calls that are wrong in the state in which the engine is."""
    count, tokens = e.rng.choice(WRONG_COUNTS), e.rng.choice(WRONG_TOKENS)
    yield "add_request", (Request("", [1]),), {}
    yield "add_request", (Request("new", tokens),), {}
    yield "add_request", (Request("new", [1], prompt_embeds=PromptEmbeds(b"abc", 1)),), {}
    yield "add_request", (Request("new", [1], media=[MediaItem("cat", 0, 2)]),), {}
    yield "add_request", (Request("new", [1], cache_salt=""),), {}
    yield "add_request", (Request("new", [1], block_hashes=[b"short"]),), {}
    yield "add_request", (LoRA("a"),), {}
    yield "pin", ([e.config.num_blocks],), {}
    yield "unpin", ([-1],), {}
    yield "evict_blocks", ([1, e.config.num_blocks],), {}
    yield "store", ([1, e.config.num_blocks],), {}
    yield "complete_operation", (10**6, True), {}
    yield "complete", (10**6,), {}
    yield "cancel", (10**6,), {}
    for name in ("free", "remove_request", "get_blocks", "status", "get_computed_blocks"):
        yield name, ("unknown",), {}
    for name in ("swap_out", "swap_in"):
        yield name, (["unknown"],), {}
    for number, operation in e.operations.items():
        if operation.batch is None and not operation.cancelled:
            yield "complete_operation", (number, True), {}
    if len(e.unfinished) > 1:
        yield "complete", (e.unfinished[-1],), {}
    if e.config.max_in_flight and len(e.unfinished) == e.config.max_in_flight:
        yield "take_batch", (), {}
    for request in e.known.values():
        yield from bad_requests(e, request.name, count, tokens)


def bad_requests(e: Engine, name: str, count: Any, tokens: Any) -> Iterator[BadCall]:
    """Yield calls that name a request and are wrong."""
    request = e.known[name]
    far = KVCacheBlocks(tuple((1,) for _ in e.config.groups))
    long = len(request.stuff) + len(request.drafts) + 1
    yield "add_request", (Request(name, [1]),), {}
    yield "add_tokens", (name, tokens), {}
    yield "add_block_hashes", (name, [b"short"]), {}
    yield "allocate_slots", (name, count), {}
    yield "allocate_slots", (name, long), {}
    yield "allocate_slots", (name, 1, Hit(far, 10**6)), {}
    yield "allocate_slots", (name, 1), {"num_lookahead_tokens": -1}
    yield "append", ([name, "unknown"], [1, 1]), {}
    yield "append", ([name], [1, 2]), {}
    yield "fork", (name, name), {}
    yield "fork", (name, ""), {}
    yield "truncate", (name, 0), {}
    yield "truncate", (name, len(request.stuff) + 1), {}
    yield "unschedule", (name, request.count + 1), {}
    kept = request.count if request.base is None else request.kept
    if kept:
        yield "unschedule", (name, kept - 1), {}
    yield "rewind", ([name, name], 0), {}
    yield "rewind", ([name], 10**6), {}
    yield "remove_skipped_blocks", (name, 10**6), {}
    yield "cache_blocks", (name, 10**6), {}
    yield "accept", (name, long), {}
    yield "load", (name, count), {}
    if request.count or request.swapped:
        yield "remove_request", (name,), {}
    if not request.swapped:
        yield "swap_in", ([name],), {}
    if not request.count or request.swapped or request.loading:
        yield "swap_out", ([name],), {}
    if request.base is not None or not request.count or request.count < len(request.stuff):
        yield "append", ([name], [1]), {}
    yield "append", ([name, name], [1, 1]), {}
    yield "append", ([name],), {"batch": 10**6}
    yield "add_tokens", (name, [1]), {"num_rejected": -1}
    yield "allocate_slots", (name, 1), {"num_output_placeholders": -1}
    if request.swapped or request.loading or not request.is_settled:
        yield "append", ([name], [1]), {}
        yield "fork", (name, "new"), {}
        yield "allocate_slots", (name, 1), {}
