# SPDX-License-Identifier: Apache-2.0
"""A far tier below a replayed pool: what it brings, and that it changes nothing else."""

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings

from kvcore.replay.command import main
from kvcore.replay.far.far_blocks import FarBlocks
from kvcore.replay.loop import replay
from kvcore.replay.results import Options, StorePolicy
from kvcore.replay.workload import TraceRequest
from kvcore.types.errors import InvalidCount
from tests.conftest import need_twin
from tests.helpers.amount import examples
from tests.replay.small_traces import crowds
from tests.replay.test_loop import BACKENDS, without_costs

KEYS = [bytes([each]) for each in range(6)]


def test_the_block_used_longest_ago_leaves() -> None:
    far = FarBlocks(3, "publication")
    far.computed(KEYS[:3])
    assert far.count(KEYS, 0, 1) == 1
    far.computed([KEYS[3]])
    assert [far.count([key], 0, 1) for key in KEYS[:4]] == [1, 0, 1, 1]
    assert far.count(KEYS, 0, 4) == 1, "a hole ends the row"
    assert far.count(KEYS, 2, 4) == 2
    far.computed(KEYS[:1])
    assert far.num_written == 4


def test_a_second_use_is_what_stores() -> None:
    far = FarBlocks(3, "second_use")
    far.computed(KEYS[:2])
    assert (far.num_written, far.count(KEYS, 0, 2)) == (0, 0)
    far.computed(KEYS[1:3])
    assert (far.num_written, far.count(KEYS, 1, 3)) == (1, 1)


@settings(max_examples=examples(10))
@given(crowds())
def test_a_far_tier_without_end_finds_what_an_unlimited_cache_finds(
    crowd: tuple[list[TraceRequest], Options],
) -> None:
    """The exceptions are blocks that no load can bring: partial ones, and those being computed."""
    need_twin()
    requests, options = crowd
    policies: tuple[StorePolicy, ...] = ("publication", "second_use")
    for policy in policies:
        plan = attrs.evolve(options, far_blocks=1000, store_policy=policy)
        python, rust = (replay(requests, plan, backend=backend) for backend in BACKENDS)
        assert without_costs(python) == without_costs(rust)
        assert rust.finished + rust.num_refused == len(requests)
        assert rust.far_hit_tokens is not None
        assert rust.ideal_hit_tokens is not None
        assert rust.hit_tokens + rust.far_hit_tokens <= rust.ideal_hit_tokens


@pytest.mark.parametrize(
    ("policy", "hits", "written"), [("publication", 1024, 6), ("second_use", 0, 3)]
)
def test_what_left_the_pool_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, hits: int, written: int
) -> None:
    """In a pool of three blocks of 512 tokens, the second prompt takes the place of the first."""
    path = tmp_path / "trace.jsonl"
    length = {"input_length": 3 * 512, "output_length": 1}
    rows = [
        {"timestamp": 1000 * at, **length, "hash_ids": ids}
        for at, ids in enumerate([[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    call = [str(path), "--blocks", "4", "--block-size", "512", "--far-blocks", "10"]
    assert main([*call, "--store-policy", policy, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"]["far_hit"] == hits
    assert result["far_written"] == written
    assert main(call) == 0
    assert "far hits" in capsys.readouterr().out


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["t", "--blocks", "4", "--store-policy", "second_use"]) == 2
    assert "--store-policy needs --far-blocks" in capsys.readouterr().err
    assert main(["t", "--blocks", "4", "--far-blocks", "4", "--apply", "torch"]) == 2
    assert "omit --far-blocks" in capsys.readouterr().err
    with pytest.raises(InvalidCount, match="far_blocks"):
        replay([], Options(num_blocks=4, far_blocks=0))
