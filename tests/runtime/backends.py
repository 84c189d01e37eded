# SPDX-License-Identifier: Apache-2.0
"""The backends of a test's repetitions: in `make explore`, Python runs all of them, too."""

from collections.abc import Iterable
from typing import Any

import pytest

both_backends = pytest.mark.parametrize("backend_of_engine", ["python", "rust"], indirect=True)
"""Mark a test that always runs Python, although its file runs it only in `make explore`."""


def python_once(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by name, with the twin for each value and with Python for the first one.

    `make explore` has Python for the others, too.
    """
    rows = [
        pytest.param(
            backend,
            value,
            id=f"{backend}-{value}",
            marks=[pytest.mark.slow] if backend == "python" and number else [],
        )
        for backend in ("python", "rust")
        for number, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("backend", name), rows, indirect=["backend"])
