# SPDX-License-Identifier: Apache-2.0
"""What is explored of each facade: its worlds, what judges it, and which fact lifts the rest.

Rules: every property that the checker knows is either judged or lifted with a reason; a fact of the
specification stands behind a reason that is the facade's own. Counts of states are pinned by
tests/explore/test_facades.py. Twin: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvcore.check.facades.caching import CachingEngine, CachingWorld
from kvcore.check.facades.engine import FacadeEngine
from kvcore.check.facades.space import SpaceEngine, SpaceWorld
from kvcore.check.properties import PROPERTIES, Property

FacadeWorld = SpaceWorld | CachingWorld
FORK, NONE = frozenset({"fork"}), frozenset[str]()

JUDGED = (
    *("REF", "PARTITION", "FQ-UNIQ", "LEAK", "NOCRASH", "ATOMIC-FAIL", "ADMIT-EXACT", "KV-READ"),
    *("CMD-HAZARD", "CMD-COPYSET", "CMD-EVICT-FIRST", "CMD-COW-SRC", "CMD-ORDER", "CMD-COMPLETE"),
)
OWN = {
    "CMD-COMPLETE": "the copies that a call returns are those that the batch has",
    "RANKED": "free blocks without key leave before those with one, which leave by their rank",
}
"""Sentences of properties that the facades alone have."""

NO_REQUESTS = "the facade keeps tables itself: the core knows no request"
NO_FLIGHT = "each call is a batch that ends before the next"
NO_SCHEDULER = "which sequence runs is the engine's choice, and the facade has no preemption"
NO_GROUPS = "there is one group"
NO_EVENTS = "the facades make no events"
OWN_KINDS = "it judges what users bring"
LIFTED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("ROWS", "OPEN-BATCH", "TABLEN", "WAIT-EMPTY", "REQ-HASH", "CACHED-COUNT"),
            *("COMPUTED", "TABLE-MIRROR", "OWNER-MIRROR", "COMPUTED-RULE", "DRAFT"),
            *("FULLHIT", "HIT-FRESH", "HIT-PINNED", "PUBLISHED", "CACHE-KEY", "HIT-LONGEST"),
        ),
        NO_REQUESTS,
    ),
    **dict.fromkeys(
        ("QUARANTINE", "IN-FLIGHT", "OPERATIONS", "CMD-INFLIGHT", "DRAIN", "ZEROED"), NO_FLIGHT
    ),
    **dict.fromkeys(
        ("DEADLOCK-FREE", "PREEMPT-GAIN", "SWAP-RETURN", "NO-THRASH", "L-ADMIT"), NO_SCHEDULER
    ),
    **dict.fromkeys(("GROUP-AGREE", "CROSS", "CAP", "KEY-GRAN"), NO_GROUPS),
    "EVT-COPY": NO_EVENTS,
    **dict.fromkeys(("POLICY", "SCHEDULER", "MANAGER"), OWN_KINDS),
    "DETERMINISM": "a node is its calls made again, so it could not be explored else",
    "REFINE": "tests/legacy compare both backends call by call",
}


@attrs.frozen(kw_only=True)
class Facade:
    """A facade to explore. lifted: what it is not judged by beside `LIFTED`, with the fact."""

    name: str
    sentence: str
    judged: tuple[str, ...]
    lifted: Mapping[str, str]
    worlds: Mapping[str, FacadeWorld]

    @property
    def known(self) -> dict[str, Property]:
        """The properties that it is judged by."""
        return {name: PROPERTIES.get(name) or _own(name) for name in self.judged}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of the others is not judged."""
        return {**LIFTED, **self.lifted}


FACADES: dict[str, Facade] = {
    "v0.3": Facade(
        name="v0.3",
        sentence="kvcore.legacy.block_space_manager",
        judged=(*JUDGED, "ADMIT-NEVER"),
        lifted={
            "NULL": "there is no null block",
            "NULL-PREFIX": "a window is a ring, without null blocks (S003-14, X-11)",
            "NO-ALIAS": "a ring names one block at several places (S003-14)",
            "WRITE-EXCL": "the first sequence of a group writes the prompt for all (S003-10)",
            "LRU": "free blocks are a stack (S003-01, X-01)",
            **dict.fromkeys(
                (
                    *("IDX-SOUND", "IDX-COMPLETE", "CACHE-KV", "HASH-MONO", "HASH-INJ", "KEY-SEP"),
                    *("PREFIX-CLOSED", "EVICT-ORDER", "HIT-PRESERVE"),
                ),
                "no content has a key: prefixes are shared by hand (S003-12, 13)",
            ),
            "RESET": "a reset gives back what is held (S003-33)",
        },
        worlds={
            "plain": SpaceWorld(),
            "watermark": SpaceWorld(watermark=0.5, num_tokens=3),
            "siblings": SpaceWorld(
                num_blocks=3, num_sequences=3, num_tokens=3, num_prompt=2, best_of=3, calls=NONE
            ),
            "window": SpaceWorld(num_blocks=3, num_tokens=6, window=4, calls=FORK),
            "prefix": SpaceWorld(num_blocks=3, num_tokens=3, with_prefix=True),
            "swap": SpaceWorld(num_blocks=3, num_host_blocks=2, num_tokens=3),
        },
    ),
    "v0": Facade(
        name="v0",
        sentence="kvcore.legacy.block_manager over prefix_caching_block",
        judged=(*JUDGED, "IDX-SOUND", "IDX-COMPLETE", "NULL", "RANKED", "RESET"),
        lifted={
            "NULL-PREFIX": "the null block is taken from the GPU's like any other (S002-70)",
            "NO-ALIAS": "sequences of one group write their shared prompt together (S002-68)",
            "WRITE-EXCL": "a full hit is computed again in place, with the same content (X-06)",
            "LRU": "blocks leave by last use, length of the chain and id (S002-19, X-03)",
            "PREFIX-CLOSED": "a block may leave before those behind it (S002-45)",
            "EVICT-ORDER": "a chain is as old as its last use (S002-19, 20)",
            "HASH-MONO": "judged through KV-READ: a promoted block may take another's id (S002-31)",
            "HASH-INJ": "hashes are Python's, 64 bits wide (S002-54)",
            "KEY-SEP": "the extra hash is the caller's (S002-54, 60)",
            "CACHE-KV": "judged through KV-READ of hits",
            "HIT-PRESERVE": "judged through KV-READ of hits",
            "ADMIT-NEVER": "a prompt is judged with its hits counted as new (S002-72)",
        },
        worlds={
            "caching": CachingWorld(num_blocks=2, num_tokens=3, num_prompt=2, calls=FORK),
            "swap": CachingWorld(
                num_blocks=2, num_host_blocks=1, num_tokens=2, num_letters=1, calls=FORK
            ),
            "window": CachingWorld(
                num_blocks=5, num_sequences=1, num_tokens=10, num_letters=1, window=2
            ),
            "naive": CachingWorld(caching=False, num_host_blocks=1, num_tokens=3, num_prompt=2),
        },
    ),
}


def make_engine(world: FacadeWorld, backend: Any = "python") -> FacadeEngine:
    """An engine around an empty facade. Raises BackendMissing."""
    if isinstance(world, SpaceWorld):
        return SpaceEngine(world, backend)
    return CachingEngine(world, backend)


def _own(name: str) -> Property:
    return Property(name=name, sentence=OWN[name], scope="batch", severity="wrong KV")
