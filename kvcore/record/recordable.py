# SPDX-License-Identifier: Apache-2.0
"""What a manager has of the recorder: two methods."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import ref

from kvcore import _twin
from kvcore.types.arguments import check_kind

if TYPE_CHECKING:
    from pathlib import Path

    from kvcore.record.recorder import Recorder

VARIABLE = "KVCORE_RECORD"


class Recordable:
    """A manager whose calls can be recorded. One that is not has the methods it always had."""

    _core: _twin.Backend

    def start_recording(self, recorder: Recorder) -> None:
        """Record the state, and every call from now on: docs/recorder.md. Raises AlreadyRecording.

        What goes wrong with the files later ends the record, with a warning: `recorder.error`.
        """
        from kvcore.record.errors import AlreadyRecording
        from kvcore.record.recorder import Recorder  # few managers are recorded

        check_kind("recorder", recorder, Recorder)
        if self._core.is_recording:
            raise AlreadyRecording(what="the manager", reason="stop_recording ends that")
        this = ref(self)

        def rotate() -> None:
            manager = this()
            if manager is not None:
                manager._core.rotate_recording()

        recorder.start(rotate)
        self._core.start_recording(recorder)

    def stop_recording(self) -> None:
        """End the record, if there is one."""
        self._core.stop_recording()


def record_if_asked(manager: Recordable) -> None:
    """Record a manager in a new folder below the one that KVCORE_RECORD names, if it does.

    Each manager has a folder of its own, by number, so that a process that starts again, or several
    of them, leave the records that are there. Raises OSError.
    """
    base = os.environ.get(VARIABLE)
    if not base:
        return
    from pathlib import Path

    from kvcore.record.recorder import Recorder

    manager.start_recording(Recorder(_new_folder(Path(base))))


def _new_folder(base: Path) -> Path:
    number = 0
    while True:
        try:
            (folder := base / f"{number:04}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
