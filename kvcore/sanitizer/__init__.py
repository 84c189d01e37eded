# SPDX-License-Identifier: Apache-2.0
"""A sanitizer for the paged KV cache of any engine: it tracks what each slot holds.

An adapter reports what an engine does; the engine itself contains nothing of kvcore. A query must
read what was written for its prefix; anything else is a finding (docs/sanitizer.md).
"""

from kvcore.sanitizer.chunks import CacheGroup, Chunk, SlotChunk
from kvcore.sanitizer.errors import AdapterError, AlreadyAttached, UnsupportedEngine
from kvcore.sanitizer.findings import Finding
from kvcore.sanitizer.sanitizer import Sanitizer

__all__ = [
    "AdapterError",
    "AlreadyAttached",
    "CacheGroup",
    "Chunk",
    "Finding",
    "Sanitizer",
    "SlotChunk",
    "UnsupportedEngine",
]
