# SPDX-License-Identifier: Apache-2.0
"""The 94 reported bugs of KV-cache block managers, and the seeded bugs that stand for them.

Each row describes in our own words what a report says went wrong, and names no project; a row is
not a judgement on one. The seeded bugs of a row are those that give its number; a row without any
states why the bug cannot be put into this core.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.check.mutants.seeding import Mutant

SENTENCES: dict[int, str] = {
    1: "An evicted block stays in the index, and a look-up gives it out while it is reused.",
    2: "The same, hidden by comparing tokens on every look-up.",
    3: "The index is cleaned on eviction, and the block still says that it is cached.",
    4: "The index knows one block per content: a second copy is lost, or removed with the first.",
    5: "Every evicted copy is announced as the end of its content.",
    6: "The key of a part of a block comes back after the key of the whole block took its place.",
    7: "A request's tokens are cut or rewritten, its block hashes are not.",
    8: "A block cached for one request counts as computed for the request that takes it next.",
    9: "The hash is weak or can be predicted, so that other tokens have the same.",
    10: "An adapter and a salt of the same text give the same key.",
    11: "Two images give the same key, since their identity is cut short or left out.",
    12: "The outer tier's key is made of tokens only; adapter and media are missing.",
    13: "Groups of different block sizes take hashes of the wrong granularity.",
    14: "Null blocks count as cached, so nothing is ever published behind them.",
    15: "Hits get their owner before it is known whether the call fits, and keep it if not.",
    16: "Hits in the free queue are counted as free room, too.",
    17: "The same when a swapped request comes back.",
    18: "New blocks may evict the very blocks that were just found as hits.",
    19: "The same across groups: one group's new blocks evict another group's hits.",
    20: "A hit in the free queue takes the way of a fresh block, which resets it.",
    21: "A pin or hit counts an owner and leaves the block in the free queue.",
    22: "One release names a block twice, and each naming puts it into the free queue.",
    23: "A fresh block counts no owner, so its release never gives it back.",
    24: "Taking and giving back count the holdings of one table in different ways.",
    25: "Evicting a content frees its block though a request still holds it.",
    26: "The cache counts as an owner, and eviction does not give that back.",
    27: "A counter that is kept beside the data drifts away from it.",
    28: "A call fails behind a first part that it had taken already.",
    29: "A request that could not be scheduled keeps blocks that it is thought not to have.",
    30: "Two ways of release both free the last block.",
    31: "The tier of a block is read after the block has moved.",
    32: "A late duplicate is freed, and its request's table still names it.",
    33: "A port in another language pins more than the original.",
    34: "A block is findable before it is written, and the write never comes.",
    35: "Blocks are given back, findable, without ever having been filled.",
    36: "A request is removed before its blocks are registered; the rest finds what is not theirs.",
    37: "With a chunk of the prompt computed, all of it counts as written.",
    38: "Blocks become findable in mid-prefill and are then freed as if they were not.",
    39: "A full hit must leave a token to compute, and does not.",
    40: "A prefill starts at the first token, on top of an adopted prefix.",
    41: "A shared block is written in place, or its copy is not made or not counted.",
    42: "A fork fails half way, and what it did stays.",
    43: "A full shared block is taken for a partial one of one's own, and overwritten.",
    44: "A cached count is looked up once and used when it is not true any more.",
    45: "Guessed tokens are cached before they are accepted.",
    46: "Groups report hits of different lengths.",
    47: "The null block goes through the free path.",
    48: "The null block is not reserved, so that a request gets it.",
    49: "Blocks behind a window are freed, the worker's table keeps them.",
    50: "A reused block reads back what another group left in it.",
    51: "A stale map from positions to window blocks frees a block that is somebody else's.",
    52: "A deferred release mixes the groups, and with them the order of eviction.",
    53: "Blocks are freed head first, so that a parent is evicted before its child.",
    54: "A reset clears one tier, or clears while blocks are used.",
    55: "A group needs fewer blocks than it holds behind its window: a negative allocation.",
    56: "Blocks are given back while a dispatched step still writes them.",
    57: "Blocks are given back while a transfer still reads them.",
    58: "Pending transfers are not ordered if one reads what another writes.",
    59: "A block is moved to the very place that a pending transfer is to read.",
    60: "A block's id is used as an index into another tier's memory.",
    61: "A copy reads its source when it runs; the host buffer has changed by then.",
    62: "Copies of one step form a chain, and run as if they did not.",
    63: "In one step the worker swaps in before it swaps out.",
    64: "A commit allocates, which evicts, which detaches what is being committed.",
    65: "A preempted request keeps what it knew of the outer tier.",
    66: "A request that can never fit is queued, and blocks all others.",
    67: "Waiting requests hold all blocks, and none of them can go on.",
    68: "Deferred releases look like no gain, so everybody is preempted.",
    69: "A request comes back for one step and is preempted in the next, again and again.",
    70: "A swapped request can never come back.",
    71: "The cold tail's blocks evict the prefix that a look-up would have found.",
    72: "A request is preempted in mid-step, and the keys of what it was to write stay.",
    73: "A window moves on behind drafts, or while a step in flight still reads behind it.",
    74: "A block is handed out for a load, and goes to the store under the key of what it held.",
    75: "A block that one tier has yet to bring in is passed on to another tier, or found there.",
    76: "A preempted request comes back while a transfer of its first life is still listed for it.",
    77: "The mark of what is published passes blocks whose last token is not known yet.",
    78: "Output of a step from before a preemption is given to the request's next life.",
    79: "A group of recurrent state counts its columns in blocks of another group.",
    80: "A step's blocks count as written when the next step is scheduled, and it never ran.",
    81: "A hit is read by a transfer ahead of the forward pass that writes it in the same step.",
    82: "A windowed group keeps other blocks than those that a look-up asks for: nothing hits.",
    83: "A block that could not be stored is still listed by the store that it was meant for.",
    84: "A load that failed counts as loaded, and the request reads what was there before.",
    85: "A load brings another request's content, or another part of the prompt's.",
    86: "The end of a transfer gives its block back twice, or not at all.",
    87: "A look-up locks chunks of a store, and those that are computed after all stay locked.",
    88: "A request that is aborted in its prompt frees the block twice that it was filling.",
    89: "A preemption frees twice, or a row is given again while a step still reads it.",
    90: "A block counts as free although it has yet to be copied to the outer tier.",
    91: "The removal of a content is not announced, so every mirror of the index keeps it.",
    92: "A suspended request keeps its place in the batch, or the growth of a step that never ran.",
    93: "A client goes away, and the blocks of its request are freed under the running step.",
    94: "A consumer of the events loses entries, or keeps those of a server that is gone.",
}
"""Number of a row -> what went wrong."""

NOT_EXPRESSED: dict[int, str] = {
    33: "the mistake is in a port: here the languages are compared on every edge (REFINE)",
    61: "it is the runtime's: commands are values, and no transition reads memory",
    64: "a transition changes a copy that no other call sees, so no call meets another half way",
    94: "the core announces what it does, and knows of no follower; row 91 is its own part",
}
"""Why no seeded bug of the Python core stands for a row."""


def by_row(mutants: list[Mutant]) -> Mapping[int, list[Mutant]]:
    """Return the seeded bugs of every row, in their order."""
    return {number: [each for each in mutants if number in each.rows] for number in SENTENCES}
