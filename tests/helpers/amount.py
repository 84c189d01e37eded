# SPDX-License-Identifier: Apache-2.0
"""The number of examples of `make test`: `make explore` tries KVCORE_EXAMPLES times as many."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

TIMES = int(os.environ.get("KVCORE_EXAMPLES", "1"))


def examples(number: int) -> int:
    """Return the examples to try, of which `make test` tries this number."""
    return number * TIMES


def every_second(values: Iterable[Any]) -> list[Any]:
    """Mark every second row of a test, from the second on, to run only in `make explore`."""
    slow = [pytest.mark.slow]
    return [pytest.param(each, marks=slow * (number % 2)) for number, each in enumerate(values)]
