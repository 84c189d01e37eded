# SPDX-License-Identifier: Apache-2.0
"""nano-vllm's own scheduler over kvcore and over its own manager: the same tokens and steps.

Skipped if there is no checkout of nano-vllm; `make engines-nano` makes one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benches.nano_vllm import checkout
from benches.nano_vllm.__main__ import compare, main, making, measure, served_load
from benches.nano_vllm.drive import Load, drive, make_engine, random_load
from engines.nano_vllm.kvcore_nano_vllm import FILES, BlockManager, Unsupported, install, installed


@pytest.fixture
def scheduler() -> Iterator[Any]:
    """Import nano-vllm's module of that name."""
    reason = checkout.missing()
    if reason is not None:
        pytest.skip(reason)
    with checkout.imported() as module:
        yield module


def test_random_schedules_give_the_same_tokens_and_steps(scheduler: Any) -> None:
    found = compare(scheduler, range(200))
    assert found.other_tokens == []
    assert found.other_steps == [], "nano-vllm keeps all blocks of a content here"
    assert found.num_same > 100


def test_the_comparison_finds_another_order_of_free_blocks(scheduler: Any) -> None:
    class Reversed(scheduler.BlockManager):  # type: ignore[misc] # nano-vllm has no types here
        def deallocate(self, seq: Any) -> None:
            seq.block_table.reverse()
            super().deallocate(seq)

    with making(scheduler, Reversed):
        found = compare(scheduler, range(5))
    assert found.other_tokens == []
    assert found.other_steps != []


def test_a_changed_file_of_the_pinned_commit_is_refused(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(scheduler.__file__).parent
    for name in FILES:
        (tmp_path / name).write_bytes((source / name).read_bytes())
    monkeypatch.setattr(scheduler, "__file__", str(tmp_path / "scheduler.py"))
    with installed():
        pass
    changed = (tmp_path / "block_manager.py").read_text().replace("deque", "list", 1)
    (tmp_path / "block_manager.py").write_text(changed)
    with pytest.raises(Unsupported, match=r"block_manager\.py is not as in that commit"):
        install()
    with installed(any_commit=True):
        pass


def test_the_engine_is_as_it_was_after_the_block(scheduler: Any) -> None:
    theirs = scheduler.BlockManager
    with installed():
        _, _, manager = drive(scheduler, random_load(0))
    assert isinstance(manager, BlockManager)
    _, _, manager = drive(scheduler, random_load(0))
    assert type(manager) is theirs


def test_a_step_that_failed_at_a_prompt_ends_in_an_error(scheduler: Any) -> None:
    load = Load(4, 10, 2, 64, prompts=[[1, 2, 3, 4, 5]], num_new=[3])
    with installed():
        engine, _ = make_engine(scheduler, load)
    engine.schedule()  # the model fails, so nothing follows
    with pytest.raises(Unsupported, match="0 of its 5 tokens computed: an earlier step did not"):
        engine.schedule()


def test_both_managers_are_measured(scheduler: Any) -> None:
    theirs, mine = measure(scheduler, served_load(16, 16, 1500, 4), 1, lambda _: None)
    assert min(theirs.alone, mine.alone) > 0
    assert min(theirs.net, mine.net) > 0


def test_without_a_checkout_it_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    monkeypatch.delenv("KVCORE_NANO_VLLM", raising=False)
    monkeypatch.setattr(checkout, "SOURCE", str(tmp_path / "nobody"))
    assert main() == 0
    assert "nano-vllm: left out: nano-vllm is not in" in capfd.readouterr().out


def test_the_pinned_commit_is_cloned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path / "origin"), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "origin" / "nanovllm").mkdir(parents=True)
    (tmp_path / "origin" / "nanovllm" / "__init__.py").write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(checkout, "SOURCE", str(tmp_path / "origin"))
    monkeypatch.setattr(checkout, "COMMIT", git("rev-parse", "HEAD"))
    monkeypatch.setenv("KVCORE_NANO_VLLM", str(tmp_path / "cache" / "nano"))
    assert "`make engines-nano` clones it" in str(checkout.missing())
    checkout.clone()
    assert checkout.missing() is None
    monkeypatch.setattr(checkout, "SOURCE", "nowhere")
    checkout.clone()


def test_no_module_of_the_checkout_stays_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nanovllm" / "engine").mkdir(parents=True)
    text = "from transformers import AutoConfig\nBlockManager = AutoConfig\n"
    (tmp_path / "nanovllm" / "engine" / "scheduler.py").write_text(text)
    monkeypatch.setenv("KVCORE_NANO_VLLM", str(tmp_path))
    monkeypatch.setattr(checkout, "find_spec", lambda _: None)
    before = {*sys.modules}
    with checkout.imported() as module:
        assert module.BlockManager is object
    assert {*sys.modules} - before == set()
