# SPDX-License-Identifier: Apache-2.0
"""The explored part of each facade: its worlds and checks, and the reasons for the rest.

Every property of the checker is either checked or lifted with a reason; a reason that is specific
to a facade cites a fact (docs/facts.md). Counts of states are pinned by
tests/check/test_facades.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvcore.check.facades.caching import CachingEngine, CachingWorld
from kvcore.check.facades.engine import FacadeEngine, FacadeWorld
from kvcore.check.facades.space import SpaceEngine, SpaceWorld
from kvcore.check.properties.facts import FAR_PROPERTIES
from kvcore.check.properties.registry import PROPERTIES, Property

FORK, NONE = frozenset({"fork"}), frozenset[str]()

FACADE_PROPERTIES = (
    *("REF", "PARTITION", "FQ-UNIQ", "LEAK", "NOCRASH", "ATOMIC-FAIL", "KV-READ"),
    *("ADMIT-EXACT", "ADMIT-NEVER"),
    *("CMD-HAZARD", "CMD-COPYSET", "CMD-EVICT-FIRST", "CMD-COW-SRC", "CMD-ORDER", "CMD-COMPLETE"),
)
OWN = {
    "CMD-COMPLETE": "the copies that a call returns are those that the batch has",
    "PRIORITY-ORDER": "free blocks without a key leave first, then the others by priority",
}
"""Sentences of the properties that only facades have."""

TABLES = "tables are lists of the facade, which no command mirrors (S002-66, S003-06, 34)"
MARKS = "the caller decides what is computed (S002-39, S003-26, 30)"
OWN_HASHES = "a hash belongs to a block or to a tracker, not to a request (S002-53, 60; S003-12)"
AT_ONCE = (
    "no call leaves work behind: copies are returned, to be done at once (S002-34, S003-20, 28)"
)
CALLER = "statuses and what runs next are the caller's (S002-72, S003-30)"
ONE_GROUP = "a sequence has one table, for all layers (S002-66, S003-06)"
NO_LOADS = "no call takes tokens from outside; the last manager alone does (S000-04)"
NO_EVENTS = "the facades make no events"
NO_EPOCHS = "no call of the facades changes weights: no fact speaks of it"
NO_LEVELS = "no call of the facades says how long content stays cached: no fact speaks of it"
NO_NAMED_PINS = "no call of the facades pins a prefix under a name: no fact speaks of it"
NO_TAILS = "no hit of the facades ends inside a block: no fact speaks of it"
NO_FLOORS = "no call of the facades keeps content for a tenant: no fact speaks of it"
OWN_KINDS = "it checks what users bring"
LIFTED: Mapping[str, str] = {
    **dict.fromkeys(("ROWS", "OPEN-BATCH", "TABLEN", "TABLE-MIRROR", "OWNER-MIRROR"), TABLES),
    "ROW-LIFE": TABLES,
    "GROWN": TABLES,
    "TAIL-SOUND": NO_TAILS,
    "WAIT-EMPTY": "a waiting sequence has no table at all (S002-66, S003-11, 34)",
    **dict.fromkeys(("COMPUTED", "COMPUTED-RULE", "DRAFT", "OUTPUT-ONCE", "PUBLISHED"), MARKS),
    **dict.fromkeys(("REQ-HASH", "CACHED-COUNT", "CACHE-KEY"), OWN_HASHES),
    "FULLHIT": "a full hit is left to the caller (X-06)",
    **dict.fromkeys(("QUARANTINE", "IN-FLIGHT", "OPERATIONS", "CMD-INFLIGHT", "DRAIN"), AT_ONCE),
    "ZEROED": "blocks are taken as they are (S002-14, S003-02)",
    **dict.fromkeys(("DEADLOCK-FREE", "PREEMPT-GAIN", "SWAP-RETURN", "NO-THRASH"), CALLER),
    "L-ADMIT": CALLER,
    **dict.fromkeys(("GROUP-AGREE", "CAP", "KEY-GRAN"), ONE_GROUP),
    **dict.fromkeys(("STATE-READ", "STATE-KEY", "STATE-LIVE", "STATE-OWN"), ONE_GROUP),
    "CROSS": "no world has an encoder: no fact speaks of one",
    "EVT-COPY": NO_EVENTS,
    **dict.fromkeys(("EPOCHS", "EPOCH-FIRST"), NO_EPOCHS),
    **dict.fromkeys(("NAMED-PINS", "PIN-HIT"), NO_NAMED_PINS),
    "FLOOR": NO_FLOORS,
    **dict.fromkeys(("WISHES", "RANK-ORDER", "LEVEL-CHAIN"), NO_LEVELS),
    **dict.fromkeys(("LOAD-FAILED", "UNCONFIRMED", "PINS"), NO_LOADS),
    **dict.fromkeys(("POLICY", "SCHEDULER", "MANAGER"), OWN_KINDS),
    **dict.fromkeys(FAR_PROPERTIES, "no manager of that time has a far tier"),
    "DETERMINISM": "a node is its calls made again, so it could not be explored else",
    "REFINE": "tests/legacy compare both backends call by call",
}


@attrs.frozen(kw_only=True)
class Facade:
    """A facade to explore. lifted: unchecked properties besides `LIFTED`, with their facts."""

    name: str
    sentence: str
    checked: tuple[str, ...]
    lifted: Mapping[str, str]
    worlds: Mapping[str, FacadeWorld]

    @property
    def known(self) -> dict[str, Property]:
        """Return the properties that are checked."""
        return {name: PROPERTIES.get(name) or _own(name) for name in self.checked}

    @property
    def reasons(self) -> dict[str, str]:
        """Return the reason why each other property is not checked."""
        return {**LIFTED, **self.lifted}


FACADES: dict[str, Facade] = {
    "v0.3": Facade(
        name="v0.3",
        sentence="kvcore.legacy.v0_3.block_space_manager",
        checked=FACADE_PROPERTIES,
        lifted={
            "NULL": "there is no null block: a window is a ring (S003-14, X-11)",
            "NULL-PREFIX": "a window is a ring, without null blocks (S003-14, X-11)",
            "NO-ALIAS": "a ring names one block at several places (S003-14)",
            "WRITE-EXCL": "the first sequence of a group writes the prompt for all (S003-10)",
            "LRU": "free blocks are a stack (S003-01, X-01)",
            **dict.fromkeys(
                (
                    *("IDX-SOUND", "IDX-COMPLETE", "CACHE-KV", "HASH-MONO", "HASH-INJ", "KEY-SEP"),
                    *("PREFIX-CLOSED", "EVICT-ORDER", "HIT-PRESERVE"),
                    *("HIT-FRESH", "HIT-PINNED", "HIT-LONGEST"),
                ),
                "no content has a key: prefixes are shared by hand (S003-12, 13)",
            ),
            "RESET": "a reset gives back what is held (S003-33)",
        },
        worlds={
            "plain": SpaceWorld(),
            "watermark": SpaceWorld(watermark=0.5, num_tokens=3, num_prompt=5),
            "siblings": SpaceWorld(
                num_blocks=3, num_sequences=3, num_tokens=3, num_prompt=2, best_of=3, calls=NONE
            ),
            "window": SpaceWorld(
                num_blocks=3, num_tokens=6, window=4, copy_reused=True, calls=FORK
            ),
            "ring": SpaceWorld(num_blocks=3, num_host_blocks=2, num_tokens=6, window=4, calls=NONE),
            "prefix": SpaceWorld(num_blocks=3, num_tokens=3, with_prefix=True),
            "swap": SpaceWorld(num_blocks=3, num_host_blocks=2, num_tokens=3),
        },
    ),
    "v0": Facade(
        name="v0",
        sentence="kvcore.legacy.v0.block_manager over prefix_caching_block",
        checked=(
            *FACADE_PROPERTIES,
            "IDX-SOUND",
            "IDX-COMPLETE",
            "NULL",
            "PRIORITY-ORDER",
            "RESET",
        ),
        lifted={
            "NULL-PREFIX": "the null block is taken from the GPU's like any other (S002-70)",
            "NO-ALIAS": "sequences of one group write their shared prompt together (S002-68)",
            "WRITE-EXCL": "a full hit is computed again in place, with the same content (X-06)",
            "LRU": "blocks leave by last use, length of the chain and id (S002-19, X-03)",
            "PREFIX-CLOSED": "a block may leave before those behind it (S002-45)",
            "EVICT-ORDER": "a chain is as old as its last use (S002-19, 20)",
            "HASH-MONO": "checked by KV-READ: a promoted block may take another's id (S002-31)",
            "HASH-INJ": "hashes are Python's, 64 bits wide (S002-54)",
            "KEY-SEP": "the extra hash is the caller's (S002-54, 60)",
            "CACHE-KV": "the seed's blocks count as computed from a mark on (S002-39, 40)",
            "HIT-PRESERVE": "a hit marks its block as computed (S002-10, 31)",
            "HIT-PINNED": "a block is found and taken in one call (S002-08)",
            "HIT-FRESH": "while a prompt waits, the first answer is kept (S002-61)",
            "HIT-LONGEST": "what the step before did not mark is not found (S002-44, 46)",
        },
        worlds={
            "caching": CachingWorld(num_blocks=2, num_tokens=3, num_prompt=2, calls=FORK),
            "swap": CachingWorld(
                num_blocks=2, num_host_blocks=1, num_tokens=2, num_letters=1, calls=FORK
            ),
            "window": CachingWorld(
                num_blocks=5, num_sequences=1, num_tokens=10, num_letters=1, window=2, looks=True
            ),
            "naive": CachingWorld(caching=False, num_host_blocks=1, num_tokens=3, num_prompt=2),
            "exchange": CachingWorld(
                caching=False, num_blocks=2, num_host_blocks=2, num_tokens=2, calls=NONE
            ),
            "promoted": CachingWorld(
                num_sequences=1,
                num_letters=1,
                num_prompt=1,
                num_appended=3,
                num_lookahead=1,
                looks=True,
                calls=NONE,
            ),
            "watermark": CachingWorld(
                caching=False, num_letters=1, num_tokens=5, num_prompt=5, watermark=0.4, calls=NONE
            ),
            "lookahead": CachingWorld(
                caching=False,
                num_letters=1,
                num_prompt=2,
                calls=NONE,
                best_of=2,
                num_appended=2,
                num_lookahead=2,
            ),
            "passed": CachingWorld(
                caching=False,
                num_host_blocks=2,
                num_letters=1,
                num_tokens=5,
                num_prompt=1,
                window=2,
                calls=FORK,
            ),
        },
    ),
}


def make_engine(world: FacadeWorld, backend: Any = "python") -> FacadeEngine:
    """Make an engine around an empty facade. Raises BackendMissing."""
    if isinstance(world, CachingWorld):
        return CachingEngine(world, backend)
    assert isinstance(world, SpaceWorld)
    return SpaceEngine(world, backend)


def _own(name: str) -> Property:
    return Property(name=name, sentence=OWN[name], scope="batch", severity="wrong KV")
