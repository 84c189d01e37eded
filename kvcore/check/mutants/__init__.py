# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs: each puts one mistake into the production transitions, for a property to find."""

from __future__ import annotations

from kvcore.check.mutants import (
    ahead,
    claims,
    contents,
    epochs,
    far,
    hashes,
    index,
    inflight,
    loads,
    owners,
    policies,
    progress,
    requests,
    retention,
    state_drafts,
    states,
    tails,
    tiers,
    windows,
)
from kvcore.check.mutants.seeding import MUTANTS, Mutant, Patcher

FILES = (
    *(index, owners, contents, windows, tiers, loads, requests, progress, inflight, ahead),
    *(epochs, policies, retention, claims, far, states, state_drafts, tails, hashes),
)

__all__ = ["FILES", "MUTANTS", "Mutant", "Patcher"]
