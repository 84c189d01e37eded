# SPDX-License-Identifier: Apache-2.0
"""A sanitizer for paged KV caches of any engine: it follows what each slot holds.

An adapter tells what an engine does, and nothing of kvcore is in the engine. What a query reads
must be what was written for its prefix; all else is a finding (docs/sanitizer.md).
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
