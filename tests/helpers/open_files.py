# SPDX-License-Identifier: Apache-2.0
"""The files that this process has open: what is left open afterwards is not among those before."""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Return the numbers of the open files, each with what it is: a path, or a pipe's number.

    Files of earlier tests may be closed in between, so compare with <=, which needs no collection
    of garbage.
    """
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.add((each.name, str(each.readlink())))
    return found
