# SPDX-License-Identifier: Apache-2.0
"""What remains of a step that broke off: an error for every later step.

Blocks have keys once they are scheduled. If the forward pass then does not run, later requests hit
blocks that nothing wrote, and an exchange stores them for other engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore_runtime.engine.errors import EngineStuck, ExecutorNotStarted


class Failure:
    """The error of the first step that broke off. is_undone: the batches of this step, and what
    they changed, were cancelled.
    """

    def __init__(self) -> None:
        self.is_undone = False
        self._error: BaseException | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep the error of a step unless it was undone, or had not begun. Raises it from then on,
        in place of a step.
        """
        if self._error is not None:
            raise self._error
        self.is_undone = False
        try:
            yield
        except (EngineStuck, ExecutorNotStarted):
            raise
        except BaseException as error:
            if not self.is_undone:
                self._error = error
            raise
