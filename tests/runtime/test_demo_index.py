# SPDX-License-Identifier: Apache-2.0
"""The index of `make demo-cluster`: Dynamo's only if it runs."""

import contextlib
from pathlib import Path

import pytest
from kvcore_runtime.demos import cluster


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 1\n"], ids=["missing", "broken"])
def test_without_a_running_dynamo_there_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    if script is not None:
        python = tmp_path / "dynamo" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(script)
        python.chmod(0o755)
    with contextlib.ExitStack() as stack:
        assert cluster._start_dynamo(stack) is None
    said = capsys.readouterr().out
    assert said == (
        "" if script is None else f"Dynamo's indexer in {tmp_path}/dynamo does not start\n"
    )
