# SPDX-License-Identifier: Apache-2.0
"""Errors of the runtime, one class per reason.

An error is raised before anything has changed. Its message names the thing and the numbers; the
same values are attributes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
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
        """Return the fields in the form that the message shows."""
        return self.fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self)), self.__dict__)

    def __getattr__(self, name: str) -> object:
        fields: dict[str, object] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


def _rebuild(kind: type[KvcoreRuntimeError], text: str) -> KvcoreRuntimeError:
    """Rebuild an error of another process; its fields follow as its state."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


class PackageMissing(KvcoreRuntimeError):
    """A part of this package needs another package, which an extra installs."""

    message = "{what} need the Python package {package!r}: pip install 'kvcore-runtime[{extra}]'"


def load_extra(module: str, *, what: str, package: str, extra: str) -> ModuleType:
    """Import a module that an extra of this package installs.

    Raises PackageMissing, and ImportError if the package is there but a library of it is not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise PackageMissing(what=what, package=package, extra=extra) from None


class ModelNotFound(KvcoreRuntimeError):
    """The Python package with the model's file is not installed, or lacks the file."""

    message = "the model needs the Python package {package!r}: {reason}"


class UnsupportedModelFile(KvcoreRuntimeError):
    """This forward pass does not support the model file or configuration."""

    message = "{what} is {value!r}, expected {expected}"


class ShapeMismatch(KvcoreRuntimeError):
    """The size of a tensor or a list does not match the others."""

    message = "{name} has shape {actual}, expected {expected}"

    def __init__(self, *, name: str, expected: Sequence[int], actual: Sequence[int]) -> None:
        super().__init__(name=name, expected=tuple(expected), actual=tuple(actual))


class TooLong(KvcoreRuntimeError):
    """There are more tokens than positions of the model or the cache."""

    message = "{what} needs {num_tokens} positions, there are {num_tokens_max}"


class InvalidSampling(KvcoreRuntimeError):
    """A sampling parameter is out of range."""

    message = "{name} is {value!r}, expected {expected}"


class InvalidRequest(KvcoreRuntimeError):
    """The prompt or the salt of a request is none."""

    message = "the {name} of request {request!r} is {value!r}, expected {expected}"


class InvalidMessages(KvcoreRuntimeError):
    """The chat template cannot render the conversation."""

    message = "message {index}: {reason}"
