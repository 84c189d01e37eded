# SPDX-License-Identifier: Apache-2.0
"""A record by keys tells as much about other configurations as one with tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.codec.decode import decode
from kvcore.record.errors import RecordNeedsText
from kvcore.record.reader import segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.command import main
from kvcore.replay.records.counterpart import BY_BLOCKS
from kvcore.replay.records.what_if import Variant, WhatIf, what_if
from kvcore.trace.calls import Call, perform_on
from kvcore.types.errors import InvalidConfig
from kvcore.types.keys import ONE_WAY
from tests.conftest import Backend
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import record
from tests.record.test_what_if import POOL, admission


def variants_of(config: Config, calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """Return changes of a configuration that can be made.

    Larger blocks have other keys if they are hashed from tokens, so calls that name blocks differ;
    and a record with tokens has an engine's own hashes for its own size of blocks only.
    """
    of_size = any(
        each.name in BY_BLOCKS
        or (each.name == "add_request" and each.args[0].block_hashes is not None)
        for each in calls
    )
    wanted: dict[str, dict[str, Any]] = {"same": {}}
    for name, num_blocks in (("less", -1), ("least", -3), ("more", 40)):
        wanted[name] = {"num_blocks": config.num_blocks + num_blocks}
    wanted["policy"] = {"eviction": "lru2", "num_blocks": config.num_blocks - 1}
    if len(config.groups) == 1 and not of_size:
        size = 2 * config.block_size
        group = attrs.evolve(config.groups[0], block_size=size)
        wanted["larger"] = {"block_size": size, "groups": (group,)}
    found = {}
    for name, changes in wanted.items():
        try:
            attrs.evolve(config, **changes)
        except InvalidConfig:
            continue
        found[name] = changes
    return found


def run_both(
    calls: Sequence[Call],
    config: Config,
    variants: dict[str, dict[str, Any]],
    backend: Backend,
    start: int = 0,
) -> list[WhatIf]:
    """Record calls with tokens and by keys, and run the variants of each record."""
    done = []
    with tempfile.TemporaryDirectory() as base:
        for tokens in ("text", "keys"):
            folder = Path(base, tokens)
            record(folder, config, calls, backend, start, tokens=tokens, keep_segments=100)
            begun = decode(read_segment(segment_files(folder)[0]).state).config
            pools = {name: attrs.evolve(begun, **each) for name, each in variants.items()}
            done.append(what_if(folder, pools, backend))
    return done


class OtherPoolsByKeys(Machine):
    """Any calls in any order, and ids that are never used again, as in a record by keys."""

    least = 6
    most = 14
    longest = 12
    twin = False

    def new_name(self, _: st.DataObject) -> str:
        return f"number {len(self.run.calls)}"

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run") or self.run.state.config.hashing not in ONE_WAY:
            return
        config, calls = self.run.state.config, self.run.calls
        start = len(calls) // 2 if len(calls) % 3 == 0 else 0
        with_tokens, by_keys = run_both(calls, config, variants_of(config, calls), "python", start)
        assert by_keys == with_tokens


TestOtherPoolsByKeys = OtherPoolsByKeys.TestCase
TestOtherPoolsByKeys.settings = settings(max_examples=examples(25), stateful_step_count=40)


def conversation(backend: Backend, folder: Path, tokens: Any) -> None:
    """Record two turns of a user in a pool of five blocks, with another user between them."""
    manager = KVCacheManager(POOL, backend)
    manager.start_recording(Recorder(folder, tokens=tokens))
    for name, prompt in (("a", [1, 2, 3, 4]), ("b", [7] * 6), ("c", [1, 2, 3, 4, 5, 6, 8])):
        manager.add_request(Request(name, prompt))
        hit = manager.get_computed_blocks(name)
        manager.allocate_slots(name, len(prompt) - hit.num_tokens, hit)
        manager.take_batch()
        for token in (5, 6):
            manager.append([name], [token])
            manager.take_batch()
        manager.free(name)
        manager.remove_request(name)
    manager.stop_recording()


@pytest.mark.parametrize("tokens", ["text", "keys"])
def test_a_larger_pool_keeps_outputs_and_prompt(
    tmp_path: Path, backend: Backend, tokens: str
) -> None:
    conversation(backend, tmp_path / "record", tokens)
    pools = {"more": attrs.evolve(POOL, num_blocks=20)}
    if tokens == "keys":
        pools = {"more": attrs.evolve(pools["more"], hash_seed=b"")}
    done = what_if(tmp_path / "record", pools, backend)
    (more,) = done.variants
    # b takes two of a's three blocks, and c the four of b; in the larger pool c finds a's tokens.
    assert (done.recorded.hit_tokens, more.tally.hit_tokens) == (2, 6)
    assert (done.recorded.evictions, more.tally.evictions) == (6, 0)


@pytest.mark.parametrize("tokens", ["text", "keys"])
def test_a_refused_append_gets_its_hash_again(
    tmp_path: Path, backend: Backend, tokens: Any
) -> None:
    """With a token per block each append needs a block, and comes with its hash."""
    manager = KVCacheManager(Config(12, 1), backend)
    manager.start_recording(Recorder(tmp_path / "record", tokens=tokens))
    for call in [*admission("a", [1, 2]), *admission("b", [3])]:
        perform_on(manager, call)
    for values in ([5, 4], [6, 7]):
        manager.append(["b", "a"], values)
        manager.take_batch()
    manager.free("b")
    manager.take_batch()
    manager.append(["a"], [8])
    manager.take_batch()
    manager.free("a")
    manager.add_request(Request("c", [1, 2, 4, 7, 8, 9]))
    hit = manager.get_computed_blocks("c")
    manager.allocate_slots("c", 1, hit)
    manager.take_batch()
    manager.stop_recording()
    begun = decode(read_segment(segment_files(tmp_path / "record")[0]).state).config
    less = {"less": attrs.evolve(begun, num_blocks=7)}
    (done,) = what_if(tmp_path / "record", less, backend).variants
    # a gets its last two blocks once b has left; c finds all five, and takes the third one of b.
    assert (done.tally.delayed, done.tally.hit_tokens, done.tally.evictions) == (1, 5, 3)


def test_blocks_twice_as_large_have_every_second_hash(tmp_path: Path, backend: Backend) -> None:
    variants: list[Variant] = []
    for tokens in ("text", "keys"):
        folder = tmp_path / tokens
        conversation(backend, folder, tokens)
        begun = decode(read_segment(segment_files(folder)[0]).state).config
        larger = attrs.evolve(begun, num_blocks=20, block_size=4, groups=(Group(4),))
        variants += what_if(folder, {"larger": larger}, backend).variants
    assert variants[0] == variants[1]
    assert variants[1].tally.hit_tokens == 4


def test_hashes_that_an_engine_adds_later_are_taken_for_larger_blocks(
    tmp_path: Path, backend: Backend
) -> None:
    hashes = [bytes([number]) * 32 for number in range(4)]
    calls = []
    for name in ("a", "b"):
        calls += [
            Call("add_request", (Request(name, [1] * 9, block_hashes=hashes[:1]),)),
            Call("add_block_hashes", (name, hashes[1:4])),
            Call("get_computed_blocks", (name,)),
        ]
        calls += [Call("allocate_slots", (name, 9)), Call("take_batch"), Call("free", (name,))]
    config = attrs.evolve(POOL, num_blocks=20)
    record(tmp_path / "record", config, calls, backend, tokens="keys")
    begun = decode(read_segment(segment_files(tmp_path / "record")[0]).state).config
    larger = attrs.evolve(begun, block_size=4, groups=(Group(4),))
    smaller_pool = attrs.evolve(begun, num_blocks=19)
    done = what_if(tmp_path / "record", {"larger": larger, "less": smaller_pool}, backend)
    assert [each.parted_at for each in done.variants] == [None, None]  # both find 8 tokens


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("block_size=3", "blocks of 3 tokens, no multiple of the recorded 2, needs tokens"),
        ("block_size=1", "blocks of 1 tokens, no multiple of the recorded 2, needs tokens"),
        ("hashing=sha256_cbor", "the hashing sha256_cbor instead of sha256 needs tokens"),
        ("floors=bob:1,max_model_len=4", "a floor for a salt that had none needs tokens"),
    ],
)
def test_what_hashes_do_not_tell_is_refused(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str], words: str, reason: str
) -> None:
    conversation(backend, tmp_path / "record", "keys")
    assert main([str(tmp_path / "record"), "--backend", backend, "--what-if", words]) == 2
    assert reason in capsys.readouterr().err


def test_a_record_without_hashes_cannot_tell_what_caching_would_find(
    tmp_path: Path, backend: Backend
) -> None:
    config = attrs.evolve(POOL, enable_caching=False)
    record(tmp_path / "record", config, admission("a", [1, 2, 3]), backend, tokens="keys")
    with pytest.raises(RecordNeedsText, match="prefix caching, which was off, needs tokens"):
        what_if(tmp_path / "record", {"on": POOL}, backend)
    more = attrs.evolve(config, num_blocks=9, hash_seed=b"")
    assert what_if(tmp_path / "record", {"more": more}, backend).variants[0].fidelity == 1
