# SPDX-License-Identifier: Apache-2.0
"""Moves with external tokens that other requests share and compute on, before the load fails."""

from __future__ import annotations

from kvcore import Request
from tests.oracle.engine import Engine
from tests.oracle.moves_batches import report, take
from tests.oracle.moves_pool import swap_out
from tests.oracle.moves_requests import draw_tokens, fork_of, look_up, remove_request, schedule
from tests.oracle.requests import OracleRequest

MOST_KNOWN = 10


def spread(e: Engine) -> None:
    """Load tokens for a request, let another depend on them, and report the load if it fails.

    Then two requests come with the same tokens: one computes what was loaded, and the other looks
    up what was computed behind it.
    """
    step = e.config.block_alignment
    tokens = draw_tokens(e, 3 * step + 1)
    if not e.config.enable_caching or len(tokens) > e.limit or len(e.known) > MOST_KNOWN:
        return
    if e.rng.random() < 0.7:
        for each in list(e.known.values()):
            e.free(each)
    leader = newcomer(e, tokens[: step + 1])
    if look_up(e, leader).num_tokens == 0:
        schedule(e, leader, 1, None, step)
    if not leader.is_idle or not leader.count:
        return
    if e.config.max_in_flight or e.rng.random() < 0.5:
        take(e)
    follower = newcomer(e, tokens) if e.rng.random() < 0.5 else fork_of(e, leader)
    if len(follower.stuff) < len(tokens):
        e.call("add_tokens", follower.name, tokens[step + 1 :])
        follower.add(tokens[step + 1 :])
    compute(e, follower, len(tokens))
    if e.rng.random() < 0.7:
        take(e)
    if e.rng.random() < 0.3:
        swap_out(e)
    removes = e.rng.random() < 0.4
    for each in (leader, follower):
        if (removes or e.rng.random() < 0.4) and e.free(each) and removes:
            remove_request(e, each)
    report(e, None)
    for end in (step, len(tokens)):
        waits = follower.name in e.known and follower.is_idle and not follower.count
        request = follower if waits else newcomer(e, tokens)
        compute(e, request, end)
        take(e)


def newcomer(e: Engine, tokens: list[int]) -> OracleRequest:
    """Add a request with these tokens."""
    e.num_named += 1
    known = OracleRequest(name=f"r{e.num_named}", row=-1, stuff=[(token,) for token in tokens])
    known.row = e.call("add_request", Request(known.name, tokens))
    e.known[known.name] = known
    return known


def compute(e: Engine, request: OracleRequest, end: int) -> None:
    """Schedule a request's tokens up to here, after what it counts or hits."""
    hit = None if request.count else look_up(e, request)
    first = request.count or (0 if hit is None else hit.num_tokens)
    if request.is_idle and first < end:
        schedule(e, request, min(e.most, end - first), hit, 0)
