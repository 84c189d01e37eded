# SPDX-License-Identifier: Apache-2.0
"""nano-vllm's six calls over kvcore answer as an oracle of plain lists does."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engines.nano_vllm.kvcore_nano_vllm import (
    FILES,
    BlockManager,
    Unsupported,
    install,
    installed,
    uninstall,
)
from kvcore.errors import InvalidToken
from tests.conftest import Backend
from tests.engines.nano_vllm.listed_blocks import ListedBlocks
from tests.engines.nano_vllm.sequences import Schedule, Sequence
from tests.engines.nano_vllm.stub_nano import TheirBlockManager, in_use, stub_scheduler

ROOT = Path(__file__).parents[3]
NUM_SCHEDULES = {"rust": 200, "python": 20}


def test_random_schedules_get_the_blocks_and_answers_of_the_oracle(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    num_preempted = num_hits = 0
    for seed in range(NUM_SCHEDULES[backend]):
        oracle, schedule = Schedule(ListedBlocks, seed), Schedule(BlockManager, seed)
        assert schedule.run() == oracle.run(), f"seed {seed}"
        core = schedule.manager.manager
        core.check()
        assert core.num_free_blocks == schedule.world.num_blocks
        num_preempted += schedule.num_preempted
        num_hits += schedule.num_hits
    assert num_preempted > NUM_SCHEDULES[backend]
    assert num_hits > 10 * NUM_SCHEDULES[backend]


def start(manager: BlockManager, seq: Sequence, num_computed: int | None = None) -> None:
    """Allocate a sequence and compute its first tokens, all of them by default."""
    manager.allocate(seq, manager.can_allocate(seq))
    end = seq.num_tokens if num_computed is None else num_computed
    seq.num_scheduled_tokens = end - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens, seq.num_scheduled_tokens = end, 0


def test_a_content_with_two_blocks_stays_findable_when_the_newer_one_goes() -> None:
    manager, prompt = BlockManager(8, 2), [1, 2, 3]
    first, second, third = (Sequence(number, [*prompt], 2) for number in range(3))
    for seq in (first, second):
        manager.allocate(seq, manager.can_allocate(seq))
        seq.num_scheduled_tokens = 3
    for seq in (first, second):
        manager.hash_blocks(seq)
    assert (first.block_table, second.block_table) == ([0, 1], [2, 3])
    manager.deallocate(second)
    filler = Sequence(3, list(range(10, 22)), 2)
    manager.allocate(filler, manager.can_allocate(filler))
    assert 2 in filler.block_table
    manager.deallocate(filler)
    assert manager.can_allocate(third) == 1
    manager.allocate(third, 1)
    assert third.block_table[0] == first.block_table[0]


def test_blocks_of_one_token_grow_with_every_token() -> None:
    manager, seq = BlockManager(4, 1), Sequence(0, [7], 1)
    start(manager, seq)
    for token in (8, 9):
        seq.append_token(token)
        assert manager.can_append(seq)
        manager.may_append(seq)
        seq.is_prefill, seq.num_scheduled_tokens = False, 1
        manager.hash_blocks(seq)
        seq.num_cached_tokens += 1
    assert seq.block_table == [0, 1, 2]
    assert manager.can_allocate(Sequence(1, [7, 8, 9, 10], 1)) == 3
    manager.deallocate(seq)
    manager.manager.check()
    assert manager.manager.num_free_blocks == 4


def test_a_sequence_can_be_given_up_at_any_moment() -> None:
    manager = BlockManager(4, 2)
    never, requested, held, begun = (Sequence(number, [number, 1, 2], 2) for number in range(4))
    manager.deallocate(never)
    manager.can_allocate(requested)
    manager.deallocate(requested)
    manager.allocate(held, manager.can_allocate(held))  # in a step that never ran
    manager.deallocate(held)
    start(manager, begun, num_computed=2)
    manager.deallocate(begun)
    manager.manager.check()
    assert manager.manager.num_free_blocks == 4
    for seq in (requested, held, begun):
        assert seq.block_table == []
        assert manager.can_allocate(seq) == (seq is begun)


def test_two_managers_in_one_process_share_nothing() -> None:
    one, other = BlockManager(4, 2), BlockManager(4, 2)
    start(one, Sequence(0, [1, 2, 3], 2))
    assert one.can_allocate(Sequence(1, [1, 2, 3], 2)) == 1
    assert other.can_allocate(Sequence(1, [1, 2, 3], 2)) == 0


def test_after_new_weights_nothing_of_the_old_ones_is_found() -> None:
    manager = BlockManager(8, 2)
    seq, other = Sequence(0, [1, 2, 3], 2), Sequence(1, [1, 2, 4], 2)
    start(manager, seq)
    assert manager.can_allocate(other) == 1
    assert not manager.manager.reset_prefix_cache(), "a sequence holds blocks"
    manager.manager.advance_epoch()
    assert manager.can_allocate(other) == 0
    seq.append_token(5)
    manager.may_append(seq)
    for each in (seq, other):
        manager.deallocate(each)
    start(manager, again := Sequence(2, [1, 2, 3], 2))
    assert manager.can_allocate(Sequence(3, [1, 2, 4], 2)) == 1
    manager.deallocate(again)
    manager.deallocate(Sequence(3, [], 2))
    assert manager.manager.reset_prefix_cache()
    assert manager.can_allocate(Sequence(4, [1, 2, 4], 2)) == 0


def test_blocks_that_were_not_asked_about_are_refused() -> None:
    manager, seq = BlockManager(4, 2), Sequence(5, [1, 2, 3], 2)
    with pytest.raises(Unsupported, match="sequence 5 gets 0 cached blocks, which is not what"):
        manager.allocate(seq, 0)
    manager.can_allocate(seq)
    before = manager.manager.encode()
    with pytest.raises(Unsupported, match="sequence 5 gets 1 cached blocks, which is not what"):
        manager.allocate(seq, 1)
    assert (manager.manager.encode(), seq.block_table) == (before, [])
    manager.allocate(seq, 0)
    assert seq.block_table == [0, 1]


def test_blocks_that_were_refused_are_not_given() -> None:
    manager, seq, other = BlockManager(2, 2), Sequence(0, [1, 2, 3], 2), Sequence(1, [4], 2)
    start(manager, seq)
    assert manager.can_allocate(other) == -1
    before = manager.manager.encode()
    with pytest.raises(Unsupported, match=r"sequence 1 gets blocks that it was refused: .*1.*0"):
        manager.allocate(other, 0)
    seq.append_token(4)
    seq.append_token(5)
    seq.num_cached_tokens = 4
    assert not manager.can_append(seq)
    with pytest.raises(Unsupported, match="sequence 0 gets blocks that it was refused"):
        manager.may_append(seq)
    assert manager.manager.encode() == before
    assert (seq.block_table, other.block_table) == ([0, 1], [])


def test_a_prompt_whose_step_failed_is_not_decoded_as_if_it_were_there() -> None:
    manager, seq = BlockManager(4, 2), Sequence(3, [1, 2, 3], 2)
    manager.allocate(seq, manager.can_allocate(seq))
    before = manager.manager.encode()
    with pytest.raises(Unsupported, match=r"sequence 3 .* 0 of its 3 tokens computed"):
        manager.may_append(seq)
    assert (manager.manager.encode(), seq.block_table) == (before, [0, 1])


def test_a_decode_step_that_failed_can_be_done_again() -> None:
    manager, seq = BlockManager(4, 2), Sequence(0, [1, 2], 2)
    start(manager, seq)
    seq.append_token(3)
    for _ in range(2):
        manager.may_append(seq)  # the step fails before hash_blocks
    assert seq.block_table == [0, 1]


def test_a_token_that_is_none_is_refused() -> None:
    manager, seq = BlockManager(4, 2), Sequence(0, [1, -2, 3], 2)
    before = manager.manager.encode()
    with pytest.raises(InvalidToken, match="-2"):
        manager.can_allocate(seq)
    assert manager.manager.encode() == before


def test_install_puts_kvcore_in_the_engines_place_and_uninstall_restores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = stub_scheduler(monkeypatch, TheirBlockManager)
    with installed(any_commit=True):
        assert in_use(scheduler) is BlockManager
        with pytest.raises(Unsupported, match="is installed in nano-vllm already"):
            install()
    assert in_use(scheduler) is TheirBlockManager
    with pytest.raises(Unsupported, match="is not installed in nano-vllm"):
        uninstall()
    with pytest.raises(ZeroDivisionError), installed(any_commit=True):
        1 / 0  # noqa: B018 - the engine's step fails
    assert in_use(scheduler) is TheirBlockManager


def test_uninstall_leaves_what_another_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = stub_scheduler(monkeypatch, TheirBlockManager)
    install(any_commit=True)
    scheduler.BlockManager = object
    with pytest.raises(Unsupported, match="is not installed in nano-vllm"):
        uninstall()
    assert in_use(scheduler) is object
    scheduler.BlockManager = BlockManager
    uninstall()
    assert in_use(scheduler) is TheirBlockManager


def test_a_manager_with_other_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(TheirBlockManager):
        def allocate(self, seq: Any, num_cached_blocks: int, _lazily: bool = False) -> None: ...

    class Older:
        def __init__(self, num_blocks: int, block_size: int) -> None: ...

    for manager, said in (
        (Newer, r"allocate\(self, seq, num_cached_blocks\); this one has allocate\(.*lazily\)$"),
        (Older, r"bb823b3 .* can_allocate\(self, seq\); this one has no such call$"),
    ):
        scheduler = stub_scheduler(monkeypatch, manager)
        for any_commit in (False, True):
            with pytest.raises(Unsupported, match=said):
                install(any_commit=any_commit)
        assert in_use(scheduler) is manager


def test_files_of_another_commit_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scheduler = stub_scheduler(monkeypatch, TheirBlockManager)
    scheduler.__file__ = str(tmp_path / "scheduler.py")
    contents = {name: f"# {name}\nPAGE = 256\n".encode() for name in FILES}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(FILES, name, hashlib.sha256(content).hexdigest())
    for name, content in contents.items():
        for changed in (content + b"\n", None):
            (tmp_path / name).unlink()
            if changed is not None:
                (tmp_path / name).write_bytes(changed)
            said = rf"commit bb823b3 of nano-vllm, and .*{name} is not as in that commit; install\("
            with pytest.raises(Unsupported, match=said):
                install()
            assert in_use(scheduler) is TheirBlockManager
            (tmp_path / name).write_bytes(content)
    (tmp_path / "sequence.py").write_bytes(contents["sequence.py"].replace(b"\n", b"\r\n"))
    with installed():  # a checkout with the line ends of Windows is the same commit
        assert in_use(scheduler) is BlockManager


def test_without_nano_vllm_install_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanovllm", None)
    with pytest.raises(ModuleNotFoundError, match="nanovllm"):
        install()


def test_the_wheel_has_one_module_and_needs_only_kvcore(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "engines" / "nano_vllm", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("kvcore_nano_vllm-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        needs = re.findall(r"^Requires-Dist: (\S+)", archive.read(metadata).decode(), re.MULTILINE)
        modules = [name for name in archive.namelist() if ".dist-info" not in name]
    assert modules == ["kvcore_nano_vllm.py"]
    assert [re.split(r"\W", need)[0] for need in needs] == ["kvcore"]
