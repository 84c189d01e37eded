# SPDX-License-Identifier: Apache-2.0
"""KVCORE_RECORD under vLLM: what its scheduler asks is recorded, and can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm_environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm

from kvcore.record.reader import read_calls
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from tests.engines.vllm_engine import make_cache, make_engine, run

pytestmark = pytest.mark.vllm
SHARED = list(range(16))


@pytest.mark.parametrize("num_blocks", [33, 9])
def test_a_run_of_vllms_scheduler_is_recorded_and_made_again(
    num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path))
    cache_config = make_cache(num_blocks=num_blocks)
    scheduler = make_engine(kvcore_vllm.Scheduler, cache_config=cache_config)
    prompts = {name: [*SHARED, place] for place, name in enumerate("abcd")}
    answered = run(scheduler, prompts)
    assert answered == dict.fromkeys(prompts, 3)
    segment = read_segment(tmp_path / "0000" / "00000000.kvcrec")
    names = [call.name for call in read_calls(segment)]
    assert names.count("add_request") == len(prompts)
    assert {"get_computed_blocks", "allocate_slots", "take_batch", "free"} <= {*names}
    done = rerun(tmp_path / "0000", ["rust", "python"])
    assert (done.num_calls, done.difference) == (len(names), None)
