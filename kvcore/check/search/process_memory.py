# SPDX-License-Identifier: Apache-2.0
"""The memory that this process has taken."""

from __future__ import annotations

import sys

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment] # the module is missing there


def memory_bytes() -> int:
    """Return the peak memory of this process in bytes; 0 if the system does not report it."""
    if resource is None:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
