# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all.

A text goes to a temporary file beside its place and is renamed when it is complete; whatever
happens before, the place is as it was. A place that cannot be written is refused before the work
that its text needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvcore.types.errors import KvcoreError


class CannotWrite(KvcoreError):
    """A file cannot be written. Fields: file, reason."""

    message = "{file!r} cannot be written: {reason}"


def check_writable(path: str) -> None:
    """Raise CannotWrite unless a file can be put there. Leaves nothing behind."""
    place = Path(path).resolve()
    if not path or place.is_dir():
        raise CannotWrite(file=path, reason="it is no file name" if not path else "a folder")
    if place.exists() and not place.is_file():
        raise CannotWrite(file=path, reason="it is no plain file")
    if place.exists() and not os.access(place, os.W_OK):
        raise CannotWrite(file=path, reason="it is read-only")
    _opened(path, _beside(place))
    _beside(place).unlink()


def write_whole(path: str, parts: Iterable[str]) -> None:
    """Put the parts, one after the other, into a file. Raises CannotWrite."""
    place = Path(path).resolve()
    temporary = _beside(place)
    _opened(path, temporary)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except OSError as error:
        raise CannotWrite(file=path, reason=_reason(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: str, temporary: Path) -> None:
    """Make the temporary file, anew if one of this name was left. Raises CannotWrite."""
    try:
        temporary.unlink(missing_ok=True)
        temporary.open("x").close()
    except OSError as error:
        raise CannotWrite(file=path, reason=_reason(error)) from error


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.part")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
