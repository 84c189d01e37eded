# SPDX-License-Identifier: Apache-2.0
"""The index of `make demo-cluster`: Dynamo's only if it runs and takes the engines."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from kvcore_runtime.demos import cluster


def write_program(path: Path, script: str) -> None:
    """Write a script as the Python of Dynamo below a path of peers."""
    python = path / "dynamo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(script)
    python.chmod(0o755)


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 1\n"], ids=["missing", "broken"])
def test_without_a_running_dynamo_there_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    if script is not None:
        write_program(tmp_path, script)
    with contextlib.ExitStack() as stack:
        assert cluster._start_dynamo(stack) is None
    said = capsys.readouterr().out
    assert said == (
        "" if script is None else f"Dynamo's indexer in {tmp_path}/dynamo does not start\n"
    )


REFUSING = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"{{}}")

    def do_POST(self):
        is_refused = self.path == "REFUSED"
        self.answer(400 if is_refused else 200, b"{{}}")

    def answer(self, code, text):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_dynamo_that_refuses_an_engine_leaves_the_index_to_kvcore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    write_program(tmp_path, REFUSING.replace("REFUSED", "/register"))
    node = SimpleNamespace(name="A", events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2")
    with contextlib.ExitStack() as stack:
        index = cluster._index(stack, [cast(cluster.Node, node)], own_index=False)
        assert isinstance(index, cluster.OwnIndex)
    said = capsys.readouterr().out
    assert "Dynamo's indexer does not register the engines: HTTP Error 400: Bad Request" in said
    assert "the index: kvcore's own" in said


def test_a_dynamo_that_refuses_a_question_leaves_the_index_to_kvcore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    write_program(tmp_path, REFUSING.replace("REFUSED", "/query"))
    node = SimpleNamespace(name="A", events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2")
    with contextlib.ExitStack() as stack:
        index = cluster._index(stack, [cast(cluster.Node, node)], own_index=False)
        assert isinstance(index, cluster.DynamoIndex)
        assert [index.find([1] * 40) for _ in range(2)] == [{"A": 0}] * 2
    said = capsys.readouterr().out
    assert said.count("Dynamo's indexer does not answer: HTTP Error 400: Bad Request") == 1
    assert said.endswith("the index: kvcore's own\n")
