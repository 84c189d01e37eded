# SPDX-License-Identifier: Apache-2.0
"""Reads a record: its segments, oldest first, and the calls in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from msgspec import Struct

from kvcore.codec.decode import decode
from kvcore.record.calls import read_call
from kvcore.record.errors import DamagedRecord, NewerRecord, NotARecord, RecordNeedsText
from kvcore.record.fields import NotReadable, Source
from kvcore.record.names import UNKNOWN
from kvcore.record.outcomes import EXTENDS, FIRST_ERROR, ROWS, Recorded, read_outcome
from kvcore.record.recorder import SUFFIX
from kvcore.record.segment import HEADER_SIZE, KEYS, MAGIC, Segment, read_header, read_segment
from kvcore.state.state import State
from kvcore.types.keys import HASH_SIZE


class RecordedCall(Struct, frozen=True, gc=False):
    """A call as it was recorded.

    number: counted from 0 at the start of the record. outcome: its bytes, and what they mean; b""
    and None for the call in which the process died. hashes: in a record by keys, those of the
    blocks that the call filled, by request; else None.
    """

    number: int
    name: str
    arguments: dict[str, Any]
    outcome: bytes
    result: Recorded | None
    hashes: Mapping[str, list[bytes]] | None = None


def is_record(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a segment, even a damaged one, or a folder with one.

    A pipe is none: what is read from it to find out would be missing later.
    """
    found = Path(path)
    try:
        if not found.is_file():
            return found.is_dir() and any(found.glob(f"*{SUFFIX}"))
        with found.open("rb") as file:
            return found.suffix == SUFFIX or file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def segment_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a record, oldest first. Raises NotARecord."""
    found = Path(path)
    if found.is_file():
        return [found]
    files = sorted(found.glob(f"*{SUFFIX}"))
    if not files:
        raise NotARecord(path=str(found), reason=f"it contains no file *{SUFFIX}")
    return files


def read_text(path: Path, what: str) -> Segment:
    """Read a segment whose calls have tokens. Raises RecordNeedsText, and as `read_segment`."""
    segment = read_segment(path)
    if segment.header.flags & KEYS:
        raise RecordNeedsText(what=what, path=str(path))
    return segment


def first_calls(files: list[Path]) -> list[int]:
    """Return the number of the first call of each file. Raises NotARecord, NewerRecord,
    DamagedRecord.
    """
    numbers = []
    for path in files:
        with path.open("rb") as file:
            numbers.append(read_header(path, file.read(HEADER_SIZE)).first_call)
    return numbers


def read_calls(segment: Segment, state: State | None = None) -> Iterator[RecordedCall]:
    """Read the calls of a segment. Raises DamagedRecord for an invalid state, NewerRecord.

    state: the segment's, if it was decoded before. Reading ends at an incomplete call in the tail,
    which was never committed.
    """
    ids = _ids(decode(segment.state) if state is None else state)
    number = segment.header.first_call
    for place, (offset, data) in enumerate(segment.frames):
        source = Source(data, ids, by_keys=bool(segment.header.flags & KEYS))
        is_tail = segment.has_tail and place == len(segment.frames) - 1
        while source.at < len(data):
            start = source.at
            try:
                call = _read_one(source, number)
            except KeyError:
                what = f"call {data[start]} at byte {offset + start}"
                raise NewerRecord(file=str(segment.path), what=what) from None
            except NotReadable:
                if is_tail:
                    return
                what, file = "its checksum is right, but it cannot be decoded", str(segment.path)
                raise DamagedRecord(file=file, offset=offset + start, reason=what) from None
            yield call
            number += 1


def _read_one(source: Source, number: int) -> RecordedCall:
    """Read the next call, and update which request is in which row."""
    name, arguments = read_call(source)
    start = source.at
    if start == len(source.data):
        return RecordedCall(number, name, arguments, b"", None)
    result = read_outcome(source, name)
    outcome = source.data[start : source.at]
    if source.by_keys:
        arguments = _named(name, arguments, str(number))
    if result.what == "done" and name in ROWS:
        request = arguments.get("request")
        source.ids[result.numbers[0]] = request.request_id if request else arguments["child_id"]
    if not source.by_keys:
        return RecordedCall(number, name, arguments, outcome, result)
    is_there = name in EXTENDS and outcome[0] < FIRST_ERROR
    hashes = _read_new_hashes(source, arguments) if is_there else {}
    if name == "add_request":
        request = arguments["request"]
        own, made = request.block_hashes, hashes.pop(request.request_id, [])
        arguments["request"] = attrs.evolve(request, block_hashes=made if own is None else own)
    return RecordedCall(number, name, arguments, outcome, result, hashes)


def _named(name: str, arguments: dict[str, Any], own: str) -> dict[str, Any]:
    """Return the arguments of a call of a record by keys, in which what it adds has its name."""
    for field in ("child_id", "name") if name in ("fork", "pin_prefix") else ():
        if arguments.get(field) == UNKNOWN:
            return arguments | {field: own}
    if name == "add_request" and arguments["request"].request_id == UNKNOWN:
        return {"request": attrs.evolve(arguments["request"], request_id=own)}
    return arguments


def _read_new_hashes(source: Source, arguments: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """Read the hashes of the blocks that a call filled, by request."""
    named = arguments.get("requests")
    if named is None:
        request = arguments.get("request")
        named = [arguments["request_id"] if request is None else request.request_id]
    found = dict[str, list[bytes]]()
    for _ in range(source.varint()):
        place = source.varint()
        if place >= len(named):
            raise NotReadable
        each = named[place]
        request_id = each if isinstance(each, str) else source.ids.get(each, "")
        found[request_id] = [source.take(HASH_SIZE) for _ in range(source.varint())]
    return found


def _ids(state: State) -> dict[int, str]:
    """Return the ids of the requests of a state, by row."""
    return {row: name for row, name in enumerate(state.rows) if name is not None}
