# SPDX-License-Identifier: Apache-2.0
"""The keys of a request's blocks under `kvcore.compat`: made of its hashes, or of its tokens with
adapters, media, salts and embeddings.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import BlockStored, PromptEmbeds
from kvcore.compat import KVCacheManager
from kvcore.types.errors import InvalidExtraKey, UnsortedMedia, WrongBlockHashes
from kvcore.types.extra_inputs import CACHE_SALT, LORA, MEDIA, PROMPT_EMBEDS
from tests.compat.stories import make, plain
from tests.conftest import Backend


def test_an_engines_own_hashes_are_the_keys(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    hashes = [bytes([number]) * 32 for number in range(3)]
    request = plain("r", [1, 2, 3, 4, 5], block_hashes=hashes[:2])
    assert manager.allocate_slots(request, 5) is not None
    other = plain("other", [6, 7, 8], block_hashes=hashes[:1])
    assert manager.get_computed_blocks(other)[1] == 2
    manager.new_step_starts()
    request.num_computed_tokens = 5
    request.all_token_ids, request.num_tokens = [1, 2, 3, 4, 5, 6], 6
    request.block_hashes.append(hashes[2])
    assert manager.allocate_slots(request, 1) is not None
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [each.block_hashes for each in stored] == [tuple(hashes[:2]), (hashes[2],)]
    short = plain("short", [1, 2], block_hashes=[b"16 bytes of xxh3"])
    with pytest.raises(WrongBlockHashes, match="32 bytes"):
        manager.get_computed_blocks(short)


def test_a_hash_that_comes_with_the_last_token_is_published_by_cache_blocks(
    backend: Backend,
) -> None:
    """The hash of a block may cover the token behind it, with which the request ends."""
    manager = make(backend)
    hashed = bytes(range(32))
    request = plain("r", [1, 2], block_hashes=[])
    manager.new_step_starts()
    assert manager.allocate_slots(request, 2) is not None
    manager.step_ends()
    request.num_computed_tokens = 2
    request.all_token_ids, request.num_tokens = [1, 2, 3], 3
    request.block_hashes.append(hashed)
    manager.cache_blocks(request, 2)
    manager.free(request)
    assert manager.get_computed_blocks(plain("other", [1, 2, 3], block_hashes=[hashed]))[1] == 2


def test_own_hashes_that_change_while_a_request_rests_are_taken_anew(backend: Backend) -> None:
    """A session's next input changes the hash that covers a token behind a block."""
    manager = make(backend)
    old, new = bytes([1]) * 32, bytes([2]) * 32
    request = plain("r", [1, 2, 3], block_hashes=[old])
    assert manager.allocate_slots(request, 3) is not None
    manager.step_ends()
    request.num_computed_tokens = 3
    manager.free(request)
    request.num_computed_tokens, request.block_hashes = 0, [new]
    assert manager.get_computed_blocks(request)[1] == 0
    assert manager.allocate_slots(request, 3) is not None
    for hashed in (old, new):
        other = plain(f"other {hashed[0]}", [1, 2, 9], block_hashes=[hashed])
        assert manager.get_computed_blocks(other)[1] == 2


def test_with_own_hashes_only_events_read_what_keys_are_made_of(backend: Backend) -> None:
    flat = [SimpleNamespace(identifier="cat", offset=1, length=9)]
    for enable_events in (False, True):
        manager = make(backend, enable_events=enable_events)
        request = plain("r", [1, 2, 3], block_hashes=[bytes(32)], mm_features=flat)
        if enable_events:
            with pytest.raises(UnsortedMedia):
                manager.allocate_slots(request, 3)
        else:
            assert manager.allocate_slots(request, 3) is not None
            assert manager.core.get_block_keys("r")[0][0][:32] == bytes(32)


def test_an_engines_hashes_can_be_left_to_kvcore(backend: Backend) -> None:
    manager = make(backend, own_hashes=False)
    first = plain("first", [1, 2, 3], block_hashes=[b"16 bytes of xxh3"])
    assert manager.allocate_slots(first, 3) is not None
    assert manager.get_computed_blocks(plain("other", [1, 2, 4], block_hashes=[]))[1] == 2


def stored_keys(manager: KVCacheManager, request: Any) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    """Return the extra keys of a request's blocks, from the event of its allocation."""
    assert manager.allocate_slots(request, request.num_tokens) is not None
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    return stored.extra_keys


def test_adapters_media_and_salts_are_part_of_the_keys(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    place = SimpleNamespace(offset=1, length=2)
    request = plain(
        "r",
        [1, 2, 3, 4],
        lora_request=SimpleNamespace(lora_name="sql", lora_path="adapters/sql"),
        mm_features=[SimpleNamespace(identifier="cat", mm_position=place)],
        cache_salt="tenant",
    )
    first, second = stored_keys(manager, request)
    assert [tag for tag, _ in first] == [LORA, MEDIA, CACHE_SALT]
    assert [tag for tag, _ in second] == [LORA, MEDIA]
    assert first[0][1].endswith(b"sqladapters/sql")
    assert manager.get_computed_blocks(plain("bare", [1, 2, 3]))[1] == 0
    flat = [SimpleNamespace(identifier="cat", offset=1, length=9)]
    with pytest.raises(UnsortedMedia):
        manager.get_computed_blocks(plain("wrong", [1, 2, 3], mm_features=flat))
    with pytest.raises(InvalidExtraKey):
        manager.get_computed_blocks(plain("no", [1, 2], lora_request=SimpleNamespace(lora_name="")))


def test_prompt_embeddings_are_part_of_the_keys_also_behind_a_preemption(
    backend: Backend,
) -> None:
    manager = make(backend, enable_events=True)
    rows = memoryview(bytes(range(24))).cast("B", (4, 6))
    request = plain("r", [0, 0, 0, 0], prompt_embeds=rows)
    first, second = stored_keys(manager, request)
    assert [tag for tag, _ in (*first, *second)] == [PROMPT_EMBEDS, PROMPT_EMBEDS]
    assert first != second
    manager.new_step_starts()
    # It comes back as a new object with a token more, which has no embedding.
    again = plain("other", [0, 0, 0, 0, 7], prompt_embeds=PromptEmbeds(bytes(range(24)), 6))
    assert manager.get_computed_blocks(again)[1] == 4
    with pytest.raises(InvalidExtraKey, match="prompt_embeds"):
        manager.get_computed_blocks(plain("no", [0, 0], prompt_embeds=7))
    with pytest.raises(InvalidExtraKey, match="prompt_embeds"):
        manager.get_computed_blocks(plain("none", [0, 0], prompt_embeds=b""))


def test_embeddings_of_a_tensor_count_by_their_bytes(backend: Backend) -> None:
    torch = pytest.importorskip("torch", reason="torch is of the runtime, not of the core")
    manager = make(backend)
    rows = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    assert manager.allocate_slots(plain("r", [0, 0, 5], prompt_embeds=rows), 3) is not None
    same = plain("same", [0, 0, 6], prompt_embeds=rows.clone())
    assert manager.get_computed_blocks(same)[1] == 2
    moved = plain("moved", [0, 0, 6], prompt_embeds=rows + 1)
    assert manager.get_computed_blocks(moved)[1] == 0
