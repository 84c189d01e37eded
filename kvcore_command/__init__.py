# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore` from its first moment on: an interrupt ends it with one line and code 130.

Why: a package of its own, since importing anything of kvcore imports most of it. Nothing is lost
until then if the process ends at once. Afterwards `kvcore/cli/pipes.py` has the rule, up to the end
of the process, which an interrupt ends as the system does.
"""

from __future__ import annotations

import os
from typing import NoReturn

INTERRUPTED = 130
"""128 and the number of SIGINT."""


def stop(*_: object) -> NoReturn:
    """End the process at once, with one line."""
    os.write(2, b"kvcore: interrupted\n")
    os._exit(INTERRUPTED)


try:
    import signal
except KeyboardInterrupt:
    stop()


def main() -> int:
    """Run the command that `sys.argv` names; returns its exit code."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if heard:
            signal.signal(signal.SIGINT, stop)
        from kvcore.cli.main import main as run

        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # between two lines of this function
        stop()
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
