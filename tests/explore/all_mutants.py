# SPDX-License-Identifier: Apache-2.0
"""All seeded bugs, in the order of their files."""

from __future__ import annotations

from tests.explore import group_mutants, mutants, request_mutants
from tests.explore.seeding import MUTANTS

FILES = (mutants, group_mutants, request_mutants)

__all__ = ["FILES", "MUTANTS"]
