# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks, made here by hand with hashlib, are those of both languages.

Nothing of `kvcore.hashing` is used to make an expected value.
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Sequence

from kvcore import BlockStored, Config, Evict, Group
from kvcore.hashing import hash_block, make_key, root_hash
from tests.conftest import Backend
from tests.unit.stories import add, keyed, make, serve, step


def little(number: int) -> bytes:
    """Four bytes, lowest first."""
    return bytes(number >> shift & 255 for shift in (0, 8, 16, 24))


def sha(*parts: bytes) -> bytes:
    """SHA-256 of the parts one after the other."""
    return hashlib.sha256(b"".join(parts)).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block without extra keys."""
    return sha(parent, little(len(tokens)), *(little(token) for token in tokens), b"\0")


def root(seed: bytes) -> bytes:
    """The parent of a first block."""
    return sha(b"kvcore root", b"\0", seed)


def test_a_chain_of_keys_is_that_made_by_hand(backend: Backend) -> None:
    manager = make(backend, hash_seed=b"seed")
    serve(manager, "a", [258, 2**32 - 1, 0, 7, 9])
    first = block_hash(root(b"seed"), [258, 2**32 - 1])
    second = block_hash(first, [0, 7])
    state = manager.state()
    assert list(state.requests["a"].block_hashes) == [first, second]
    # The one group is group 0.
    keys = [first + b"\0\0\0\0", second + b"\0\0\0\0"]
    assert [state.device.keys[block] for block in (1, 2, 3)] == [*keys, None]
    for key in keys:
        assert key in manager.encode()


def test_hashes_in_events_and_evictions_are_those_of_the_chain(backend: Backend) -> None:
    manager = make(backend, hash_seed=b"seed", enable_events=True)
    serve(manager, "a", [1, 2, 3, 4])
    first = block_hash(root(b"seed"), [1, 2])
    second = block_hash(first, [3, 4])
    assert manager.take_events() == [BlockStored((first, second), None, (1, 2, 3, 4), 2, 0)]
    step(manager)
    manager.evict_blocks([2])
    assert step(manager) == [Evict(2, second + b"\0\0\0\0")]


def test_a_chain_grows_with_the_request_whatever_the_pieces(backend: Backend) -> None:
    tokens = [5, 6, 7, 8, 9]
    whole, pieces = make(backend), make(backend)
    add(whole, "a", tokens)
    add(pieces, "a", tokens[:1])
    for token in tokens[1:]:
        pieces.add_tokens("a", [token])
    assert whole.encode() == pieces.encode()
    first = block_hash(root(b"unit"), [5, 6])
    chain = [first, block_hash(first, [7, 8])]
    assert list(pieces.state().requests["a"].block_hashes) == chain


def test_the_group_is_in_the_key(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)))
    serve(manager, "a", [1, 2])
    expected = block_hash(root(b"unit"), [1, 2])
    keys = manager.state().device.keys
    assert (keys[1], keys[2]) == (expected + b"\0\0\0\0", expected + b"\0\0\0\1")


def test_another_block_size_gives_other_keys(backend: Backend) -> None:
    # Tokens 1, 1, 1, 1 in blocks of one and of two: no key is the same.
    found = []
    for block_size in (1, 2):
        manager = make(backend, 10, block_size)
        serve(manager, "a", [1, 1, 1, 1])
        found.append({manager.state().device.keys[block] for block in keyed(manager)})
    assert [len(keys) for keys in found] == [4, 2]
    assert not found[0] & found[1]


def test_another_seed_gives_other_keys(backend: Backend) -> None:
    found = set()
    for seed in (b"", b"\0", b"one", b"two"):
        manager = make(backend, hash_seed=seed)
        serve(manager, "a", [1, 2])
        found.add(manager.state().device.keys[1])
    assert len(found) == 4


def test_the_seed_is_random_in_each_process_unless_given() -> None:
    code = "from kvcore import Config; print(Config(4).hash_seed.hex())"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    mine = Config(4).hash_seed
    assert mine == Config(8).hash_seed
    assert len(mine) == len(bytes.fromhex(other)) == 32
    assert mine != bytes.fromhex(other)
    assert mine.hex() not in repr(Config(4))


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
