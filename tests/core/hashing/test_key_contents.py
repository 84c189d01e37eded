# SPDX-License-Identifier: Apache-2.0
"""Equal keys of blocks mean equal content, whatever identifiers, salts, names and rows are chosen.

A story is a prompt with any extra keys, then cuts and tokens added behind them. Its content is kept
beside the manager: what stands in each position, without any key. Two stories have equal keys up to
a block if and only if their contents up to it are equal. Names are drawn from a grammar that writes
what keys are made of: numbers as bytes, other names, words of a marker. Each story has rivals: who
knows what a cut leaves names an item, or makes rows, so as to have its key. Two premises: an
identifier stands for one content of one length, and all rows are of one size.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore import Config, KVCacheManager, Request
from kvcore.types.extra_inputs import (
    CUT_EMBEDS,
    CUT_MEDIA,
    MEDIA,
    PROMPT_EMBEDS,
    ExtraKey,
    ExtraKeys,
    LoRA,
    MediaItem,
    PromptEmbeds,
)
from kvcore.types.keys import HASHINGS, Hashing
from tests.conftest import Backend, need_twin

BLOCK_SIZE = 4
ROW_SIZE = 9
"""Rows of a block are as long as a digest and a number of four bytes."""

Place = tuple[Any, ...]


@attrs.frozen
class Story:
    """A prompt and what happens to it. steps: a number cuts, a list of tokens is added."""

    request: Request
    steps: tuple[int | list[int], ...] = ()


def length_of(identifier: str) -> int:
    """Return the length of an item; a short name stands for a long item."""
    return 8 if len(identifier) < 3 else 1 + zlib.crc32(identifier.encode()) % 3


def little(number: int) -> str:
    """Encode a number in four bytes that are also text."""
    return struct.pack("<I", number).decode()


small = st.integers(0, 9)
names = st.recursive(
    st.sampled_from(["X", "Y", "mm", "cut"]),
    lambda inner: st.one_of(
        st.tuples(small, inner).map(lambda each: little(each[0]) + each[1]),
        st.tuples(inner, small).map(lambda each: f"{each[0]} cut at {each[1]}"),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=2,
)
SPAN = BLOCK_SIZE * ROW_SIZE
rows = st.sampled_from([b"\1", b"\2"]).map(lambda each: each * SPAN)


def digest(data: bytes) -> bytes:
    """Return the form in which embeddings are kept."""
    return hashlib.sha256(data).digest()


@st.composite
def media_of(draw: st.DrawFn, num_tokens: int) -> list[MediaItem]:
    """Draw sorted items, some overlapping; one that does not fit ends with the last full block."""
    items, position = [], 0
    for identifier in draw(st.lists(names, max_size=3)):
        position += draw(st.integers(0, 2))
        length = length_of(identifier)
        if position + length > num_tokens or draw(st.booleans()):
            length = min(length, num_tokens - position) + position
            length = length // BLOCK_SIZE * BLOCK_SIZE - position
        if length > 0:
            items.append(MediaItem(identifier, position, length))
            position += length * draw(st.integers(0, 1))
    return items


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Draw any story of few tokens."""
    tokens = draw(st.lists(st.just(7), min_size=1, max_size=12))
    data = None
    if draw(st.booleans()):
        blocks = [draw(rows) for _ in range(0, len(tokens), BLOCK_SIZE)]
        data = b"".join(blocks)[: ROW_SIZE * len(tokens)]
    request = Request(
        "r",
        tokens,
        lora=draw(st.none() | st.builds(LoRA, names, st.just("") | names)),
        media=draw(media_of(len(tokens))),
        cache_salt=draw(st.none() | names),
        prompt_embeds=None if data is None else PromptEmbeds(data, ROW_SIZE),
    )
    more = st.lists(st.just(7), min_size=1, max_size=6)
    return Story(request, tuple(draw(st.lists(st.integers(1, 9) | more, max_size=4))))


def rivals(story: Story) -> Iterator[Story]:
    """Draw requests that try to have the keys of what the cuts of a story leave."""
    request = story.request
    for end in (step for step in story.steps if isinstance(step, int) and step % BLOCK_SIZE):
        start = end // BLOCK_SIZE * BLOCK_SIZE
        for item in (each for each in request.media if each.offset < end < each.end):
            at = max(item.offset, start)
            before = [each for each in request.media if each.end <= item.offset]
            if at > item.offset:
                before.append(MediaItem(item.identifier, item.offset, at - item.offset))
            for number in (end, end - start):
                marks = (f"{item.identifier} cut at {number}", little(number) + item.identifier)
                for name in marks:
                    media = [*before, MediaItem(name, at, length_of(name))]
                    named = attrs.evolve(request, tokens=[7] * 12, media=media, prompt_embeds=None)
                    yield Story(named)
        if request.prompt_embeds is not None and end < len(request.tokens):
            data = request.prompt_embeds.data
            known = digest(data[start * ROW_SIZE :][:SPAN])
            for mark in (struct.pack("<I", end), struct.pack("<I", end - start)):
                for row in (known + mark, mark + known):
                    embeds = PromptEmbeds(data[: start * ROW_SIZE] + row, ROW_SIZE)
                    tokens = [7] * (start + BLOCK_SIZE)
                    yield Story(
                        attrs.evolve(request, tokens=tokens, media=[], prompt_embeds=embeds)
                    )


def contents(story: Story) -> list[Place]:
    """Return the content at each position in the end, as far as the keys can know it."""
    request = story.request
    places: list[Place] = []
    for position, token in enumerate(request.tokens):
        item = [
            (each.identifier, position - each.offset)
            for each in request.media
            if each.offset <= position < each.end
        ]
        row = None
        if request.prompt_embeds is not None:
            first = position // BLOCK_SIZE * SPAN
            row = (request.prompt_embeds.data[first : first + SPAN], position % BLOCK_SIZE)
        salt = request.cache_salt if position == 0 else None
        places.append((token, request.lora, item, salt, row))
    for step in story.steps:
        if isinstance(step, int):
            del places[max(1, min(step, len(places))) :]
        else:
            places += [(token, request.lora, [], None, None) for token in step]
    return places


def keys_of(backend: Backend, story: Story, hashing: Hashing) -> Sequence[bytes]:
    """Return the keys of a story's full blocks, made by a manager."""
    config = Config(9, BLOCK_SIZE, hash_seed=b"seed", hashing=hashing)
    manager = KVCacheManager(config, backend=backend)
    manager.add_request(story.request)
    num_tokens = len(story.request.tokens)
    for step in story.steps:
        if isinstance(step, int):
            num_tokens = max(1, min(step, num_tokens))
            manager.truncate("r", num_tokens)
        else:
            manager.add_tokens("r", step)
            num_tokens += len(step)
    return [bytes(key) for key in manager.get_block_keys("r")[0]]


def disagreements(reported: Sequence[Story], made: Sequence[Sequence[bytes]]) -> Iterator[str]:
    """Yield the pairs whose keys are equal and contents differ, or the reverse. made: the keys of
    each story.
    """
    known = [(keys, contents(story)) for keys, story in zip(made, reported, strict=True)]
    for number, (keys, places) in enumerate(known):
        assert len(keys) == len(places) // BLOCK_SIZE
        for other_keys, other_places in known[:number]:
            for position, (key, other) in enumerate(zip(keys, other_keys, strict=False), 1):
                end = position * BLOCK_SIZE
                same = places[:end] == other_places[:end]
                if (key == other) != same:
                    yield f"block {position - 1}: equal keys {key == other}, contents {same}"


X = Request("r", [7] * 8, media=[MediaItem("X", 0, 8)])
FILM = Request("r", [7] * 8, media=[MediaItem("film", 0, 6), MediaItem("sound", 1, 7)])
ROWS = Request("r", [7] * 6, prompt_embeds=PromptEmbeds(bytes(54), ROW_SIZE))
KNOWN = [
    Story(X, (6, [7] * 2)),
    Story(X, (7, 6, [7] * 2)),
    Story(X),
    Story(attrs.evolve(X, media=[MediaItem("X", 4, 4)]), (6, [7] * 2)),
    Story(FILM, (6, [7] * 2)),
    Story(FILM, (7, 6, [7] * 2)),
    Story(FILM, (5, [7] * 3)),
    Story(FILM),
    Story(attrs.evolve(FILM, media=FILM.media[:1])),
    Story(attrs.evolve(FILM, media=FILM.media[1:])),
    Story(ROWS, (6, 5, [7] * 3)),
    Story(ROWS, ([7], 5, [7] * 3)),
]
"""Cuts, cuts of cuts, and what was not cut."""


def with_rivals(reported: Sequence[Story]) -> list[Story]:
    """Return the stories, and all requests that try to have their keys."""
    return [*reported, *(rival for story in reported for rival in rivals(story))]


@example(KNOWN, "sha256")
@example(KNOWN, "sha256_cbor")
@given(st.lists(stories(), min_size=2, max_size=4), st.sampled_from(HASHINGS))
def test_keys_are_equal_if_and_only_if_contents_are(stories: list[Story], hashing: Hashing) -> None:
    need_twin()
    reported = with_rivals(stories)
    made: dict[Backend, list[Sequence[bytes]]] = {"python": [], "rust": []}
    for backend in made:
        made[backend] = [keys_of(backend, story, hashing) for story in reported]
        assert not list(disagreements(reported, made[backend]))
    assert made["python"] == made["rust"]


of_block = ExtraKeys.of_block


def in_band(self: ExtraKeys, *args: Any) -> tuple[ExtraKey, ...]:
    """Build the key of a cut item as that of another name, so that its position reads as a name."""
    keys = []
    for tag, value in of_block(self, *args):
        if tag == CUT_MEDIA:
            end = self.media[-1].end
            tag, value = MEDIA, value[:4] + value[8:] + f" cut at {end}".encode()
        keys.append((tag, value))
    return tuple(keys)


def rows_in_band(self: ExtraKeys, *args: Any) -> tuple[ExtraKey, ...]:
    """Mark the rest of rows by a digest, as rows are."""
    keys = of_block(self, *args)
    return tuple(
        (PROMPT_EMBEDS, digest(value[4:] + value[:4])) if tag == CUT_EMBEDS else (tag, value)
        for tag, value in keys
    )


def untagged(self: ExtraKeys, *args: Any) -> tuple[ExtraKey, ...]:
    """Give the rest of an item the tag of whole ones."""
    keys = of_block(self, *args)
    return tuple((MEDIA if tag == CUT_MEDIA else tag, value) for tag, value in keys)


def unmarked(self: ExtraKeys, *args: Any) -> tuple[ExtraKey, ...]:
    """Leave out the mark of a cut item."""
    keys = of_block(self, *args)
    return tuple(
        (MEDIA, value[:4] + value[8:]) if tag == CUT_MEDIA else (tag, value) for tag, value in keys
    )


@pytest.mark.parametrize("wrong", [in_band, rows_in_band, untagged, unmarked])
def test_a_marker_that_somebody_can_choose_is_found(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExtraKeys, "of_block", wrong)
    reported = with_rivals(KNOWN)
    assert list(disagreements(reported, [keys_of("python", each, "sha256") for each in reported]))
