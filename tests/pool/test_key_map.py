# SPDX-License-Identifier: Apache-2.0
"""The persistent map of the hash index against a dict, and what its table does."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.pool.key_map import SLOTS_MIN, KeyMap, slot

KEYS = [bytes([number]) * 36 for number in range(40)]
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.integers(0, 99)), max_size=120)


def changed(known: KeyMap, changes: list[tuple[bytes, int | None]]) -> KeyMap:
    """Return the map after setting keys, and deleting those that are given None."""
    tx = known.mutate()
    for key, block in changes:
        if block is not None:
            tx[key] = block
        elif tx.get(key) is not None:
            del tx[key]
    return tx.finish()


@given(CHANGES, CHANGES)
def test_it_holds_what_a_dict_holds_and_older_values_stay(
    first: list[tuple[bytes, int | None]], second: list[tuple[bytes, int | None]]
) -> None:
    expected: dict[bytes, int] = {}
    known = KeyMap()
    for changes in (first, second):
        before, older = dict(expected), known
        for key, block in changes:
            expected.pop(key, None)
            if block is not None:
                expected[key] = block
        known = changed(known, changes)
        assert dict(known) == expected
        assert len(known) == len(expected)
        assert [known.get(key) for key in KEYS] == [expected.get(key) for key in KEYS]
        assert dict(older) == before


@given(st.permutations(KEYS))
def test_equality_is_of_contents_whatever_the_table_became(order: list[bytes]) -> None:
    grown = changed(KeyMap(), [(key, 1) for key in order])
    shrunk = changed(grown, [(key, None) for key in order[3:]])
    small = KeyMap.of(dict.fromkeys(order[:3], 1))
    assert len(shrunk.slots) > len(small.slots)
    assert (shrunk, hash(shrunk)) == (small, hash(small))
    assert shrunk != grown
    assert small != KeyMap.of(dict.fromkeys(order[:3], 2))


def test_a_key_that_is_not_there_is_a_key_error() -> None:
    known = KeyMap.of({KEYS[0]: 1})
    tx = known.mutate()
    with pytest.raises(KeyError):
        known[KEYS[1]]
    with pytest.raises(KeyError):
        tx[KEYS[1]]
    with pytest.raises(KeyError):
        del tx[KEYS[1]]
    assert tx.finish() == known


def test_the_table_grows_by_one_chain_a_key_and_each_key_is_in_its_own() -> None:
    known = KeyMap()
    for number, key in enumerate(KEYS, start=1):
        known = changed(known, [(key, number)])
        assert len(known.slots) == max(SLOTS_MIN, number)
        for place, entry in enumerate(known.slots):
            while entry is not None:
                assert slot(entry.key, len(known.slots)) == place
                entry = entry.more


def test_another_process_with_other_hashes_reads_it() -> None:
    known = KeyMap.of({key: number for number, key in enumerate(KEYS)})
    program = (
        "import pickle, sys; known = pickle.load(sys.stdin.buffer); "
        f"assert [known[bytes([n]) * 36] for n in range({len(KEYS)})] == list(range({len(KEYS)}))"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(known),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
