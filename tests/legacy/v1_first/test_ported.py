# SPDX-License-Identifier: Apache-2.0
"""Code that looks into the blocks of the first manager with prefix caching, as its users do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore.legacy.v1_first.errors import InputsNotInKeys
from kvcore.legacy.v1_first.kv_cache_manager import (
    NOT_IN_KEYS,
    FreeBlockQueue,
    KVCacheBlock,
    KVCacheManager,
    Request,
    hash_block_tokens,
    hash_request_tokens,
)
from tests.conftest import Backend

SIZE = 4


def make(backend: Backend, num_blocks: int = 8, ahead: int = 0, **options: Any) -> KVCacheManager:
    """Return a manager without arguments about hashing."""
    return KVCacheManager(
        SIZE, num_blocks, num_preallocate_tokens=ahead, backend=backend, **options
    )


def test_a_queue_can_be_made_of_blocks_by_hand(backend: Backend) -> None:
    blocks = [KVCacheBlock(number, backend=backend) for number in (7, 3, 5)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[1])
    assert queue.popleft() is blocks[0]
    queue.append(blocks[1])
    assert queue.get_all_free_blocks() == [blocks[2], blocks[1]]
    assert (queue.free_list_head, queue.free_list_tail) == (blocks[2], blocks[1])
    with pytest.raises(RuntimeError, match="block 7 is not in the free queue"):
        queue.remove(blocks[0])


def admit(manager: KVCacheManager, name: str, tokens: list[int]) -> Request:
    """Return a request that got its blocks and was computed."""
    request = Request(name, tokens)
    hits = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - len(hits) * SIZE, hits) is not None
    request.num_computed_tokens = len(tokens)
    return request


def append(manager: KVCacheManager, request: Request, tokens: list[int]) -> None:
    """Append tokens of the answer, and allocate their slots."""
    request.append_output_token_ids(tokens)
    assert manager.append_slots(request, len(tokens)) is not None
    request.num_computed_tokens += len(tokens)


@pytest.mark.parametrize("field", NOT_IN_KEYS)
def test_inputs_that_are_not_in_the_keys_are_refused_by_name(backend: Backend, field: str) -> None:
    """Another image behind the same placeholder tokens would hit the first one's blocks."""
    manager, tokens = make(backend), [1, 2, 3, 4, 5]
    first = admit(manager, "first", tokens)
    other = Request("other", tokens)
    setattr(other, field, [])
    assert len(manager.get_computed_blocks(other)) == 1
    setattr(other, field, ["another image"])
    before = manager.state()
    with pytest.raises(InputsNotInKeys, match=f"request 'other' has {field}, which"):
        manager.get_computed_blocks(other)
    with pytest.raises(InputsNotInKeys, match=f"request 'other' has {field}, which"):
        manager.allocate_slots(other, 5, [])
    assert manager.state() == before
    assert list(manager.req_to_blocks) == ["first"]
    manager.free(first)
    without = make(backend, enable_caching=False)
    assert without.get_computed_blocks(other) == []
    assert without.allocate_slots(other, 5, []) is not None


@pytest.mark.parametrize("inputs", [{"multi_modal_data": {"image": 1}}, {"lora_id": 7}])
def test_inputs_in_a_dict_are_refused_by_name(backend: Backend, inputs: dict[str, object]) -> None:
    request = Request("r", [1, 2, 3, 4])
    request.inputs = {"prompt_token_ids": [1, 2, 3, 4]}  # type: ignore[attr-defined] # as below
    assert make(backend).get_computed_blocks(request) == []
    request.inputs |= inputs  # type: ignore[attr-defined] # as an engine's own has them
    with pytest.raises(InputsNotInKeys, match=f"has {next(iter(inputs))}"):
        make(backend).get_computed_blocks(request)


def test_no_adapter_is_no_input(backend: Backend) -> None:
    request = Request("r", [1, 2, 3, 4])
    request.lora_id = 0  # type: ignore[attr-defined] # as an engine's own has it
    assert make(backend).get_computed_blocks(request) == []


def test_an_adapter_is_refused_too(backend: Backend) -> None:
    request = Request("r", [1, 2, 3, 4])
    request.lora_request = object()  # type: ignore[attr-defined] # as an engine's own has it
    with pytest.raises(InputsNotInKeys, match="has lora_request"):
        make(backend).get_computed_blocks(request)


def test_a_hash_is_a_number_and_tokens() -> None:
    """The chain uses the whole previous hash, so a change in front changes all behind it."""
    first = hash_block_tokens(None, (1, 2))
    second = hash_block_tokens(first, [3, 4])
    assert (first[1], second[1]) == ((1, 2), (3, 4))
    assert first == (hash((None, 1, 2)), (1, 2))
    assert second == (hash((first, 3, 4)), (3, 4))
    assert hash_request_tokens(2, [1, 2, 3, 4, 5]) == [first, second]
    assert hash_request_tokens(2, [1]) == []
    assert hash_request_tokens(2, [0, 2, 3, 4])[1] != second
    with pytest.raises(ValueError, match="block_size"):
        hash_request_tokens(0, [1])


def test_blocks_show_their_tokens_and_hashes(backend: Backend) -> None:
    """Ten tokens in blocks of four and one ahead fill two blocks; one has two, one has none."""
    manager = make(backend, ahead=4)
    admit(manager, "a", list(range(10)))
    blocks = manager.req_to_blocks["a"]
    assert [block.token_ids for block in blocks] == [(0, 1, 2, 3), (4, 5, 6, 7), [8, 9], []]
    assert [block.num_hashed_tokens for block in blocks] == [4, 8, 0, 0]
    hashes: list[Any] = [*hash_request_tokens(4, list(range(10))), None, None]
    assert [block.block_hash for block in blocks] == hashes
    assert [manager.block_pool[7].token_ids, manager.block_pool[7].block_hash] == [[], None]
    assert manager.cached_block_hash_to_block == {
        hashes[0]: {0: blocks[0]},
        hashes[1]: {1: blocks[1]},
    }


def test_slots_fill_the_blocks_that_are_there(backend: Backend) -> None:
    manager = make(backend, ahead=4)
    request = admit(manager, "a", [1, 2])
    blocks = manager.req_to_blocks["a"]
    append(manager, request, [3])
    assert [block.token_ids for block in blocks] == [[1, 2, 3], []]
    append(manager, request, [4, 5])
    assert [block.token_ids for block in blocks] == [(1, 2, 3, 4), [5]]
    append(manager, request, [6, 7, 8, 9])
    expected = [(1, 2, 3, 4), (5, 6, 7, 8), [9], []]
    assert [block.token_ids for block in manager.req_to_blocks["a"]] == expected
    assert [block.num_hashed_tokens for block in blocks[:3]] == [4, 8, 0]


def test_a_hash_goes_on_from_the_hits(backend: Backend) -> None:
    """b and c share a's first block, c b's second one; the third block is c's own."""
    manager = make(backend)
    a, b, c = [0] * 5, [0] * 4 + [1] * 5, [0] * 4 + [1] * 4 + [2] * 4
    for name, tokens in zip("abc", (a, b, c), strict=True):
        admit(manager, name, tokens)
    blocks = manager.req_to_blocks["c"]
    assert [block.ref_cnt for block in blocks] == [3, 2, 1]
    assert [block.block_hash for block in blocks] == hash_request_tokens(4, c)
    assert [block.num_hashed_tokens for block in blocks] == [4, 8, 12]


def test_a_duplicate_is_listed_behind_who_answers(backend: Backend) -> None:
    """Both are computed in one step: a look-up finds the older one, and the other comes next."""
    manager = make(backend)
    for name in "ab":
        assert manager.allocate_slots(Request(name, [7] * 4), 4, [])
    (first,) = hash_request_tokens(4, [7] * 4)
    listed = manager.cached_block_hash_to_block
    assert (list(listed), list(listed[first]), len(listed)) == ([first], [0, 1], 1)
    assert hash_block_tokens(None, [8] * 4) not in listed


def test_a_block_keeps_its_tokens_until_it_is_given_out_again(backend: Backend) -> None:
    manager = make(backend, 2)
    manager.free(admit(manager, "a", [1, 2, 3, 4, 5]))
    blocks: Any = manager.block_pool
    full, rest = blocks
    assert (full.token_ids, rest.token_ids) == ((1, 2, 3, 4), [5])
    assert full.block_hash == hash_block_tokens(None, [1, 2, 3, 4])
    admit(manager, "b", [9] * 5)
    assert (rest.token_ids, full.token_ids) == ((9,) * 4, [9])
    assert (full.block_hash, full.num_hashed_tokens) == (None, 0)


def test_a_free_block_can_be_made_to_forget(backend: Backend) -> None:
    manager = make(backend)
    request = admit(manager, "a", [1] * 4)
    block: Any = manager.block_pool[0]
    with pytest.raises(ValueError, match="block 0 has 1 owners"):
        block.reset()
    assert block.token_ids == (1,) * 4
    manager.free(request)
    block.reset()
    assert (block.ref_cnt, block.token_ids, block.block_hash) == (0, [], None)
    assert manager.get_computed_blocks(Request("b", [1] * 5)) == []
    assert manager.cached_block_hash_to_block == {}
    manager.check()


def test_the_queue_shows_its_ends_and_neighbours(backend: Backend) -> None:
    """Of 4 blocks 2 is taken and given back, so the order is 3, 2, or 3 alone while it is used."""
    manager = make(backend, 4)
    admit(manager, "a", [0] * 8)
    request = admit(manager, "b", [1])
    queue, (_, _, two, three) = manager.free_block_queue, manager.block_pool
    assert (queue.free_list_head, queue.free_list_tail) == (three, three)
    assert (two.prev_free_block, two.next_free_block) == (None, None)
    manager.free(request)
    assert (queue.free_list_head, queue.free_list_tail) == (three, two)
    assert (three.prev_free_block, three.next_free_block) == (None, two)
    assert (two.prev_free_block, two.next_free_block) == (three, None)
    admit(manager, "c", [2] * 8)
    assert (queue.free_list_head, queue.free_list_tail) == (None, None)


def test_the_queue_cannot_be_changed_by_hand(backend: Backend) -> None:
    manager = make(backend, 2)
    block, queue = manager.block_pool[1], manager.free_block_queue
    call: Any
    for call in (queue.popleft, lambda: queue.remove(block), lambda: queue.append(block)):
        with pytest.raises(ValueError, match="change a pool's free queue"):
            call()
    assert queue.num_free_blocks == 2
    manager.check()


def test_ids_are_as_good_as_blocks(backend: Backend) -> None:
    """A look-up gives ids, and slots are requested with them."""
    manager = make(backend)
    admit(manager, "a", list(range(8)))
    request = Request("b", [*range(8), 9])
    ids = manager.get_computed_block_ids(request)
    assert ids == [0, 1]
    new = manager.allocate_slots(request, 1, ids)
    assert new is not None
    assert manager.req_to_blocks["b"] == [*manager.block_pool[:2], *new]
    for wrong in ([8], [-1], [1, 0]):
        with pytest.raises(ValueError, match="at position 0"):
            manager.allocate_slots(Request("c", [*range(8), 9]), 1, wrong)
    manager.check()
    assert make(backend, enable_caching=False).get_computed_block_ids(request) == []


def test_without_caching_blocks_have_no_tokens(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    request = admit(manager, "a", [1] * 4)
    append(manager, request, [1] * 4)
    shown = [(block.token_ids, block.block_hash) for block in manager.req_to_blocks["a"]]
    assert shown == [([], None)] * 2


def test_tokens_that_stand_for_images_are_hashed_as_well(backend: Backend) -> None:
    """-1 is no token id of the core; blocks before it are found as if it were not there."""
    manager = make(backend)
    image = [*range(4), -1, -1, 2**32, 7, *range(4)]
    admit(manager, "a", image)
    admit(manager, "b", list(range(5)))
    assert [block.ref_cnt for block in manager.block_pool[:4]] == [2, 1, 1, 1]
    hits = manager.get_computed_blocks(Request("c", image))
    assert [block.block_id for block in hits] == [0, 1, 2]
    assert [block.block_hash for block in hits] == hash_request_tokens(4, image)
    other = [*range(4), -1, -2, 2**32, 7, *range(4)]
    assert manager.get_computed_block_ids(Request("c", other)) == [0]
    wrong: Any = [*range(4), "image", 0, 0, 0]
    with pytest.raises(ValueError, match="image"):
        manager.get_computed_blocks(Request("c", wrong))
    seeded = make(backend, hash_seed=b"core's keys")
    with pytest.raises(ValueError, match="-1"):
        seeded.get_computed_blocks(Request("c", image))
    manager.check()


def test_a_block_with_a_token_that_got_no_slot_is_no_hit(backend: Backend) -> None:
    """If a whole prompt is found, the release's scheduler asks for one slot, and counts all tokens.

    So only one token of the block of 4..7 was computed; what is behind it was computed with it.
    """
    manager = make(backend)
    admit(manager, "a", list(range(8)))
    request = Request("b", list(range(8)))
    hits = manager.get_computed_blocks(request)
    hits.pop()
    assert manager.allocate_slots(request, 1, hits) is not None
    request.num_computed_tokens = 8
    for token in range(100, 105):
        append(manager, request, [token])
    blocks = manager.req_to_blocks["b"]
    expected = [(0, 1, 2, 3), (4, 100, 101, 102), [103, 104], []]
    assert [block.token_ids for block in blocks] == expected
    append(manager, request, [105, 106, 107])
    assert [block.block_hash is None for block in blocks] == [False, True, True, True]
    manager.free(Request("a", []))
    admit(manager, "x", [7] * 16)
    assert manager.get_computed_block_ids(Request("c", list(range(8)))) == [0]
    manager.check()


@pytest.mark.parametrize("seed", range(4))
def test_every_block_shows_what_its_requests_say(backend: Backend, seed: int) -> None:
    """Random requests of few tokens bring hits, duplicates, chunks and evictions."""
    rng = random.Random(seed)
    manager = make(backend, 10, rng.choice([0, 8]))
    requests: list[Request] = []
    for number in range(120):
        if rng.random() < 0.4 or not requests:
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 3))] * 5
            request = Request(str(number), tokens)
            hits = manager.get_computed_blocks(request)[: (len(tokens) - 1) // SIZE]
            chunk = rng.randint(1, len(tokens) - len(hits) * SIZE)
            if manager.allocate_slots(request, chunk, hits) is not None:
                request.num_computed_tokens = len(hits) * SIZE + chunk
                requests.append(request)
        elif rng.random() < 0.6:
            request = rng.choice(requests)
            if len(request.all_token_ids) == request.num_computed_tokens:
                request.append_output_token_ids(rng.randint(0, 1))
            chunk = rng.randint(1, len(request.all_token_ids) - request.num_computed_tokens)
            if manager.append_slots(request, chunk) is not None:
                request.num_computed_tokens += chunk
        else:
            manager.free(requests.pop(rng.randrange(len(requests))))
        for request in requests:
            check_shown(manager.req_to_blocks[request.request_id], request)


def check_shown(blocks: list[KVCacheBlock], request: Request) -> None:
    """Check that the blocks of a request show its computed tokens."""
    tokens = list(request.all_token_ids[: request.num_computed_tokens])
    hashes = hash_request_tokens(SIZE, tokens)
    for place, block in enumerate(blocks):
        assert list(block.token_ids) == tokens[place * SIZE : (place + 1) * SIZE]
        is_full = place < len(hashes)
        assert block.block_hash == (hashes[place] if is_full else None)
        assert block.num_hashed_tokens == ((place + 1) * SIZE if is_full else 0)
