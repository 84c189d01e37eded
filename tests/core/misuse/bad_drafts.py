# SPDX-License-Identifier: Apache-2.0
"""Bad input on what a request brings besides its tokens: drafts, hashes, encoder tokens."""

from __future__ import annotations

from typing import Any

from kvcore import KVCacheManager, MediaItem, PromptEmbeds, Request
from kvcore.types.errors import (
    BeyondDrafts,
    BeyondModelLength,
    CountMismatch,
    DraftsPending,
    InOpenBatch,
    InvalidCount,
    InvalidExtraKey,
    KvcoreError,
    NoEncoderGroup,
    TooManyTokens,
    UnsortedMedia,
    WrongBlockHashes,
)
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve, step


def drafted(backend: Backend) -> KVCacheManager:
    """Set the limit to 8 tokens. Each request has 3 tokens, followed by drafts 7, 8.

    "guesses" has neither scheduled, "settles" both, in a batch that was taken, "writes" both, in
    the open batch.
    """
    manager = make(backend, max_model_len=8)
    for name in ("guesses", "settles", "writes"):
        serve(manager, name, [0, 1, 2])
        manager.add_drafts(name, [7, 8])
    step(manager)
    manager.allocate_slots("settles", 2)
    step(manager)
    manager.allocate_slots("writes", 2)
    return manager


def hashed(backend: Backend) -> KVCacheManager:
    """Let "own" have 5 tokens in blocks of two and one hash of its own; "ours" is hashed here."""
    manager = make(backend)
    manager.add_request(Request("own", range(5), block_hashes=[b"1" * 32]))
    add(manager, "ours", range(5))
    return manager


TWO = DraftsPending(request="settles", num_drafts=2)
GUESSED = DraftsPending(request="guesses", num_drafts=2)

DRAFTS: list[Row] = [
    bad(drafted, TWO, "allocate_slots", "settles", 1),
    bad(drafted, TWO, "add_drafts", "settles", [9]),
    bad(drafted, TWO, "add_tokens", "settles", [9]),
    bad(drafted, TWO, "append", ["settles"], [9]),
    bad(drafted, TWO, "fork", "settles", "child"),
    bad(drafted, GUESSED, "add_tokens", "guesses", [9]),
    bad(drafted, GUESSED, "append", ["guesses"], [9]),
    bad(drafted, InOpenBatch(kind="request", value="writes"), "accept", "writes", 1),
    bad(
        drafted,
        BeyondDrafts(request="settles", num_scheduled=2, requested=3),
        "accept",
        "settles",
        3,
    ),
    bad(
        drafted,
        BeyondDrafts(request="guesses", num_scheduled=0, requested=1),
        "accept",
        "guesses",
        1,
    ),
    *(
        bad(
            drafted,
            InvalidCount(name="num_accepted", value=value, least=0),
            "accept",
            "settles",
            value,
        )
        for value in ("1", None, 1.5)
    ),
    bad(drafted, InvalidCount(name="num_accepted", value=-1, least=0), "accept", "settles", -1),
    # Three tokens and two drafts are five.
    bad(
        drafted,
        TooManyTokens(request="guesses", num_tokens=3, requested=6),
        "allocate_slots",
        "guesses",
        3,
    ),
]


def near_the_end(backend: Backend) -> KVCacheManager:
    """Set the limit to 8 tokens; "long" has 7 of them and three drafts."""
    manager = make(backend, max_model_len=8)
    serve(manager, "long", range(7))
    manager.add_drafts("long", [20, 21, 22])
    step(manager)
    return manager


LENGTHS: list[Row] = [
    bad(
        near_the_end,
        BeyondModelLength(request="long", requested=9, max_model_len=8),
        "allocate_slots",
        "long",
        2,
    ),
    bad(
        near_the_end,
        NoEncoderGroup(request="long", num_encoder_tokens=4),
        "allocate_slots",
        "long",
        1,
        num_encoder_tokens=4,
    ),
]


def _hashes(request_id: str, hashes: Any, reason: str) -> Row:
    error = WrongBlockHashes(request=request_id, num_hashes=len(hashes), reason=reason)
    return bad(hashed, error, "add_block_hashes", request_id, hashes)


HASHES: list[Row] = [
    _hashes("ours", [b"1" * 32], "it did not bring its own when it was added"),
    _hashes("own", [b"2" * 32] * 2, "its tokens fill 1 more blocks"),
    _hashes("own", [b"2" * 31], "each must be 32 bytes"),
    _hashes("own", ["2" * 32], "each must be 32 bytes"),
    bad(
        hashed,
        WrongBlockHashes(request="more", num_hashes=3, reason="its tokens fill 2 more blocks"),
        "add_request",
        Request("more", range(5), block_hashes=[b"1" * 32] * 3),
    ),
]


def _added(error: KvcoreError, **options: Any) -> Row:
    return bad(hashed, error, "add_request", Request("more", range(5), **options))


def _media(position: int, first: int, *items: tuple[int, int]) -> Row:
    """Return a row for media items (offset, length) of 5 tokens; the position-th is wrong."""
    offset, length = items[position]
    error = UnsortedMedia(
        request="more", position=position, offset=offset, length=length, first=first, num_tokens=5
    )
    media = [MediaItem(f"picture {number}", *item) for number, item in enumerate(items)]
    return _added(error, media=media)


EXTRA_KEYS: list[Row] = [
    _media(1, 3, (3, 2), (0, 1)),
    _media(1, 0, (0, 3), (2, 4)),
    _media(0, 0, (4, 2)),
    _media(0, 0, (9, 1)),
    _added(InvalidExtraKey(name="cache_salt", expected="a non-empty str", value=""), cache_salt=""),
    _added(
        CountMismatch(request="more", name="bytes of prompt embeddings", given=18, expected=20),
        prompt_embeds=PromptEmbeds(bytes(18), 4),
    ),
]

ROWS = [*DRAFTS, *LENGTHS, *HASHES, *EXTRA_KEYS]
