# SPDX-License-Identifier: Apache-2.0
"""Facts about each property besides its check: severity, and the reported bugs that break it.

Bugs are rows of kvcore/check/mutants/catalogue.py. A listed name that is not itself a property
names the properties that stand for it.
"""

from __future__ import annotations

from typing import Literal

import attrs

Severity = Literal["wrong KV", "crash", "leak", "progress", "quality"]


@attrs.frozen
class Fact:
    """The severity of a break, whether users see it, and the `catalogue.py` rows that cause it."""

    severity: Severity
    rows: tuple[int, ...] = ()
    observable: bool = False


FACTS: dict[str, Fact] = {
    "REF": Fact("wrong KV", (15, 23, 24, 32, 86, 88, 89)),
    "PARTITION": Fact("wrong KV", (21, 38)),
    "FQ-UNIQ": Fact("wrong KV", (21, 22, 27)),
    "NULL": Fact("wrong KV", (47, 48)),
    "IDX-SOUND": Fact("wrong KV", (1, 2, 6)),
    "IDX-COMPLETE": Fact("quality", (3, 4)),
    "TAIL-SOUND": Fact("wrong KV"),
    "LEAK": Fact("leak", (23, 26, 30, 36, 86), observable=True),
    "ROWS": Fact("wrong KV"),
    "OPEN-BATCH": Fact("wrong KV", (72, 92)),
    "OPERATIONS": Fact("wrong KV", (57, 65, 76, 85)),
    "QUARANTINE": Fact("wrong KV", (56, 57)),
    "IN-FLIGHT": Fact("wrong KV", (56, 72)),
    "UNCONFIRMED": Fact("wrong KV"),
    "TABLEN": Fact("wrong KV", (29,)),
    "WAIT-EMPTY": Fact("wrong KV", (29, 44, 65)),
    "NULL-PREFIX": Fact("wrong KV", (47, 51, 73)),
    "GROUP-AGREE": Fact("wrong KV", (46,)),
    "CROSS": Fact("leak"),
    "NO-ALIAS": Fact("wrong KV", (18, 19, 25, 51)),
    "CACHED-COUNT": Fact("quality", (14, 77)),
    "REQ-HASH": Fact("wrong KV", (7, 45)),
    "CACHE-KEY": Fact("wrong KV", (6, 37)),
    "DRAFT": Fact("wrong KV", (45,)),
    "COMPUTED": Fact("wrong KV", (37, 45)),
    "PREFIX-CLOSED": Fact("quality", (53,)),
    "EVICT-ORDER": Fact("quality", (52, 53)),
    "KV-READ": Fact("wrong KV", (8, 18, 19, 29, 32, 34, 35, 39, 41, 44, 56, 81), observable=True),
    "CACHE-KV": Fact("wrong KV", (7, 34, 35, 36, 37, 38, 72, 74, 75, 80)),
    "STATE-READ": Fact("wrong KV", (79, 80), observable=True),
    "STATE-KEY": Fact("wrong KV", (79, 80)),
    "STATE-LIVE": Fact("wrong KV"),
    "STATE-OWN": Fact("leak"),
    "LOAD-FAILED": Fact("wrong KV", (57,), observable=True),
    "TABLE-MIRROR": Fact("wrong KV", (32, 49)),
    "OWNER-MIRROR": Fact("quality"),
    "COMPUTED-RULE": Fact("wrong KV", (37, 40, 44, 45, 65, 84, 92)),
    "OUTPUT-ONCE": Fact("wrong KV", (78,), observable=True),
    "ZEROED": Fact("wrong KV", (50,), observable=True),
    "CAP": Fact("leak"),
    "NOCRASH": Fact("crash", (16, 55), observable=True),
    "HASH-INJ": Fact("wrong KV", (9,)),
    "KEY-SEP": Fact("wrong KV", (10, 11, 12)),
    "KEY-GRAN": Fact("wrong KV", (13,)),
    "ATOMIC-FAIL": Fact("leak", (15, 28, 29, 42)),
    "ADMIT-EXACT": Fact("crash", (16, 17)),
    "RESET": Fact("wrong KV", (54,), observable=True),
    "WRITE-EXCL": Fact("wrong KV", (40, 41, 43)),
    "HIT-LONGEST": Fact("quality", (14, 20, 46, 71)),
    "EVT-COPY": Fact("quality", (4, 5, 91)),
    "LRU": Fact("quality", (52,)),
    "EPOCHS": Fact("wrong KV"),
    "EPOCH-FIRST": Fact("quality"),
    "WISHES": Fact("quality"),
    "RANK-ORDER": Fact("quality"),
    "LEVEL-CHAIN": Fact("quality"),
    "ROW-LIFE": Fact("wrong KV", (89,)),
    "GROWN": Fact("wrong KV"),
    "PINS": Fact("leak", (86,)),
    "NAMED-PINS": Fact("leak"),
    "PIN-HIT": Fact("quality"),
    "FLOOR": Fact("quality"),
    "HIT-PRESERVE": Fact("quality", (20,)),
    "HIT-PINNED": Fact("wrong KV", (18, 19, 59)),
    "HIT-FRESH": Fact("wrong KV", (44,)),
    "FULLHIT": Fact("wrong KV", (39, 40)),
    "HASH-MONO": Fact("wrong KV", (6,)),
    "PUBLISHED": Fact("quality", (14, 82)),
    "DETERMINISM": Fact("quality"),
    "POLICY": Fact("crash"),
    "SCHEDULER": Fact("crash"),
    "MANAGER": Fact("crash"),
    "REFINE": Fact("wrong KV", (33,)),
    "CMD-HAZARD": Fact("wrong KV", (58, 59, 63)),
    "CMD-COPYSET": Fact("wrong KV", (62,)),
    "CMD-EVICT-FIRST": Fact("wrong KV", (1, 57)),
    "CMD-COW-SRC": Fact("wrong KV", (41, 57, 59)),
    "CMD-ORDER": Fact("wrong KV", (58, 62, 63)),
    "CMD-INFLIGHT": Fact("wrong KV", (56, 57, 73, 90, 93)),
    "ADMIT-NEVER": Fact("progress", (66,), observable=True),
    "L-ADMIT": Fact("progress", (66, 70), observable=True),
    "DEADLOCK-FREE": Fact("progress", (67,), observable=True),
    "PREEMPT-GAIN": Fact("progress", (68,), observable=True),
    "NO-THRASH": Fact("progress", (69,), observable=True),
    "SWAP-RETURN": Fact("progress", (70,), observable=True),
    "DRAIN": Fact("leak", (23, 26, 28, 30, 36), observable=True),
    "STAGING": Fact("wrong KV", (86,)),
    "FAR-KV": Fact("wrong KV", (74, 75, 84, 85)),
    "FAR-HINT": Fact("wrong KV", (84,)),
    "LEASE": Fact("leak", (86, 87), observable=True),
    "NEVER-STUCK": Fact("progress", observable=True),
    "HEAL": Fact("quality", (83,)),
}

SENTENCES: dict[str, str] = {
    "KV-READ": "what a query sees is read from slots that hold its own prefix, in every group",
    "CACHE-KV": "a block under a key holds exactly the prefix that the key stands for",
    "STATE-READ": "before a step the block that it overwrites holds the state of the request's own"
    " prefix, in every state group",
    "STATE-KEY": "a block under a key of a state group holds the state after the prefix that the"
    " key stands for",
    "LOAD-FAILED": "after a failed external load is reported, nothing computed from its slots is"
    " findable or counted, whichever request held it",
    "TABLE-MIRROR": "block tables built from the commands alone equal those of the state",
    "OWNER-MIRROR": "owners, and the cached blocks among those without owners, follow from the"
    " commands alone",
    "COMPUTED-RULE": "computed counts are those that docs/engines.md defines",
    "OUTPUT-ONCE": "output is accepted once, in order, and never by a request that was cut since",
    "ZEROED": "a new block of a group that requires zeroing is zeroed or filled before it is read",
    "CAP": "a request that one step extends holds no more of a windowed group than its cap",
    "NOCRASH": "a call fails only with a typed error",
    "REFINE": "both languages agree on value, error, commands, events and canonical bytes, and what"
    " the compiled one remembers of a request's next tokens is so",
    "POLICY": "a custom eviction policy returns a position at every call",
    "SCHEDULER": "a custom scheduler returns its moves in every state",
    "MANAGER": "a custom manager has the methods that an engine calls, and they return what an"
    " engine expects",
    "CMD-INFLIGHT": "no block that a batch in flight reads or writes is free, and quarantine"
    " holds only such blocks",
    "STAGING": "each slot of the staging memory is free, or of one ticket, one ready page, one"
    " store or one load; marked are those of stores and loads alone",
    "FAR-KV": "what a verified or sealed page holds is the content that its name stands for",
    "FAR-HINT": "a far tier adds to computed counts only by pages that were verified and loaded",
    "LEASE": "no ticket, slot or look-up of a far tier outlives what it was for",
    "NEVER-STUCK": "every request can end though the far tier never answers again",
    "HEAL": "a page that is damaged, or is not where it is believed to be, becomes right by use",
}

FAR_PROPERTIES = ("STAGING", "FAR-KV", "FAR-HINT", "LEASE", "NEVER-STUCK", "HEAL")
"""Properties of worlds with a far tier."""

OF_OUR_NAME = (
    *("REF", "PARTITION", "FQ-UNIQ", "NULL", "IDX-SOUND", "IDX-COMPLETE", "TABLEN", "NO-ALIAS"),
    *("LEAK", "PREFIX-CLOSED", "EVICT-ORDER", "CACHED-COUNT", "KV-READ", "CACHE-KV"),
    *("HASH-INJ", "WRITE-EXCL", "DRAFT", "FULLHIT", "REQ-HASH", "HASH-MONO", "KEY-SEP"),
    *("KEY-GRAN", "HIT-PRESERVE", "HIT-PINNED", "HIT-FRESH", "RESET", "ATOMIC-FAIL"),
    *("ADMIT-EXACT", "DETERMINISM", "LRU", "REFINE", "EVT-COPY", "CMD-EVICT-FIRST"),
    *("CMD-COPYSET", "CMD-INFLIGHT", "TABLE-MIRROR", "ADMIT-NEVER", "L-ADMIT", "DEADLOCK-FREE"),
    *("PREEMPT-GAIN", "NO-THRASH", "SWAP-RETURN", "DRAIN"),
)
"""The names of facts that are properties here."""

SPECIFIED: dict[str, tuple[str, ...] | str] = {
    **{name: (name,) for name in OF_OUR_NAME},
    "REF-DEF": "REF counts per occurrence in tables; it checks fork, free and copy-on-write",
    "COUNT-DERIVED": ("FQ-UNIQ",),
    "WAIT-EMPTY": ("WAIT-EMPTY", "TABLEN"),
    "TIER-PART": "REF, PARTITION, FQ-UNIQ and the index's properties are checked for each tier",
    "ID-MAP": "no state maps ids to memory: a block's id is its place",
    "KV-HIT": ("HIT-FRESH", "CACHE-KV", "KV-READ"),
    "PUBLISH": ("CACHE-KV", "CMD-INFLIGHT"),
    "COMPUTED<=WRITTEN": ("COMPUTED-RULE", "KV-READ"),
    "READ-WRITTEN": ("KV-READ", "ZEROED"),
    "KEY-TIER": "one key for all tiers: stores and loads name the key of the device, by KEY-SEP",
    "GROUP-AGREE": ("GROUP-AGREE", "HIT-LONGEST"),
    "NOCRASH": ("NOCRASH", "ATOMIC-FAIL"),
    "EQUIVARIANCE": "checked on sampled edges by tests/check/test_canonical.py",
    "MINIMAL-EVICT": "LRU says which block leaves: the front, where uncached blocks stand first",
    "CMD-COMPLETE": "KV-READ, CACHE-KV and TABLE-MIRROR are checked on what the commands leave",
    "CMD-HAZARD": ("CMD-HAZARD", "CMD-ORDER"),
    "CMD-COW-SRC": ("CMD-COW-SRC", "CMD-INFLIGHT"),
    "CMD-SWAP": ("CMD-HAZARD", "CMD-ORDER"),
    "CMD-ONCE": "batches are replayed on tensors by the runtime's tests (tests/runtime)",
}
"""Each name of the list of 45 with its companions -> our names, or what stands for it."""
