# SPDX-License-Identifier: Apache-2.0
"""A command whose reader has gone, as with `| head`.

It ends without a word, with the code of a process that the pipe ended; what it was to write
to files is written before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

READER_GONE = 141
"""128 and the number of SIGPIPE."""

P = ParamSpec("P")


def quiet(command: Callable[P, int]) -> Callable[P, int]:
    """The command; if nothing reads its output any more, it ends quietly."""

    @wraps(command)
    def ended(*args: P.args, **options: P.kwargs) -> int:
        try:
            code = command(*args, **options)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        return code

    return ended
