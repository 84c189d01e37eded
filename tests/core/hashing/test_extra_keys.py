# SPDX-License-Identifier: Apache-2.0
"""The extra keys of each block of a request, shown by the hashes that they make.

Blocks have four tokens unless told otherwise. Expected keys are written out; their hashes are made
by hand (`hand_hashes.py`) for each hashing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvcore import BlockStored, Config, KVCacheManager, Request
from kvcore.hashing.extra_keys import read_extra_keys
from kvcore.types.arguments import check_kinds
from kvcore.types.errors import (
    CountMismatch,
    InvalidExtraKey,
    KvcoreError,
    UnsortedMedia,
    WrongArgument,
)
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys, LoRA, MediaItem, PromptEmbeds
from kvcore.types.keys import HASHINGS
from tests.conftest import Backend
from tests.helpers.hand_hashes import Key, chain, hashes_of, root_of
from tests.helpers.misuse import check_error
from tests.helpers.stories import make, unchanged

PARENT = bytes(range(32))
ANY: Any = None


def check_keys(
    backend: Backend, request: Request, *keys: Sequence[Key], block_size: int = 4
) -> None:
    """Assert that the request's full blocks have these keys, in every hashing."""
    for kind in HASHINGS:
        found = hashes_of(backend, request, PARENT, block_size, kind)
        assert found == chain(PARENT, list(request.tokens), block_size, keys, kind)


def image(offset: int, length: int, name: str = "image") -> MediaItem:
    """Return a media item."""
    return MediaItem(name, offset, length)


@pytest.mark.seed("S001-27", "S001-29")
def test_a_request_of_text_alone_has_no_extra_keys(backend: Backend) -> None:
    check_keys(backend, Request("a", range(9)), (), ())


@pytest.mark.seed("S001-27", "S001-28")
def test_an_adapter_is_in_each_block_by_name_and_path(backend: Backend) -> None:
    key = ("lora", "name", "some/path")
    check_keys(backend, Request("a", range(8), lora=LoRA("name", "some/path")), [key], [key])
    bare = ("lora", "name", "")
    check_keys(backend, Request("a", range(8), lora=LoRA("name")), [bare], [bare])


@pytest.mark.seed("S001-28")
def test_a_salt_is_in_the_first_block_alone(backend: Backend) -> None:
    check_keys(backend, Request("a", range(8), cache_salt="salt"), [("cache_salt", "salt")], ())


@pytest.mark.seed("S001-28")
def test_embeddings_are_in_each_block_by_the_digest_of_its_rows(backend: Backend) -> None:
    # Six tokens of two bytes, in blocks of four: the second block has two rows so far.
    rows = bytes(range(12))
    digests = [hashlib.sha256(rows[:8]).digest(), hashlib.sha256(rows[8:]).digest()]
    request = Request("a", range(6), prompt_embeds=PromptEmbeds(rows, 2))
    check_keys(backend, request, [("prompt_embeds", digests[0])])
    keys = read_extra_keys(request, 6, 4)
    assert keys.embeds == tuple(digests)
    # Generated tokens fill the second block, and then a third, which has no rows at all.
    assert keys.of_block(4, 8, 4) == ((4, digests[1]),)
    assert keys.of_block(8, 12, 4) == ((4, hashlib.sha256().digest()),)


@pytest.mark.seed("S001-29")
def test_keys_come_as_adapter_media_salt_embeddings(backend: Backend) -> None:
    request = Request(
        "a",
        range(4),
        lora=LoRA("name", "path"),
        media=[image(0, 1, "first"), image(2, 1, "second")],
        cache_salt="salt",
        prompt_embeds=PromptEmbeds(b"rows", 1),
    )
    keys = [
        ("lora", "name", "path"),
        ("mm", "first", 0),
        ("mm", "second", 2),
        ("cache_salt", "salt"),
        ("prompt_embeds", hashlib.sha256(b"rows").digest()),
    ]
    check_keys(backend, request, keys)


@pytest.mark.seed("S001-30", "S001-31", "S001-35", "S001-43")
def test_an_item_is_in_each_block_that_it_overlaps_with_its_offset(backend: Backend) -> None:
    # Tokens 2 to 9 of blocks 0-3, 4-7, 8-11, 12-15.
    request = Request("a", range(16), media=[image(2, 8)])
    keys = [[("mm", "image", 2)], [("mm", "image", -2)], [("mm", "image", -6)], ()]
    check_keys(backend, request, *keys)


@pytest.mark.seed("S001-36")
def test_a_block_before_an_item_has_no_key_and_one_block_has_several_in_order(
    backend: Backend,
) -> None:
    media = [image(4, 1, "b"), image(5, 1, "a"), image(7, 3, "c")]
    request = Request("a", range(12), media=media)
    keys = [(), [("mm", "b", 0), ("mm", "a", 1), ("mm", "c", 3)], [("mm", "c", -1)]]
    check_keys(backend, request, *keys)


@pytest.mark.seed("S001-37", "X-08")
def test_an_item_that_ends_where_a_block_starts_does_not_count(backend: Backend) -> None:
    request = Request("a", range(8), media=[image(1, 3)])
    check_keys(backend, request, [("mm", "image", 1)], ())


@pytest.mark.seed("S001-35")
def test_an_item_that_starts_where_a_block_ends_does_not_count(backend: Backend) -> None:
    request = Request("a", range(8), media=[image(4, 1)])
    check_keys(backend, request, (), [("mm", "image", 0)])


@pytest.mark.seed("S001-31")
def test_the_same_item_elsewhere_in_a_block_makes_another_key(backend: Backend) -> None:
    # Placeholders are the same token, so only the offset tells the two prompts apart.
    prompts = [Request("a", [7] * 4, media=[image(offset, 2)]) for offset in (0, 1)]
    for kind in HASHINGS:
        first, second = (hashes_of(backend, each, PARENT, 4, kind) for each in prompts)
        assert first != second


@pytest.mark.seed("S001-30", "S001-34")
def test_the_keys_of_a_block_do_not_depend_on_what_was_asked_before(backend: Backend) -> None:
    # A chain that goes on at token 8 finds the item that began at 6; nothing is carried over.
    request = Request("a", range(16), media=[image(1, 2, "a"), image(6, 4, "b")])
    for kind in HASHINGS:
        whole = hashes_of(backend, request, PARENT, 4, kind)
        rest = hashes_of(backend, request, whole[1], 4, kind, start=8)
        assert rest == whole[2:]
        assert rest == chain(whole[1], range(8, 16), 4, [[("mm", "b", -2)], ()], kind)
    keys = read_extra_keys(request, 16, 4)
    for start in (12, 0, 8, 4, 8):
        tags = [tag for tag, _ in keys.of_block(start, start + 4, 4)]
        assert tags == [2] * {0: 1, 4: 1, 8: 1, 12: 0}[start]
    assert keys.of_block(400, 404, 4) == ()


def test_a_coarser_block_has_the_digests_of_its_hash_blocks() -> None:
    request = Request("a", range(8), media=[image(5, 1)], prompt_embeds=PromptEmbeds(bytes(8), 1))
    keys = read_extra_keys(request, 8, 2)
    digest = hashlib.sha256(bytes(2)).digest()
    assert keys.of_block(4, 8, 2) == ((2, b"\1\0\0\0image"), (4, digest), (4, digest))


@pytest.mark.seed("S001-32", "S001-33")
@pytest.mark.parametrize(
    ("media", "error"),
    [
        ([(4, 2), (0, 2)], {"position": 1, "offset": 0, "length": 2, "first": 4}),
        ([(1, 1), (0, 4)], {"position": 1, "offset": 0, "length": 4, "first": 1}),
        ([(0, 8), (8, 1)], {"position": 1, "offset": 8, "length": 1, "first": 0}),
        ([(0, 8), (1, 8)], {"position": 1, "offset": 1, "length": 8, "first": 0}),
        ([(7, 2)], {"position": 0, "offset": 7, "length": 2, "first": 0}),
        ([(2**32 - 1,) * 2], {"position": 0, "offset": 2**32 - 1, "length": 2**32 - 1, "first": 0}),
    ],
)
def test_media_are_sorted_and_stand_in_the_prompt(
    media: list[tuple[int, int]], error: dict[str, int], backend: Backend
) -> None:
    request = Request("a", range(8), media=[image(*each) for each in media])
    with pytest.raises(UnsortedMedia) as caught:
        hashes_of(backend, request, PARENT, 4, "sha256")
    check_error(caught.value, UnsortedMedia(request="a", num_tokens=8, **error))


@pytest.mark.seed("S001-32")
@pytest.mark.parametrize(("size", "row"), [(0, 1), (7, 1), (9, 1), (8, 2), (16, 3)])
def test_embeddings_have_a_row_for_each_token(size: int, row: int, backend: Backend) -> None:
    request = Request("a", range(8), prompt_embeds=PromptEmbeds(bytes(size), row))
    with pytest.raises(CountMismatch) as caught:
        hashes_of(backend, request, PARENT, 4, "sha256")
    name = "bytes of prompt embeddings"
    check_error(caught.value, CountMismatch(request="a", name=name, given=size, expected=8 * row))


@pytest.mark.parametrize("salt", ["", b"salt", 7, "\ud800"])
def test_a_salt_is_a_text(salt: Any, backend: Backend) -> None:
    with pytest.raises(InvalidExtraKey) as caught:
        hashes_of(backend, Request("a", range(8), cache_salt=salt), PARENT, 4, "sha256")
    name, expected = "cache_salt", "a non-empty str"
    check_error(caught.value, InvalidExtraKey(name=name, expected=expected, value=salt))


def test_a_block_has_most_keys_with_an_adapter_a_salt_and_embeddings(backend: Backend) -> None:
    # 252 items and one key of each other kind: the 255 that one byte can count.
    rows = PromptEmbeds(bytes(260), 1)
    media = [image(offset, 1) for offset in range(252)]
    full = Request("a", range(260), lora=LoRA("l"), media=media, cache_salt="s", prompt_embeds=rows)
    keys: list[Key] = [("lora", "l", ""), *(("mm", "image", offset) for offset in range(252))]
    keys += [("cache_salt", "s"), ("prompt_embeds", hashlib.sha256(rows.data).digest())]
    assert len(keys) == 255
    check_keys(backend, full, keys, block_size=260)


def test_a_block_has_at_most_as_many_items_as_its_hash_can_count(backend: Backend) -> None:
    fits = [image(offset, 1) for offset in range(252)]
    keys = [("mm", "image", offset) for offset in range(252)]
    check_keys(backend, Request("a", range(260), media=fits), keys, block_size=260)
    request = Request("a", range(260), media=[*fits, image(252, 1)])
    with pytest.raises(InvalidExtraKey) as caught:
        hashes_of(backend, request, PARENT, 260, "sha256")
    name = "the number of media items in the block where item 252 begins"
    check_error(caught.value, InvalidExtraKey(name=name, expected="at most 252", value=253))


def test_an_item_counts_in_each_block_that_it_goes_through(backend: Backend) -> None:
    # 252 items of two tokens each begin in the first block, and reach into the second.
    fits = [image(3, 2)] * 252
    keys = [[("mm", "image", 3)] * 252, [("mm", "image", -1)] * 252]
    check_keys(backend, Request("a", range(8), media=fits), *keys)
    with pytest.raises(InvalidExtraKey, match="where item 252 begins must be at most 252, not 253"):
        hashes_of(backend, Request("a", range(8), media=[*fits, image(4, 1)]), PARENT, 4, "sha256")
    later = Request("a", range(12), media=[*fits, image(8, 1)])
    check_keys(backend, later, *keys, [("mm", "image", 0)])


def test_a_block_has_the_keys_of_all_items_that_overlap_in_it(backend: Backend) -> None:
    # Sound and pictures of one video stand in the same positions, and a short image within them.
    media = [image(2, 12, "pictures"), image(2, 12, "sound"), image(5, 1), image(13, 2, "last")]
    both = ("mm", "pictures", 2), ("mm", "sound", 2)
    check_keys(
        backend,
        Request("a", range(16), media=media),
        both,
        [("mm", "pictures", -2), ("mm", "sound", -2), ("mm", "image", 1)],
        [("mm", "pictures", -6), ("mm", "sound", -6)],
        [("mm", "pictures", -10), ("mm", "sound", -10), ("mm", "last", 1)],
    )


def refused(name: str, expected: str, value: Any) -> InvalidExtraKey:
    """Return the error for a part of which no key can be made."""
    return InvalidExtraKey(name=name, expected=expected, value=value)


TEXT = "a non-empty str"
OFFSET, LENGTH = "the offset of a media item", "the length of a media item"


@pytest.mark.seed("S001-38")
@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: LoRA(""), refused("the name of a LoRA adapter", TEXT, "")),
        (lambda: LoRA(ANY), refused("the name of a LoRA adapter", TEXT, None)),
        (lambda: LoRA("a", ANY), refused("the path of a LoRA adapter", TEXT, None)),
        (lambda: LoRA("\ud800"), refused("the name of a LoRA adapter", TEXT, "\ud800")),
        (lambda: image(0, 1, ""), refused("the identifier of a media item", TEXT, "")),
        (lambda: image(0, 1, ANY), refused("the identifier of a media item", TEXT, None)),
        (lambda: image(-1, 1), refused(OFFSET, "an integer in [0, 2**32)", -1)),
        (lambda: image(2**32, 1), refused(OFFSET, "an integer in [0, 2**32)", 2**32)),
        (lambda: image(ANY, 1), refused(OFFSET, "an integer in [0, 2**32)", None)),
        (lambda: image(0, 0), refused(LENGTH, "an integer in [1, 2**32)", 0)),
        (lambda: image(0, -3), refused(LENGTH, "an integer in [1, 2**32)", -3)),
        (
            lambda: PromptEmbeds(b"", 0),
            refused("bytes_per_token", "an integer in [1, 2**32)", 0),
        ),
        (
            lambda: PromptEmbeds(ANY, 1),
            refused("the data of prompt embeddings", "a buffer of bytes", None),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, KvcoreError) else "",
)
def test_a_part_that_no_key_can_be_made_of_is_refused_when_it_is_made(
    build: Any, error: InvalidExtraKey
) -> None:
    with pytest.raises(InvalidExtraKey) as caught:
        build()
    check_error(caught.value, error)


@pytest.mark.seed("S001-38")
def test_an_item_without_identifier_reaches_no_manager(backend: Backend) -> None:
    manager = make(backend)
    with unchanged(manager), pytest.raises(InvalidExtraKey, match="identifier"):
        manager.add_request(Request("a", [1, 2], media=[MediaItem(ANY, 0, 1)]))
    manager.add_request(Request("a", [1, 2], media=[MediaItem("image", 0, 1)]))


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"lora": "name"}, "lora must be a LoRA, not 'name'"),
        ({"media": None}, "media must be a sequence of MediaItem, not None"),
        ({"media": "image"}, "media must be a sequence of MediaItem, not 'image'"),
        ({"media": [("image", 0, 1)]}, r"media must be a MediaItem, not \('image', 0, 1\)"),
        ({"media": [None]}, "media must be a MediaItem, not None"),
        ({"prompt_embeds": b"rows"}, "prompt_embeds must be a PromptEmbeds, not b'rows'"),
    ],
)
def test_a_part_of_another_kind_is_named(parts: dict[str, Any], name: str) -> None:
    with pytest.raises(WrongArgument, match=name):
        check_kinds(Request("a", [1], **parts))
    whole = Request("a", [1], lora=LoRA("a"), media=[], prompt_embeds=PromptEmbeds(b"a", 1))
    check_kinds(whole)


def test_numbers_and_buffers_are_taken_in_any_form() -> None:
    class Index:
        def __index__(self) -> int:
            return 3

    index: Any = Index()
    assert MediaItem("i", index, index) == MediaItem("i", 3, 3)
    rows = array("f", [1.0, 2.0])
    kept = PromptEmbeds(rows, 4)
    assert kept == PromptEmbeds(rows.tobytes(), 4)
    rows[0] = 9.0
    assert kept.data[:4] == b"\0\0\x80?"


def test_a_cut_prompt_keeps_what_stands_before_the_cut() -> None:
    media = (image(1, 4, "a"), image(5, 2, "b"))
    keys = ExtraKeys(LoRA("l"), media, "salt", (b"x" * 32, b"y" * 32, b"z" * 32), 12)
    cut = keys.cut(8, 4)
    assert cut == ExtraKeys(LoRA("l"), media, "salt", (b"x" * 32, b"y" * 32), 8)
    # Through an item at the end of a block: what is left of it has the keys that it had.
    cut = keys.cut(4, 4)
    assert cut == ExtraKeys(LoRA("l"), (image(1, 3, "a"),), "salt", (b"x" * 32,), 4)
    assert keys.cut(12, 4) == keys
    assert NO_EXTRA_KEYS.cut(1, 4) == NO_EXTRA_KEYS


def test_a_second_cut_leaves_what_it_alone_would_leave() -> None:
    media = (image(1, 4, "a"), image(5, 6, "b"))
    keys = ExtraKeys(media=media, embeds=(b"x" * 32, b"y" * 32, b"z" * 32), num_rows=11)
    for first in range(2, 15):
        for second in range(1, first):
            assert keys.cut(first, 4).cut(second, 4) == keys.cut(second, 4)


def test_what_a_cut_left_has_keys_of_its_own_in_every_hashing(backend: Backend) -> None:
    # Blocks of four; the item has tokens 1 to 8 and is cut behind token 5, as the rows are.
    rows = bytes(range(12))
    digests = [hashlib.sha256(rows[first : first + 4]).digest() for first in (0, 4)]
    request = Request(
        "a", [7] * 12, media=[image(1, 8)], cache_salt="salt", prompt_embeds=PromptEmbeds(rows, 1)
    )
    keys: list[list[Key]] = [
        [("mm", "image", 1), ("cache_salt", "salt"), ("prompt_embeds", digests[0])],
        [("mm cut", "image", -3, 2), ("prompt_embeds cut", digests[1], 2)],
        [("prompt_embeds", hashlib.sha256().digest())],
    ]
    for kind in HASHINGS:
        config = Config(9, 4, hash_seed=b"seed", hashing=kind, enable_events=True)
        manager = KVCacheManager(config, backend)
        manager.add_request(request)
        manager.truncate("a", 6)
        manager.add_tokens("a", [7] * 6)
        manager.allocate_slots("a", 12)
        found = [key[:32] for key in manager.get_block_keys("a")[0]]
        assert found == chain(root_of(backend, b"seed", kind), [7] * 12, 4, keys, kind)
        manager.check()
        data = manager.encode()
        manager.restore(data)
        assert manager.encode() == data
        (stored,) = manager.take_events()
        assert isinstance(stored, BlockStored)
        tags = [[tag for tag, _ in block] for block in stored.extra_keys]
        assert tags == [[2, 3, 4], [5, 6], [4]]


def test_a_block_that_a_cut_goes_through_never_has_its_old_key(backend: Backend) -> None:
    # The placeholder's tokens may come again as plain ones: the same tokens, other content.
    manager = make(backend, 20, 4)
    whole = Request("whole", [7] * 12, media=[MediaItem("cat", 1, 9)])
    rows = Request("rows", [7] * 12, prompt_embeds=PromptEmbeds(bytes(range(12)), 1))
    for request in (whole, rows):
        manager.add_request(request)
        manager.allocate_slots(request.request_id, 12)
        before = manager.get_block_keys(request.request_id)[0]
        manager.take_batch()
        manager.truncate(request.request_id, 6)
        manager.add_tokens(request.request_id, [7] * 6)
        manager.check()
        after = manager.get_block_keys(request.request_id)[0]
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
