# SPDX-License-Identifier: Apache-2.0
"""The four hashings, byte by byte, in both languages.

CBOR is written here from the rules of RFC 8949 (`hand_hashes.py`), and once as hexadecimal digits,
so that neither the library nor the twin's encoder checks itself.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from typing import Any

import attrs
import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Request
from kvcore.hashing.block_hash import hash_block
from kvcore.types.errors import KvcoreError
from kvcore.types.extra_inputs import (
    CACHE_SALT,
    CUT_EMBEDS,
    CUT_MEDIA,
    LORA,
    MEDIA,
    PROMPT_EMBEDS,
    ExtraKey,
    LoRA,
    MediaItem,
    PromptEmbeds,
)
from kvcore.types.keys import HASHINGS, Hashing, external_hash
from tests.conftest import Backend, need_twin
from tests.helpers.hand_hashes import (
    block_hash,
    cbor,
    chain,
    hashes_of,
    head,
    plain,
    root_of,
    sha,
    siphash,
)

PARENT = bytes(range(100, 132))
EMBEDS = bytes(range(8))
DIGEST = hashlib.sha256(EMBEDS).digest()

# A map of everything: [parent, tokens, [lora, mm, mm, salt, embeds]], blocks of 8 tokens.
FULL = Request(
    "full",
    [7] * 8 + [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1],
    lora=LoRA("sql", "adapters/sql"),
    media=[MediaItem("cat", 5, 6), MediaItem("dog", 12, 1)],
    cache_salt="tenant",
    prompt_embeds=PromptEmbeds(bytes(8) + EMBEDS, 1),
)
FULL_SECOND_BLOCK = "".join(
    [
        "83",
        *("5820", PARENT.hex()),
        "88 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff",
        "84",
        *("83 64 6c6f7261 63 73716c 6c", b"adapters/sql".hex()),
        # The first image began three tokens before the block: -3 is 22.
        "83 62 6d6d 63 636174 22",
        "83 62 6d6d 63 646f67 04",
        *("82 6d", b"prompt_embeds".hex(), "5820", DIGEST.hex()),
    ]
)


@pytest.mark.seed("S001-01", "S001-39")
def test_vllms_worked_example(backend: Backend) -> None:
    seed = "6e 766c6c6d2d6e6f6e652d68617368"
    root = root_of(backend, b"vllm-none-hash", "sha256_cbor")
    assert root == sha(bytes.fromhex(seed))
    assert root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 128255]
    (found,) = hashes_of(backend, Request("a", tokens), root, 8, "sha256_cbor")
    encoded = f"83 5820 {root.hex()} 88 00 17 1818 18ff 190100 19ffff 1a00010000 1a0001f4ff f6"
    assert len(bytes.fromhex(encoded)) == 59
    assert found == sha(bytes.fromhex(encoded))
    assert found.hex() == "ae9e440d51b85b23f45c385ed801ffbd6b9ceb347ec9f3b760b06739c9947826"


@pytest.mark.seed("S001-28", "S001-29", "S001-39")
def test_all_kinds_of_extra_keys_in_vllms_form(backend: Backend) -> None:
    (found,) = hashes_of(backend, FULL, PARENT, 8, "sha256_cbor", start=8)
    assert found == sha(bytes.fromhex(FULL_SECOND_BLOCK))
    first = hashes_of(backend, FULL, PARENT, 8, "sha256_cbor")[0]
    keys = [
        ("lora", "sql", "adapters/sql"),
        ("mm", "cat", 5),
        ("cache_salt", "tenant"),
        ("prompt_embeds", hashlib.sha256(bytes(8)).digest()),
    ]
    assert first == sha(cbor([PARENT, [7] * 8, keys]))


@pytest.mark.parametrize("num_tokens", [1, 3, 23, 24, 255, 256, 1000, 65536])
def test_an_array_of_any_length_has_the_shortest_head(num_tokens: int, backend: Backend) -> None:
    tokens = list(range(num_tokens))
    for kind in HASHINGS:
        (found,) = hashes_of(backend, Request("a", tokens), PARENT, num_tokens, kind)
        assert found == block_hash(PARENT, tokens, kind=kind)


@pytest.mark.parametrize("size", [1, 23, 24, 255, 256, 65535, 65536])
def test_a_text_of_any_length_has_the_shortest_head(size: int, backend: Backend) -> None:
    # Two bytes a letter in UTF-8, but for the last of an odd number: sizes are bytes.
    salt = "\xe9" * (size // 2) + "s" * (size % 2)
    for kind in HASHINGS:
        (found,) = hashes_of(backend, Request("a", [1], cache_salt=salt), PARENT, 1, kind)
        assert found == block_hash(PARENT, [1], [("cache_salt", salt)], kind)


@pytest.mark.parametrize("before", [1, 24, 25, 256, 257, 65536, 65537])
def test_an_offset_before_the_block_is_a_negative_number(before: int, backend: Backend) -> None:
    request = Request("a", bytes(before + 2), media=[MediaItem("i", 0, before + 1)])
    for kind in HASHINGS:
        (found,) = hashes_of(backend, request, PARENT, 2, kind, start=before)
        assert found == block_hash(PARENT, [0, 0], [("mm", "i", -before)], kind)


@pytest.mark.parametrize("seed", ["", "0", "x" * 23, "x" * 24, "\xe9" * 200])
def test_a_root_is_the_hash_of_its_seed_as_text(seed: str, backend: Backend) -> None:
    # "0" and such are what PYTHONHASHSEED holds.
    assert root_of(backend, seed.encode(), "sha256_cbor") == sha(cbor(seed))


@pytest.mark.seed("S001-40")
def test_a_hash_of_zeros_is_a_parent_like_any_other(backend: Backend) -> None:
    zeros = bytes(32)
    for kind in HASHINGS:
        (found,) = hashes_of(backend, Request("a", [1, 2]), zeros, 2, kind)
        assert found == block_hash(zeros, [1, 2], kind=kind)
        root = root_of(backend, b"seed", kind)
        assert [found] != hashes_of(backend, Request("a", [1, 2]), root, 2, kind)


@pytest.mark.seed("S001-44")
def test_the_hashings_never_give_each_others_hashes(backend: Backend) -> None:
    found = [hashes_of(backend, FULL, PARENT, 4, kind) for kind in HASHINGS]
    assert len({each for hashes in found for each in hashes}) == 16
    roots = [root_of(backend, b"seed", kind) for kind in HASHINGS]
    assert len(set(roots)) == 4
    for number, mark in ((2, b"xxh3-128: no SHA"), (3, b"siphash:  no SHA")):
        for each in [*found[number], roots[number]]:
            assert each[8:24] == mark


def test_the_siphash_by_hand_is_the_published_one() -> None:
    # The first, second and last of the vectors for SipHash-2-4 that its authors publish.
    key = bytes(range(16))
    assert siphash(key, b"", 2, 4).hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash(key, b"\0", 2, 4).hex() == "da87c1d86b99af44347659119b22fc45"
    assert siphash(key, bytes(range(63)), 2, 4).hex() == "5150d1772f50834a503e069a973fbd7c"


def test_a_keyed_hash_has_another_key_for_each_parent(backend: Backend) -> None:
    # Two seeds give two functions: what collides under one says nothing about the other.
    tokens = Request("a", [1, 2, 3, 4])
    roots = [root_of(backend, seed, "siphash") for seed in (b"one", b"other")]
    found = [hashes_of(backend, tokens, each, 2, "siphash") for each in roots]
    assert len({each[:8] for hashes in found for each in hashes}) == 4


def test_the_64_bit_form_is_the_end_of_the_hash(backend: Backend) -> None:
    for kind in HASHINGS:
        hashes = hashes_of(backend, FULL, PARENT, 1, kind)
        external = [external_hash(each) for each in hashes]
        assert external == [int.from_bytes(each[-8:], "big") for each in hashes]
        assert len(set(external)) == 16
    assert external_hash(bytes(24) + b"\x80" + bytes(6) + b"\1") == 2**63 + 1


tokens_of = st.one_of(
    st.integers(0, 2**32 - 1), st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1])
)
texts = st.text(min_size=1, max_size=40)


@st.composite
def media_of(draw: st.DrawFn, num_tokens: int) -> list[MediaItem]:
    """Draw sorted items in a prompt of this many tokens; they may overlap."""
    bounds = st.lists(st.integers(0, num_tokens), min_size=2, max_size=2, unique=True).map(sorted)
    spans = draw(st.lists(bounds, max_size=5)) if num_tokens else []
    return [MediaItem(draw(texts), start, end - start) for start, end in sorted(spans)]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Draw requests with any parts, whose embeddings have two bytes per token."""
    tokens = draw(st.lists(tokens_of, min_size=1, max_size=70))
    rows = draw(st.none() | st.binary(min_size=2 * len(tokens), max_size=2 * len(tokens)))
    return Request(
        "a",
        tokens,
        lora=draw(st.none() | st.builds(LoRA, texts, st.text(max_size=40))),
        media=draw(media_of(len(tokens))),
        cache_salt=draw(st.none() | texts),
        prompt_embeds=None if rows is None else PromptEmbeds(rows, 2),
    )


def keys_of(request: Request, start: int, end: int) -> list[tuple[Any, ...]]:
    """Return a block's extra keys as the specification has them, looking at each item."""
    keys: list[tuple[Any, ...]] = []
    if request.lora is not None:
        keys.append(("lora", request.lora.name, request.lora.path))
    keys += [
        ("mm", item.identifier, item.offset - start)
        for item in request.media
        if item.offset < end and item.offset + item.length > start
    ]
    if request.cache_salt is not None and start == 0:
        keys.append(("cache_salt", request.cache_salt))
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds.data[2 * start : 2 * end]
        keys.append(("prompt_embeds", hashlib.sha256(rows).digest()))
    return keys


@pytest.mark.seed("S001-29", "S001-30", "S001-36", "S001-39", "S001-44")
@given(requests(), st.integers(1, 20), st.sampled_from(HASHINGS), st.integers(0, 5))
def test_both_languages_hash_as_written_by_hand(
    request: Request, block_size: int, kind: Hashing, skipped: int
) -> None:
    need_twin()
    num_blocks = len(request.tokens) // block_size
    starts = [block_size * position for position in range(num_blocks)]
    keys = [keys_of(request, start, start + block_size) for start in starts]
    expected = chain(PARENT, request.tokens, block_size, keys, kind)
    for backend in ("python", "rust"):
        assert hashes_of(backend, request, PARENT, block_size, kind) == expected
        if skipped < num_blocks:
            parent = ([PARENT, *expected])[skipped]
            start = skipped * block_size
            rest = hashes_of(backend, request, parent, block_size, kind, start=start)
            assert rest == expected[skipped:]


@given(requests(), st.data())
def test_both_languages_refuse_the_same_media_and_embeddings(
    request: Request, data: st.DataObject
) -> None:
    need_twin()
    numbers = st.integers(0, len(request.tokens) + 2)
    item = st.builds(MediaItem, texts, numbers, numbers.filter(bool))
    rows = st.builds(PromptEmbeds, st.binary(max_size=6), st.integers(1, 3))
    wrong = attrs.evolve(
        request,
        media=data.draw(st.lists(item, max_size=3)),
        prompt_embeds=data.draw(st.none() | rows),
    )
    found: list[Any] = []
    for backend in ("python", "rust"):
        try:
            found.append(hashes_of(backend, wrong, PARENT, 4, "sha256"))
        except KvcoreError as error:
            found.append((type(error), error.fields, str(error)))
    assert found[0] == found[1]


extra = st.lists(
    st.one_of(
        st.tuples(st.just(LORA), texts.map(lambda name: b"\1\0\0\0a" + name.encode())),
        st.tuples(st.just(MEDIA), texts.map(lambda name: b"\1\0\0\0" + name.encode())),
        st.tuples(st.just(CACHE_SALT), texts.map(str.encode)),
        st.tuples(st.just(PROMPT_EMBEDS), st.binary(min_size=32, max_size=32)),
        st.tuples(st.just(CUT_MEDIA), texts.map(lambda name: b"\1\0\0\0" * 2 + name.encode())),
        st.tuples(st.just(CUT_EMBEDS), st.binary(min_size=36, max_size=36)),
    ),
    max_size=3,
)
blocks_of = st.tuples(st.lists(tokens_of, max_size=4), extra)


@pytest.mark.seed("S001-04", "S001-05")
@given(blocks_of, blocks_of)
def test_the_encoding_of_a_block_is_no_beginning_of_another(
    first: tuple[list[int], list[ExtraKey]], second: tuple[list[int], list[ExtraKey]]
) -> None:
    """Neither is the message, after a parent of fixed size: no two blocks share one."""
    if first != second:
        assert not encoded(*first).startswith(encoded(*second))
        assert not encoded(*second).startswith(encoded(*first))
        for kind in HASHINGS:
            mine, others = (hash_block(PARENT, *each, kind) for each in (first, second))
            assert mine != others


def encoded(tokens: Sequence[int], keys: Sequence[ExtraKey]) -> bytes:
    """Return the default encoding of tagged values."""
    sized = [bytes([tag]) + len(value).to_bytes(4, "little") + value for tag, value in keys]
    return plain(tokens)[:-1] + bytes([len(keys)]) + b"".join(sized)


@pytest.mark.seed("S001-05", "X-08")
def test_one_word_in_different_places_is_different_keys(backend: Backend) -> None:
    rows = hashlib.sha256(b"a" * 4).digest().decode("latin-1")
    words = ["a", "aa", "mm", "lora", "cache_salt", rows]
    found = set()
    for word in words:
        for parts in (
            {"lora": LoRA(word)},
            {"lora": LoRA(word, word)},
            {"lora": LoRA(word + word)},
            {"media": [MediaItem(word, 0, 1)]},
            {"media": [MediaItem(word, 0, 1), MediaItem(word, 1, 1)]},
            {"media": [MediaItem(word, 1, 1)]},
            {"cache_salt": word},
            {"cache_salt": word, "lora": LoRA(word)},
        ):
            request = Request("a", [1, 2, 3, 4], **parts)
            for kind in HASHINGS:
                found.update(hashes_of(backend, request, PARENT, 4, kind))
    # Of the words, "aa" is "a" twice: LoRA("a" + "a") is LoRA("aa").
    assert len(found) == 4 * (len(words) * 8 - 1)


def test_no_message_of_one_hashing_is_one_of_another() -> None:
    """Byte 35 differs: it is either the count's high byte or the head of an array."""
    for num_tokens in (0, 1, 16, 23, 24, 256, 2**24, 2**31 - 1):
        assert num_tokens.to_bytes(4, "little")[3] < 0x80
        assert head(4, num_tokens)[0] >= 0x80
    message = cbor([PARENT, [1, 2], None])
    assert message[3:35] == PARENT
    assert message[35:] == b"\x82\1\2\xf6"


def test_the_encoder_by_hand_writes_what_the_library_writes() -> None:
    numbers = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, -1, -3, -24, -25, -256, -257]
    letters = [string.ascii_letters[:size] for size in (0, 1, 23, 24, 52)]
    value = [PARENT, numbers, None, [letters, b"", bytes(300)]]
    assert cbor(value) == cbor2.dumps(value, canonical=True)
