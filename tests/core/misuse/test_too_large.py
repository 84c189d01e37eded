# SPDX-License-Identifier: Apache-2.0
"""Pools that do not fit in memory are refused before they are made, in both languages.

The pools are made in a process of little memory, so that none is ever allocated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore import Config, KVCacheManager
from kvcore.types import memory
from kvcore.types.config import MAX_BLOCKS
from kvcore.types.errors import PoolTooLarge
from tests.conftest import Backend

LIMIT = """
import resource, sys
def limit(more):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more, most))
def refused(make):
    try:
        make()
    except PoolTooLarge as error:
        needed, available = error.fields["needed_bytes"], error.fields["available_bytes"]
        assert needed > available >= 0, error
        print(error.fields["num_blocks"])
    else:
        print("made")
from kvcore import Config, KVCacheManager
from kvcore.errors import PoolTooLarge
from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager
"""
CONSTRUCTORS = """
limit(2**30)
most = 2**31 - 1
refused(lambda: KVCacheManager(Config(most), {backend!r}))
refused(lambda: KVCacheManager(Config(9, num_host_blocks=most), {backend!r}))
refused(lambda: Backing(most, most, backend={backend!r}))
refused(lambda: SelfAttnBlockSpaceManager(16, most, 4, backend={backend!r}))
refused(lambda: SelfAttnBlockSpaceManager(16, 4, most, backend={backend!r}))
KVCacheManager(Config(1000), {backend!r})
"""
RESTORE = """
manager = KVCacheManager(Config(9), {backend!r})
data = open({file!r}, "rb").read()
before = manager.encode()
limit(3 * 2**20)
refused(lambda: manager.restore(data))
refused(lambda: manager._core.restore(data))
assert manager.encode() == before
"""
REPLAY = """
from kvcore.replay import command
limit(2**30)
sys.exit(command.main({words!r}))
"""
NEEDS_LIMIT = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="this system has no /proc/self/statm"
)


def run(text: str) -> subprocess.CompletedProcess[str]:
    """Return the result of a process."""
    return subprocess.run([sys.executable, "-c", LIMIT + text], capture_output=True, text=True)


def printed(text: str) -> list[str]:
    """Return the output of a process."""
    done = run(text)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@NEEDS_LIMIT
def test_a_pool_that_cannot_be_reserved_is_not_made(backend: Backend) -> None:
    blocks = [MAX_BLOCKS, MAX_BLOCKS + 9, 2 * MAX_BLOCKS, MAX_BLOCKS, MAX_BLOCKS]
    assert printed(CONSTRUCTORS.format(backend=backend)) == list(map(str, blocks))


@NEEDS_LIMIT
def test_a_state_that_cannot_be_reserved_is_not_restored(backend: Backend, tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_bytes(KVCacheManager(Config(10**5), "python").encode())
    assert printed(RESTORE.format(backend=backend, file=str(file))) == ["100000", "100000"]


def reserve(size: int) -> bytes:
    """Reserve nothing; raise MemoryError above 125 MB, as a system that lends no memory."""
    if size > 125_000_000:
        raise MemoryError
    return b""


def test_a_pool_is_compared_with_the_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo, most = tmp_path / "meminfo", tmp_path / "most"
    monkeypatch.setattr(memory, "MEMINFO", str(meminfo))
    monkeypatch.setattr(memory, "CGROUP", str(most))
    monkeypatch.setattr(memory, "bytes", reserve, raising=False)
    assert memory.num_available() == []
    lines = "MemTotal:  9000000 kB\nMemAvailable:  100000 kB\nSwapFree:  20000 kB\nHugePages: 0\n"
    meminfo.write_text(lines, encoding="ascii")
    most.write_text("max\n", encoding="ascii")
    assert memory.num_available() == [120_000 * 1024]
    memory.check_memory(700_000)
    with pytest.raises(PoolTooLarge) as caught:
        memory.check_memory(800_000)
    assert caught.value.fields == {
        "num_blocks": 800_000,
        "needed_bytes": 800_000 * memory.BLOCK_BYTES,
        "available_bytes": 120_000 * 1024,
    }
    most.write_text("100000000\n", encoding="ascii")
    with pytest.raises(PoolTooLarge, match="100000000 are available"):
        memory.check_memory(700_000)


@NEEDS_LIMIT
def test_a_replay_of_too_many_blocks_ends_with_one_line(backend: Backend, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 2, "output_length": 1, "hash_ids": [1]}
    file.write_text(json.dumps(line), encoding="ascii")
    words = ["--blocks", "2000000000", "--backend", backend, str(file)]
    done = run(REPLAY.format(words=words))
    assert done.returncode == 2
    assert "blocks need" in done.stderr
    assert len(done.stderr.splitlines()) == 1
