# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks, made here by hand, are those of managers in both languages.

Nothing of `kvcore.hashing.block_hash` is used to make an expected value.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvcore import BlockStored, Config, Evict, Group, Request
from kvcore.hashing import block_hash as hashing
from kvcore.hashing.block_hash import hash_block, root_hash
from kvcore.types.extra_inputs import LoRA, MediaItem
from kvcore.types.keys import HASHINGS, Hashing, make_key
from tests.conftest import Backend
from tests.helpers.hand_hashes import (
    Key,
    block_hash,
    cbor,
    chain,
    little,
    root,
    sha,
    sip_marked,
    xxh3,
)
from tests.helpers.stories import add, admit, blocks, keyed, make, serve, step

ROOTS = {
    "sha256": root(b"unit"),
    "sha256_cbor": sha(cbor("unit")),
    "xxh3": xxh3(b"kvcore root\0unit"),
    "siphash": sip_marked(root(b"unit")),
}


@pytest.mark.seed("S001-03", "S001-39", "S001-41", "S001-44")
@pytest.mark.parametrize("kind", HASHINGS)
def test_a_chain_of_keys_is_that_made_by_hand(backend: Backend, kind: Hashing) -> None:
    manager = make(backend, hashing=kind)
    serve(manager, "a", [258, 2**32 - 1, 0, 7, 9])
    first, second = chain(ROOTS[kind], [258, 2**32 - 1, 0, 7], 2, [(), ()], kind)
    state = manager.state()
    assert list(state.requests["a"].block_hashes) == [first, second]
    # The one group is group 0; a partial block has no key.
    keys = [first + b"\0\0\0\0", second + b"\0\0\0\0"]
    assert [state.device.keys[block] for block in (1, 2, 3)] == [*keys, None]
    for key in keys:
        assert key in manager.encode()


@pytest.mark.seed("S001-01", "S001-39")
def test_a_manager_has_vllms_hashes_of_vllms_worked_example(backend: Backend) -> None:
    manager = make(backend, 4, 8, hashing="sha256_cbor", hash_seed=b"vllm-none-hash")
    serve(manager, "a", [0, 23, 24, 255, 256, 65535, 65536, 128255])
    (found,) = manager.state().requests["a"].block_hashes
    assert found.hex() == "ae9e440d51b85b23f45c385ed801ffbd6b9ceb347ec9f3b760b06739c9947826"


def test_hashes_in_events_and_evictions_are_those_of_the_chain(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    serve(manager, "a", [1, 2, 3, 4])
    first, second = chain(root(b"unit"), [1, 2, 3, 4], 2, [(), ()])
    assert manager.take_events() == [BlockStored((first, second), None, (1, 2, 3, 4), 2, 0)]
    step(manager)
    manager.evict_blocks([2])
    assert step(manager) == [Evict(2, second + b"\0\0\0\0")]


@pytest.mark.seed("S001-41", "S001-43")
@pytest.mark.parametrize("kind", HASHINGS)
def test_a_chain_grows_with_the_request_whatever_the_pieces(
    backend: Backend, kind: Hashing
) -> None:
    # An image of tokens 1 and 2, so that a block is begun and one ended in it.
    parts: dict[str, Any] = {
        "lora": LoRA("adapter"),
        "media": [MediaItem("image", 1, 2)],
        "cache_salt": "salt",
    }
    tokens = [5, 6, 7, 8, 9]
    whole, pieces = make(backend, hashing=kind), make(backend, hashing=kind)
    whole.add_request(Request("a", tokens[:3], **parts))
    whole.add_tokens("a", tokens[3:])
    pieces.add_request(Request("a", tokens[:3], **parts))
    for token in tokens[3:]:
        pieces.add_tokens("a", [token])
    assert whole.encode() == pieces.encode()
    lora: Key = ("lora", "adapter", "")
    keys = [[lora, ("mm", "image", 1), ("cache_salt", "salt")], [lora, ("mm", "image", -1)]]
    assert list(pieces.state().requests["a"].block_hashes) == chain(
        ROOTS[kind], tokens, 2, keys, kind
    )


@pytest.mark.seed("S001-42")
def test_a_difference_in_one_block_changes_every_later_hash(backend: Backend) -> None:
    manager = make(backend)
    tokens = [5, 6, 7, 8, 9, 10]
    add(manager, "a", tokens)
    hashes = manager.state().requests["a"].block_hashes
    for changed in range(6):
        add(manager, "b", [token + (position == changed) for position, token in enumerate(tokens)])
        others = manager.state().requests["b"].block_hashes
        same = [mine == other for mine, other in zip(hashes, others, strict=True)]
        assert same == [position < changed // 2 for position in range(3)]
        manager.remove_request("b")


@pytest.mark.seed("S001-04", "S001-05", "S001-27")
@pytest.mark.parametrize("kind", HASHINGS)
def test_equal_tokens_with_other_extra_keys_are_other_content(
    backend: Backend, kind: Hashing
) -> None:
    # One word in each place that a word can stand in.
    requests = [
        Request("plain", [1, 2, 3]),
        Request("lora", [1, 2, 3], lora=LoRA("a")),
        Request("path", [1, 2, 3], lora=LoRA("a", "a")),
        Request("media", [1, 2, 3], media=[MediaItem("a", 0, 1)]),
        Request("later", [1, 2, 3], media=[MediaItem("a", 1, 1)]),
        Request("salt", [1, 2, 3], cache_salt="a"),
    ]
    manager = make(backend, 20, hashing=kind)
    for request in requests:
        manager.add_request(request)
        assert manager.get_computed_blocks(request.request_id).num_tokens == 0
        admit(manager, request.request_id)
    for request in requests:
        manager.add_request(attrs.evolve(request, request_id="again"))
        hit = manager.get_computed_blocks("again")
        assert hit.blocks.blocks == (tuple(blocks(manager, request.request_id)[:1]),)
        manager.remove_request("again")


@pytest.mark.seed("S000-59")
def test_the_group_is_in_the_key(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)))
    serve(manager, "a", [1, 2])
    expected = block_hash(root(b"unit"), [1, 2])
    keys = manager.state().device.keys
    assert (keys[1], keys[2]) == (expected + b"\0\0\0\0", expected + b"\0\0\0\1")


@pytest.mark.seed("S000-59")
def test_a_larger_block_has_the_last_of_its_fine_hashes(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(4)))
    serve(manager, "a", [1, 2, 3, 4])
    fine = chain(root(b"unit"), [1, 2, 3, 4], 2, [(), ()])
    keys = manager.state().device.keys
    small, large = (manager.get_block_ids("a")[group] for group in (0, 1))
    assert [keys[block] for block in small] == [each + b"\0\0\0\0" for each in fine]
    assert [keys[block] for block in large] == [fine[1] + b"\0\0\0\1"]


def test_another_block_size_gives_other_keys(backend: Backend) -> None:
    # Tokens 1, 1, 1, 1 in blocks of one and of two: no key is the same.
    found = []
    for block_size in (1, 2):
        manager = make(backend, 10, block_size)
        serve(manager, "a", [1, 1, 1, 1])
        found.append({manager.state().device.keys[block] for block in keyed(manager)})
    assert [len(keys) for keys in found] == [4, 2]
    assert not found[0] & found[1]


@pytest.mark.seed("S001-01", "S001-02", "X-12")
@pytest.mark.parametrize("kind", HASHINGS)
def test_another_seed_gives_other_keys_and_the_same_seed_the_same(
    backend: Backend, kind: Hashing
) -> None:
    found = []
    for seed in (b"", b"\0", b"one", b"two", b"one"):
        manager = make(backend, hash_seed=seed, hashing=kind)
        serve(manager, "a", [1, 2])
        found.append(manager.state().device.keys[1])
    assert len(set(found)) == 4
    assert found[4] == found[2]


@pytest.mark.seed("S001-01", "S001-02", "X-12")
def test_the_seed_is_random_in_each_process_unless_given(backend: Backend) -> None:
    code = "from kvcore import Config; print(Config(4).hash_seed.decode())"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    mine = Config(4).hash_seed
    assert mine == Config(8).hash_seed
    # 32 random bytes in hexadecimal digits: a text, which vLLM's form needs.
    assert len(bytes.fromhex(mine.decode())) == len(bytes.fromhex(other)) == 32
    assert mine != other.encode()
    assert mine.decode() not in repr(Config(4))
    manager = make(backend, hash_seed=mine)
    serve(manager, "a", [1, 2])
    assert manager.state().requests["a"].block_hashes[0] == block_hash(root(mine), [1, 2])


def test_a_block_with_extra_keys_is_hashed_as_written() -> None:
    parent = bytes(range(32))
    # One tag of one byte, the size in four, the value; the number of pairs before them.
    expected = sha(
        *(parent, little(2), little(10), little(11)),
        *(b"\2", b"\1", little(2), b"ab", b"\3", little(0), b""),
    )
    assert hash_block(parent, [10, 11], [(1, b"ab"), (3, b"")]) == expected
    assert root_hash(b"seed") == root(b"seed")
    assert make_key(expected, 258) == expected + b"\0\0\1\2"


def test_no_two_inputs_of_a_block_run_into_each_other() -> None:
    parent = bytes(32)
    tokens: tuple[list[int], ...] = ([], [0], [1], [0, 0], [1, 0], [0, 1], [1, 0, 0], [256])
    extras: tuple[list[tuple[int, bytes]], ...] = (
        [],
        [(0, b"")],
        [(1, b"")],
        [(0, b"\0")],
        [(1, b"ab")],
        [(1, b"a"), (1, b"b")],
        [(1, b"b"), (1, b"a")],
        [(1, b""), (1, b"ab")],
        [(1, b"ab"), (1, b"")],
        [(1, b"a\1\1\0\0\0b")],
        [(2, b"ab")],
    )
    hashes = {hash_block(parent, each, extra) for each, extra in itertools.product(tokens, extras)}
    assert len(hashes) == len(tokens) * len(extras)


def test_a_block_is_hashed_once_and_a_token_that_fills_none_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On the Python core; the twin's own tests show the same of its chain.
    hashed: list[tuple[int, ...]] = []
    hash_one = hashing.hash_block

    def count(parent: bytes, tokens: Sequence[int], *rest: Any) -> bytes:
        hashed.append(tuple(tokens))
        return hash_one(parent, tokens, *rest)

    monkeypatch.setattr(hashing, "hash_block", count)
    manager = make("python", 600, 16, num_host_blocks=600)
    serve(manager, "a", range(1_000))
    assert len(hashed) == 1_000 // 16
    step(manager)
    hashed.clear()  # the check of a step hashes anew, as a second opinion
    for token in range(1_000, 1_007):
        manager.append(["a"], [token])
        manager.take_batch()
    assert hashed == []
    manager.append(["a"], [1_007])
    assert hashed == [tuple(range(992, 1_008))]
    manager.take_batch()
    hashed.clear()
    manager.fork("a", "b")
    manager.swap_out(["a", "b"])
    manager.take_batch()
    manager.swap_in(["a", "b"])
    manager.free("b")
    admit(manager, "b")
    assert hashed == []
