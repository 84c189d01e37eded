# SPDX-License-Identifier: Apache-2.0
"""Text traces: readable stories of calls, each with its whole expected outcome.

A line at the margin is a call, and the indented lines under it are its whole outcome: a missing or
additional line is a mismatch. Comments are on lines of their own, before the call whose outcome
they explain, and survive `rewrite`. Expected lines are not parsed: the outcome is written as text
and the texts are compared, so the format is easy to read in another language.
Twin: rust/src/trace/trace_file.rs.

    # The tail of a request leaves the pool before its head.
    config num_blocks=10 block_size=4 null_block=no
    add_request r0 0-9,100          tokens 0 to 9, then 100
      = row 0
    allocate_slots r0 11
      = blocks 0 1 2
      ! Allocate 0 1 2              commands, consecutive ones of a kind on one line
      ! SetTable row 0: 0=0 1=1 2=2
    queue
      = 3 4 5 6 7 8 9

(The explanations on the right are not part of the format.) A key is written as the tokens of its
whole prefix, so `Evict 1(0-7)` needs no hash. Several groups are written
`groups=full_attention:4,sliding_window:4:6+zero`: kind, block size, window or in a state group
`draft_states`, `+eagle`, `+zero`. The calls are listed in `runner.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from kvcore.trace.runner import BadCall, Runner
from kvcore.trace.text import BadWord, read_u32
from kvcore.types.config import EVICTIONS, Config, Duplicates, Publish
from kvcore.types.errors import KvcoreError, TraceError
from kvcore.types.groups import KINDS, Group
from kvcore.types.keys import HASHINGS

GAPS = " \t\r"
"""Separators of words; lines end with a line feed."""
BLOCKS_MAX = 2**16
"""Most blocks of a tier, since the pools of a trace are held in memory."""
COUNTS = (
    *("num_blocks", "num_host_blocks", "max_model_len", "max_num_batched_tokens"),
    *("num_preallocate_tokens", "watermark_blocks", "max_in_flight"),
    *("epoch", "max_pinned_blocks", "hash_block_size"),
)
FLAGS = (
    *("enable_caching", "null_block", "use_eagle", "enable_events", "record_new_blocks"),
    "hide_salts",
)
NAMES = {
    "eviction": EVICTIONS,
    "duplicates": get_args(Duplicates),
    "publish": get_args(Publish),
    "hashing": HASHINGS,
}
YES_NO = {"yes": True, "no": False}
_WORD = re.compile(f"[^{GAPS}]+")


@attrs.frozen
class TraceLine:
    """One call of a trace and its expected outcome lines, without their indent."""

    line: int
    verb: str
    words: tuple[str, ...]
    expected: tuple[str, ...]


@attrs.frozen
class Trace:
    """A parsed trace. source: named by errors, usually the file."""

    source: str
    config: Config
    calls: tuple[TraceLine, ...]


def read_trace(path: Path) -> Trace:
    """Read the trace of a file. Raises TraceError."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(source=path.name, line=0, reason=str(error)) from None
    return parse_trace(text, source=path.name)


def parse_trace(text: str, *, source: str) -> Trace:
    """Parse the text of a trace, without its byte order mark. Raises TraceError with the line."""
    config: Config | None = None
    calls: list[TraceLine] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        stripped = line.strip(GAPS)
        if not stripped or stripped.startswith("#"):
            continue
        if line[0] in GAPS:
            if not calls:
                raise TraceError(source=source, line=number, reason="an outcome without a call")
            last = calls[-1]
            calls[-1] = attrs.evolve(last, expected=(*last.expected, stripped))
            continue
        verb, *words = _WORD.findall(stripped)
        if verb == "config":
            if config is not None:
                raise TraceError(source=source, line=number, reason="a second config")
            config = _parse_config(words, source, number)
        elif config is None:
            raise TraceError(source=source, line=number, reason="a call before the config")
        else:
            calls.append(TraceLine(number, verb, tuple(words), ()))
    if config is None:
        raise TraceError(source=source, line=1, reason="there is no config")
    return Trace(source, config, tuple(calls))


def replay(trace: Trace, backend: Literal["rust", "python"]) -> None:
    """Make the calls of a trace. Raises TraceError at the first unexpected outcome."""
    for call, actual in zip(trace.calls, outcomes(trace, backend), strict=True):
        if actual != call.expected:
            raise TraceError(source=trace.source, line=call.line, reason=_difference(call, actual))


def outcomes(trace: Trace, backend: Literal["rust", "python"]) -> list[tuple[str, ...]]:
    """Return the actual outcome lines of the calls of a trace. Raises TraceError."""
    runner = Runner(trace.config, backend)
    actual = []
    for call in trace.calls:
        try:
            actual.append(tuple(runner.call(call.verb, call.words)))
        except BadCall as error:
            raise TraceError(source=trace.source, line=call.line, reason=str(error)) from error
    return actual


def rewrite(text: str, *, source: str, backend: Literal["rust", "python"]) -> str:
    """Replace the expected outcomes of a text by the actual ones; calls and comments stay."""
    trace = parse_trace(text, source=source)
    actual = dict(zip((call.line for call in trace.calls), outcomes(trace, backend), strict=True))
    lines = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        stripped = line.strip(GAPS)
        is_outcome = bool(stripped) and line[0] in GAPS and stripped[0] != "#"
        if not is_outcome:
            lines.append(line)
        lines.extend(f"  {outcome}" for outcome in actual.get(number, ()))
    return "\n".join(lines) + "\n"


def _parse_config(words: list[str], source: str, line: int) -> Config:
    options: dict[str, Any] = {"num_blocks": 0, "groups": (Group(16),)}
    try:
        for word in words:
            _parse_option(options, word)
        return Config(**options)
    except (KvcoreError, BadWord) as error:
        raise TraceError(source=source, line=line, reason=str(error)) from None


def _parse_option(options: dict[str, Any], word: str) -> None:
    """Read one `name=value`. Raises BadWord, InvalidConfig."""
    name, equals, value = word.partition("=")
    if not equals:
        raise BadWord(f"{word!r} is not name=value")
    if name in COUNTS:
        options[name] = read_u32(value)
        if name.endswith("blocks") and options[name] > BLOCKS_MAX:
            raise BadWord(f"{name} is {value}: a trace has at most {BLOCKS_MAX} blocks")
    elif name in FLAGS and value in YES_NO:
        options[name] = YES_NO[value]
    elif value in NAMES.get(name, ()):
        options[name] = value
    elif name == "block_size":
        options["groups"] = (Group(read_u32(value)),)
    elif name == "groups":
        options["groups"] = tuple(_parse_group(word) for word in value.split(","))
    elif name == "floors":
        options["floors"] = dict(_parse_floor(word) for word in value.split(","))
    else:
        raise BadWord(f"the config takes no {word!r}")


def _parse_floor(word: str) -> tuple[str, int]:
    salt, _, size = word.rpartition(":")
    return salt, read_u32(size)


def _parse_group(word: str) -> Group:
    text, *flags = word.split("+")
    kind, *sizes = text.split(":")
    if kind not in KINDS or not 1 <= len(sizes) <= 2 or set(flags) - {"eagle", "zero"}:
        raise BadWord(f"{word!r} is not kind:block_size[:window][+eagle][+zero]")
    number = read_u32(sizes[1]) if len(sizes) > 1 else None
    return Group(
        read_u32(sizes[0]),
        kind=kind,
        window=None if kind == "state" else number,
        draft_states=(number or 0) if kind == "state" else 0,
        eagle="eagle" in flags,
        zero_new_blocks="zero" in flags,
    )


def _difference(call: TraceLine, actual: tuple[str, ...]) -> str:
    wanted = "".join(f"\n  {line}" for line in call.expected) or "\n  (nothing)"
    given = "".join(f"\n  {line}" for line in actual) or "\n  (nothing)"
    name = " ".join((call.verb, *call.words))
    return f"{name}\nmust give{wanted}\nbut gives{given}"
