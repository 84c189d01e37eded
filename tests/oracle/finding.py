# SPDX-License-Identifier: Apache-2.0
"""A finding: what the manager did that its documents do not allow.

Why: this folder checks kvcore from outside. It uses the public API alone, and its rules come from
docs/engines.md, so that it shares no mistake with the checker, the ghost or the transitions. It
stays apart from them on purpose, whatever else checks contents.
"""

from __future__ import annotations


class Finding(AssertionError):
    """An error that the oracle finds, in one line."""


def demand(holds: bool, wrong: str) -> None:
    """Raise a Finding unless a rule holds."""
    if not holds:
        raise Finding(wrong)
