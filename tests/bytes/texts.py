# SPDX-License-Identifier: Apache-2.0
"""The doors for texts: text traces, traces of requests, a model's config.json.

The property is that of doors.py. A file is written into memory (`/dev/shm`) if the system has it.
"""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path

from kvcore.replay.errors import TraceFileError
from kvcore.replay.request_trace import LENGTH_MAX, TraceReader
from kvcore.replay.workload import TraceRequest
from kvcore.sizing.models import make_layer_specs, read_model
from kvcore.trace.runner import CALLS
from kvcore.trace.trace_file import outcomes, parse_trace
from kvcore.types.errors import KvcoreError, TraceError
from tests.bytes.damage import Damager, split_words
from tests.bytes.doors import TRACES, Door, raised

ROOT = Path(__file__).parents[2]
TRACE_WORDS = [
    *(b"0-4294967295", b"4294967295", b"4294967296", b"-1", b"+1", b"1_0", b"01", b"9" * 30),
    *("\u0661 \u0085 \u2028 \x1c \x0b \u00e9".encode().split(b" ")),
    *(b"num_blocks=2147483647", b"hit", b"full", b"delay", b"external=2", b"own=ab", b"skip"),
    b"embeds=ab",
    *(b"max_in_flight=2", b"publish=completed", b"groups=full_attention:2", b"\n", b"\r", b"  "),
    *(name.encode() for name in CALLS),
]
JSON_WORDS = [
    *(b"null", b"true", b"false", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1.5", b'""'),
    *(b"9" * 30, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"[]", b"{}", b'"\\ud800"', b"\n"),
    *(b"\xff", b"\xef\xbb\xbf", b"\\u0000", b"4294967296", b"9223372036854775808", b"1e400"),
]
MOONCAKE = b"""{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 27.5, "input_length": 512, "output_length": 0, "hash_ids": [1]}
"""
BAILIAN = b"""{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 17,
 "output_length": 3, "type": "text", "turn": 1, "hash_ids": [4, 5]}
""".replace(b"\n ", b" ")


@cache
def place() -> Path:
    """Return a file for doors that read files."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    return Path(folder) / "config.json"


def names(error: Exception | None, what: str) -> bool:
    """Tell whether there is an error, which then names this."""
    assert error is None or what in str(error)
    return error is not None


def read_text_trace(data: bytes) -> bool:
    """Parse a text trace."""
    text = data.decode(errors="replace")
    return names(raised(lambda: parse_trace(text, source="fuzz"), TraceError), "fuzz, line ")


def replay_text_trace(data: bytes) -> bool:
    """Parse a text trace and make its calls: a call that cannot be read is named."""
    text = data.decode(errors="replace")

    def replay() -> None:
        outcomes(parse_trace(text, source="fuzz"), "python")

    return names(raised(replay, TraceError), "fuzz, line ")


def read_requests(data: bytes) -> bool:
    """Read a trace of requests, once to the first bad line, and once past all of them."""
    requests: list[TraceRequest] = []

    def read(skip_bad: bool) -> None:
        requests[:] = TraceReader(io.BytesIO(data), name="fuzz", skip_bad=skip_bad)

    refused = names(raised(lambda: read(False), TraceFileError), "fuzz")
    names(raised(lambda: read(True), TraceFileError), "fuzz")
    for request in requests:
        assert len(request.hash_ids) == -(-request.prompt_len // request.unit)
        assert 0 <= request.arrival <= LENGTH_MAX
    return refused


def read_config(data: bytes) -> bool:
    """Read a model's config.json, and make its layers."""
    place().write_bytes(data)

    def read() -> None:
        specs = make_layer_specs(read_model(place()), dtype="bfloat16")
        assert all(spec.page_bytes > 0 for spec in specs.values())

    return names(raised(read, KvcoreError), str(place()))


def texts(*paths: Path, words: list[bytes]) -> Damager:
    """Return the source of damaged texts."""
    return Damager([split_words(path.read_bytes()) for path in paths], words)


TEXT_DOORS = [
    Door(name="traces", make=lambda: texts(*TRACES, words=TRACE_WORDS), read=read_text_trace),
    Door(name="replays", make=lambda: texts(*TRACES, words=TRACE_WORDS), read=replay_text_trace),
    Door(
        name="requests",
        make=lambda: Damager([split_words(MOONCAKE), split_words(BAILIAN)], JSON_WORDS),
        read=read_requests,
    ),
    Door(
        name="configs",
        make=lambda: texts(*(ROOT / "examples/configs").glob("*.json"), words=JSON_WORDS),
        read=read_config,
    ),
]
