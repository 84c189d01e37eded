# SPDX-License-Identifier: Apache-2.0
"""Records of a busy pool."""

from __future__ import annotations

from pathlib import Path

from kvcore import KVCacheManager, _twin
from kvcore.record.recorder import Recorder
from kvcore.replay.configuration import make_config
from kvcore.replay.loop import Loop
from kvcore.replay.results import Options
from kvcore.replay.synthetic import generate


def record_replay(folder: Path, num_requests: int, options: Options, num_steps: int) -> None:
    """Record `kvcore replay`'s loop, at most its first `num_steps` steps."""
    manager = KVCacheManager(make_config(options), "rust" if _twin.available() else "python")
    manager.start_recording(Recorder(folder, keep_segments=1 << 20))
    loop = Loop(generate("turns", num_requests, 1), options, manager)
    for _ in range(num_steps):
        if loop.step() is None:
            break
    manager.stop_recording()
