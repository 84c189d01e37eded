# SPDX-License-Identifier: Apache-2.0
"""Counts of what the caches of one installation did."""

import attrs


@attrs.define
class Statistics:
    """Counts over all caches of an installation.

    queries and hits: prompt tokens that were looked up, and those that were found. evictions:
    blocks whose content was dropped. copies: shared blocks that were copied before a write.
    offloaded and restored: blocks that were copied to the host, and back.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    copies: int = 0
    offloaded: int = 0
    restored: int = 0
