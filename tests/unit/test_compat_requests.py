# SPDX-License-Identifier: Apache-2.0
"""How `kvcore.compat` keeps the core in step with an engine's request objects.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import BlockStored, PromptEmbeds
from kvcore.compat import KVCacheManager, TokensChanged, roll
from kvcore.errors import (
    CountMismatch,
    InvalidExtraKey,
    InvalidToken,
    UnsortedMedia,
    WrongArgument,
    WrongBlockHashes,
)
from kvcore.extra_keys import CACHE_SALT, LORA, MEDIA, PROMPT_EMBEDS
from tests.conftest import Backend
from tests.unit.compat_stories import admit, finish, make
from tests.unit.compat_worker import EngineRequest


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """With one group."""
    return make(backend)


def plain(name: str, tokens: Any, **fields: Any) -> Any:
    """A request object with the fewest attributes, and these."""
    given = {"all_token_ids": tokens, "num_tokens": len(tokens), "num_computed_tokens": 0}
    return SimpleNamespace(request_id=name, **{**given, **fields})


def num_known(manager: KVCacheManager) -> int:
    """Requests that the core knows."""
    return len(manager.core.state().requests)


def test_only_new_tokens_cross_over(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[list[int]] = []
    add = manager.core.add_tokens

    def add_tokens(name: str, tokens: list[int]) -> None:
        crossed.append(tokens)
        add(name, tokens)

    monkeypatch.setattr(manager.core, "add_tokens", add_tokens)
    request, _ = admit(manager, "r", [1, 2, 3])
    for token in (4, 5):
        manager.new_step_starts()
        request.output.append(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    assert crossed == [[4], [5]]
    assert manager.core.num_tokens("r") == 5


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("i", tokens)])
def test_tokens_are_read_from_any_kind_of_sequence(backend: Backend, kind: Any) -> None:
    manager = make(backend)
    assert manager.allocate_slots(plain("whole", kind([1, 2, 3, 4])), 4) is not None
    split = SimpleNamespace(
        request_id="split",
        num_tokens=5,
        num_computed_tokens=0,
        prompt_token_ids=kind([1, 2, 3]),
        output_token_ids=kind([4, 5]),
    )
    assert manager.get_computed_blocks(split)[1] == 4


def test_objects_that_are_no_requests_are_named(manager: KVCacheManager) -> None:
    for wrong in (
        SimpleNamespace(request_id="r", num_tokens=1),
        SimpleNamespace(request_id="r", num_tokens=1, num_computed_tokens=0),
    ):
        with pytest.raises(WrongArgument, match="an object with"):
            manager.get_computed_blocks(wrong)
    with pytest.raises(CountMismatch, match="given 2 tokens, must be 3"):
        manager.get_computed_blocks(plain("r", [1, 2], num_tokens=3))
    with pytest.raises(InvalidToken):
        manager.get_computed_blocks(plain("r", [1, -2]))
    assert num_known(manager) == 0


def test_what_is_finished_is_forgotten_and_what_rests_comes_back(
    manager: KVCacheManager,
) -> None:
    first, _ = admit(manager, "first", [1, 2, 3])
    manager.free(first)
    first.num_computed_tokens = 0
    assert num_known(manager) == 1
    assert manager.get_computed_blocks(first)[1] == 2
    for ended in ({"status": "FINISHED_ABORTED"}, {"is_finished": lambda: True}):
        request = plain("r", [1, 2, 3], **ended)
        assert manager.allocate_slots(request, 3) is not None
        assert num_known(manager) == 2
        manager.free(request)
        assert num_known(manager) == 1
    finish(manager, first)
    assert num_known(manager) == 0


def test_only_so_many_requests_rest(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll, "MAX_RESTING", 3)
    held, _ = admit(manager, "held", [1, 2, 3])
    waiting = [EngineRequest(f"w{number}", [1, 2, number]) for number in range(5)]
    for request in waiting:
        manager.get_computed_blocks(request)
    assert num_known(manager) == 4
    assert manager.get_block_ids("held") == ([1, 2],)
    # The oldest was forgotten and comes back; the youngest of the others stays.
    assert manager.get_computed_blocks(waiting[0])[1] == 2
    assert set(manager.core.state().requests) == {"held", "w0", "w3", "w4"}
    manager.get_computed_blocks(waiting[3])
    manager.get_computed_blocks(waiting[1])
    assert set(manager.core.state().requests) == {"held", "w0", "w1", "w3"}
    finish(manager, held)


def test_the_object_that_was_freed_is_the_one_that_comes_back(manager: KVCacheManager) -> None:
    admit(manager, "r", [1, 2, 3])
    freed = EngineRequest("r", [1, 2, 3], num_computed_tokens=3)
    manager.free(freed)
    freed.num_computed_tokens = 0
    blocks, num_hit = manager.get_computed_blocks(freed)
    assert manager.allocate_slots(freed, 1, num_hit, blocks) is not None
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.preempted_requests) == (1, 1)


@pytest.mark.parametrize("same_object", [False, True])
def test_a_resting_id_with_other_tokens_is_another_request(
    manager: KVCacheManager, same_object: bool
) -> None:
    first, _ = admit(manager, "r", [1, 2, 3, 4, 5])
    manager.free(first)
    other = first if same_object else EngineRequest("r", [1, 2, 9, 9, 5])
    other.num_computed_tokens = 0
    other.prompt = [1, 2, 9, 9, 8] if same_object else other.prompt
    assert manager.get_computed_blocks(other)[1] == 2


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 9], [1, 2, 9, 4, 5]])
def test_tokens_of_a_running_request_do_not_change(
    manager: KVCacheManager, tokens: list[int]
) -> None:
    request, table = admit(manager, "r", [1, 2, 3])
    manager.new_step_starts()
    before = manager.core.encode()
    request.prompt, request.num_computed_tokens = tokens, 2
    with pytest.raises(TokensChanged, match="free it first"):
        manager.allocate_slots(request, 1)
    assert manager.core.encode() == before
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(EngineRequest("other", [1, 2, 3]))[1] == 2
    assert manager.allocate_slots(request, len(tokens)) is not None
    assert len(table[0]) == 2


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


def test_an_engines_hashes_can_be_left_to_kvcore(backend: Backend) -> None:
    manager = make(backend, own_hashes=False)
    first = plain("first", [1, 2, 3], block_hashes=[b"16 bytes of xxh3"])
    assert manager.allocate_slots(first, 3) is not None
    assert manager.get_computed_blocks(plain("other", [1, 2, 4], block_hashes=[]))[1] == 2


def stored_keys(manager: KVCacheManager, request: Any) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    """The extra keys of a request's blocks, from the event that its allocation gives."""
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
