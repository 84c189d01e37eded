# SPDX-License-Identifier: Apache-2.0
"""Writes files completely or not at all.

A text goes to a temporary file in the same folder, which is renamed when it is complete; until then
the target is unchanged. A target that cannot be written is refused before the work for its text is
done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvcore.types.errors import KvcoreError


class CannotWrite(KvcoreError):
    """A file cannot be written. Fields: file, reason."""

    message = "{file!r} cannot be written: {reason}"


def check_writable(path: str, sources: Iterable[Path] = ()) -> None:
    """Raise CannotWrite unless a file can be written there. Leaves nothing behind.

    sources: files that are read, which must not be replaced.
    """
    place = Path(path).resolve()
    if place in (each.resolve() for each in sources):
        raise CannotWrite(file=path, reason="it would replace what is read")
    if not path or place.is_dir():
        raise CannotWrite(file=path, reason="it is not a file name" if not path else "a folder")
    if place.exists() and not place.is_file():
        raise CannotWrite(file=path, reason="it is not a plain file")
    if place.exists() and not os.access(place, os.W_OK):
        raise CannotWrite(file=path, reason="it is read-only")
    _opened(path, _beside(place))
    _beside(place).unlink()


def write_whole(path: str, parts: Iterable[str]) -> None:
    """Write the parts to a file, one after the other. Raises CannotWrite."""
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
    """Create the temporary file, replacing a leftover of the same name. Raises CannotWrite."""
    try:
        temporary.unlink(missing_ok=True)
        temporary.open("x").close()
    except OSError as error:
        raise CannotWrite(file=path, reason=_reason(error)) from error


def _beside(place: Path) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.part")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
