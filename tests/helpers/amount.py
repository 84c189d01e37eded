# SPDX-License-Identifier: Apache-2.0
"""How many examples Hypothesis tries: KVCORE_EXAMPLES times as many in `make explore`."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("KVCORE_EXAMPLES", "1"))


def examples(number: int) -> int:
    """The examples to try, of which `make test` tries this number."""
    return number * TIMES
