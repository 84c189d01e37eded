# SPDX-License-Identifier: Apache-2.0
"""What the runtime refuses, one class a reason.

Every error keeps the numbers of its message as attributes, and is raised before anything changed.
"""

from collections.abc import Sequence


class KvcoreRuntimeError(Exception):
    """Base of all errors of this package."""


class ModelNotFound(KvcoreRuntimeError):
    """The Python package that carries the model's file is not installed, or has no such file."""

    def __init__(self, *, package: str, reason: str) -> None:
        super().__init__(f"the model needs the Python package {package!r}: {reason}")
        self.package = package
        self.reason = reason


class UnsupportedModel(KvcoreRuntimeError):
    """A model file or configuration that this forward does not compute."""

    def __init__(self, *, what: str, value: object, expected: object) -> None:
        super().__init__(f"{what} is {value!r}, expected {expected}")
        self.what = what
        self.value = value
        self.expected = expected


class ShapeMismatch(KvcoreRuntimeError):
    """A tensor or a list has another size than the others say it must have."""

    def __init__(self, *, name: str, expected: Sequence[int], actual: Sequence[int]) -> None:
        super().__init__(f"{name} has shape {tuple(actual)}, expected {tuple(expected)}")
        self.name = name
        self.expected = tuple(expected)
        self.actual = tuple(actual)


class TooLong(KvcoreRuntimeError):
    """More tokens than the model or the cache has positions for."""

    def __init__(self, *, what: str, num_tokens: int, num_tokens_max: int) -> None:
        super().__init__(f"{what} needs {num_tokens} positions, there are {num_tokens_max}")
        self.what = what
        self.num_tokens = num_tokens
        self.num_tokens_max = num_tokens_max


class InvalidSampling(KvcoreRuntimeError):
    """A sampling parameter outside its range."""

    def __init__(self, *, name: str, value: object, expected: str) -> None:
        super().__init__(f"{name} is {value!r}, expected {expected}")
        self.name = name
        self.value = value
        self.expected = expected


class InvalidMessages(KvcoreRuntimeError):
    """A conversation that the chat template cannot render."""

    def __init__(self, *, index: int, reason: str) -> None:
        super().__init__(f"message {index}: {reason}")
        self.index = index
        self.reason = reason
