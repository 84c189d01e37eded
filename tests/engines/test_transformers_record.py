# SPDX-License-Identifier: Apache-2.0
"""KVCORE_RECORD under transformers: what its batches ask is recorded, and can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.transformers_environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers

from kvcore.record.reader import read_calls
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from tests.engines.transformers_models import LAYERS, draw_prompts, reference, serve, tiny

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_of_transformers_is_recorded_and_made_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path))
    prompts = draw_prompts(1)
    with kvcore_transformers.installed():
        served = serve(tiny(kind), prompts, num_blocks=16)
    assert served.tokens == reference(kind, 1)
    names: list[str] = []
    for folder in tmp_path.iterdir():  # transformers makes the cache anew when it starts
        made = [call.name for call in read_calls(read_segment(folder / "00000000.kvcrec"))]
        done = rerun(folder, ["rust", "python"])
        assert (done.num_calls, done.difference) == (len(made), None)
        names += made
    assert names.count("add_request") >= len(prompts)
    assert {"get_computed_blocks", "allocate_slots", "take_batch", "free"} <= {*names}
