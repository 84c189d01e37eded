# SPDX-License-Identifier: Apache-2.0
"""The random comparisons see a wrong reset, watermark or statistic, and do what their mode says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm.manager
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benches.vllm.compare import MODEL, run, world_of
from benches.vllm.images import images_of
from benches.vllm.report import Verdict, verdict_of

pytestmark = pytest.mark.vllm

Manager = kvcore_vllm.manager.KVCacheManager
NUM_STEPS = 80


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a folder with the configuration of a model."""
    init_none_hash(sha256)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def compared(mode: str, model: str, seed: int = 0) -> Verdict:
    """Compare a run of a mode."""
    return verdict_of(run(world_of(mode, seed), seed, NUM_STEPS, model))


@pytest.mark.parametrize("mode", ["sync-resets", "sync-watermark", "sync-images"])
def test_runs_are_the_same_and_do_what_their_mode_says(mode: str, model: str) -> None:
    verdict = compared(mode, model)
    assert verdict.differs == ""
    assert (verdict.happened["resets"] > 0) == (mode == "sync-resets")
    assert (verdict.happened["images"] > 0) == (mode == "sync-images")
    assert verdict.happened["hits"] > 0


def refuse(_: Any) -> bool:
    """Reset nothing."""
    return False


def forget_little(manager: Any) -> bool:
    """Reset the cache, and report it, but keep the keys of the first blocks."""
    done = bool(manager.compat.core.num_free_blocks == manager.compat.config.num_usable_blocks)
    if done:
        manager.compat.evict_blocks(range(5, manager.compat.config.num_blocks))
        manager.prefix_cache_stats.reset = True
    return done


def say_nothing(manager: Any) -> bool:
    """Reset the cache, without a word in the statistics."""
    return bool(manager.compat.reset_prefix_cache())


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [(refuse, "  interrupted"), (forget_little, "  keys"), (say_nothing, "  statistics")],
)
def test_a_wrong_reset_is_seen(
    wrong: Any, seen: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manager, "reset_prefix_cache", wrong)
    verdict = compared("sync-resets", model)
    assert seen in verdict.differs.splitlines()
    assert verdict.rule == ""


def test_a_watermark_that_is_not_kept_is_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manager, "_kept_free", lambda *_: 0)
    verdicts = [compared("sync-watermark", model, seed) for seed in range(4)]
    assert any(verdict.differs and not verdict.rule for verdict in verdicts)


def test_hits_that_are_not_counted_are_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manager, "record_prefix_cache_stats", lambda *_: None)
    assert "  statistics" in compared("sync", model).differs.splitlines()


def test_prompts_that_begin_alike_have_the_same_images() -> None:
    prompt = [1, 2, 3, 4, 0] * 20
    images = images_of(prompt)
    assert len(images) > 2
    assert len({each.identifier for each in images}) < len(images)
    ends = [each.mm_position.offset + each.mm_position.length for each in images]
    assert all(a <= b.mm_position.offset for a, b in zip(ends, images[1:], strict=False))
    assert ends[-1] < len(prompt)
    kinds = [(each.identifier, each.mm_position) for each in images]
    for prompts, same in (([*prompt, 3, 1], kinds), (prompt[: ends[1] + 1], kinds[:2])):
        others = [(each.identifier, each.mm_position) for each in images_of(prompts)]
        assert others[: len(same)] == same
        assert len(others) - len(same) in (0, 1)
    lengths = {each.identifier: each.mm_position.length for each in images}
    assert all(lengths[each.identifier] == each.mm_position.length for each in images)
