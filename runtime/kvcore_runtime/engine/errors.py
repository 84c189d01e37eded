# SPDX-License-Identifier: Apache-2.0
"""What the engine refuses, and the one thing that must not happen to it."""

from kvcore_runtime.errors import KvcoreRuntimeError


class InvalidOption(KvcoreRuntimeError):
    """An option of the engine outside its range."""

    def __init__(self, *, name: str, value: object, least: int) -> None:
        super().__init__(f"{name} is {value!r}, expected {least} or more")
        self.name = name
        self.value = value
        self.least = least


class NeverFits(KvcoreRuntimeError):
    """A request that no pool of this size, or no such model, can ever serve."""

    def __init__(self, *, request: str, what: str, needed: int, available: int) -> None:
        super().__init__(f"request {request!r} needs {needed} {what}, there are {available}")
        self.request = request
        self.what = what
        self.needed = needed
        self.available = available


class RepeatedRequest(KvcoreRuntimeError):
    """A request of this id is on its way already."""

    def __init__(self, *, request: str) -> None:
        super().__init__(f"request {request!r} is on its way already")
        self.request = request


class EngineStuck(KvcoreRuntimeError):
    """Nothing could be scheduled although some are unfinished: a bug, or blocks held by others."""

    def __init__(self, *, num_unfinished: int, num_free_blocks: int) -> None:
        super().__init__(
            f"nothing of {num_unfinished} sequences could be scheduled, "
            f"{num_free_blocks} blocks are free"
        )
        self.num_unfinished = num_unfinished
        self.num_free_blocks = num_free_blocks
