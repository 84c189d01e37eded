# SPDX-License-Identifier: Apache-2.0
"""What the caches that were made under one installation did, in numbers."""

import attrs


@attrs.define
class Statistics:
    """queries and hits: prompt tokens that were looked up, and those found. evictions and copies:
    blocks whose content was given up, and shared blocks that were copied before a write. offloaded
    and restored: blocks that were copied to the host, and back.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    copies: int = 0
    offloaded: int = 0
    restored: int = 0
