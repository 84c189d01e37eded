# SPDX-License-Identifier: Apache-2.0
"""Several policies over one trace, and a manager that knows which requests wait."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from kvcore.replay import command
from kvcore.replay.loop import replay
from kvcore.replay.page import to_html
from kvcore.replay.results import Options
from kvcore.replay.summary import Report
from kvcore.replay.workload import TraceRequest
from kvcore.types.config import EvictionName
from tests.conftest import Backend

UNIT = 16
NUM_ROUNDS = 12


def talks() -> list[TraceRequest]:
    """Make requests of twelve users in turn, whose prompts grow, faster than they are served."""
    return [
        TraceRequest(
            line=1 + user + 12 * turn,
            arrival=0.01 * turn,
            prompt_len=UNIT * (4 + turn) + 1,
            output_len=8,
            hash_ids=[*range(1000 * user, 1000 * user + 4 + turn), 10**6 + 12 * turn + user],
            unit=UNIT,
        )
        for turn in range(NUM_ROUNDS)
        for user in range(12)
    ]


def options(policy: EvictionName, num_known: int) -> Options:
    """Return a pool of a few requests, on an engine that is too slow for them."""
    slow = 0.001
    return Options(
        num_blocks=120, policy=policy, num_known=num_known, seconds_per_prefill_token=slow
    )


def test_who_waits_is_found_again_if_the_policy_knows_of_it(backend: Backend) -> None:
    least = replay(talks(), options("lru", 0), backend=backend)
    same = replay(talks(), options("lru", 16), backend=backend)
    assert same.hit_tokens == least.hit_tokens, "an order of arrival changes nothing by itself"
    assert same.finished == 12 * NUM_ROUNDS
    found = replay(talks(), options("queue_aware", 16), backend=backend)
    assert found.finished == 12 * NUM_ROUNDS
    assert least.optimum_hit_tokens is not None
    assert found.hit_tokens - least.hit_tokens > 0.4 * (least.optimum_hit_tokens - least.hit_tokens)
    alone = replay(talks(), options("queue_aware", 0), backend=backend)
    assert alone.hit_tokens >= least.hit_tokens


def test_an_admission_that_spares_nothing_finds_no_more() -> None:
    greedy = attrs.evolve(options("queue_aware", 16), spared=0.0)
    spared = replay(talks(), options("queue_aware", 16), backend="python")
    assert replay(talks(), greedy, backend="python").hit_tokens < spared.hit_tokens


def test_policies_are_runs_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talks.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": round(each.arrival * 1000),
                "input_length": 512 * (len(each.hash_ids) - 1) + 1,
                "output_length": 8,
                "hash_ids": list(each.hash_ids),
            }
        )
        for each in talks()[:40]
    ]
    path.write_text("\n".join(lines))
    words = ["--blocks", "60", "--block-size", "512", "--waiting", "8", "--backend", "python"]
    assert command.main([str(path), *words, "--sweep", "90", "--policies", "all", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    sizes = [(row["num_blocks"], row["policy"]) for row in data["sweep"]]
    assert sizes[:2] == [(60, "lru"), (60, "uncached_first")]
    assert len(sizes) == len(set(sizes)) == 12
    for row in data["sweep"]:
        alone = ["--blocks", str(row["num_blocks"]), "--policy", row["policy"], "--json"]
        assert command.main([str(path), *words[2:], *alone]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == row["tokens"]
    assert command.main([str(path), *words, "--policies", "lru2,lru"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if " lru" in line]
    assert ["60", "lru"] in rows
    assert ["60", "lru2"] in rows


def test_the_page_has_a_curve_for_each_policy() -> None:
    pytest.importorskip("matplotlib")
    runs = [replay(talks(), options(name, 8), backend="python") for name in ("lru", "queue_aware")]
    page = "".join(to_html(Report(runs[0], tuple(runs))))
    assert ">queue_aware<" in page
    assert "this policy" not in page
