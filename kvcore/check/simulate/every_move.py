# SPDX-License-Identifier: Apache-2.0
"""Every move by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.check.simulate import ahead, batches, kept, moves
from kvcore.check.simulate.play import Move, Play

OF_REQUESTS = (
    *(moves.add, moves.extend, moves.hashes, moves.allocate, moves.append, moves.guess),
    *(moves.accept, moves.free, moves.remove, moves.fork, moves.truncate),
)
OF_BLOCKS = (
    *(moves.swap_out, moves.swap_in, moves.pin, moves.unpin, moves.evict, moves.store),
    *(moves.load, moves.finish, moves.cache, moves.trim, moves.reset, moves.drain, moves.fail),
)
OF_BATCHES = (batches.shorten, batches.take, batches.execute, batches.complete, batches.cancel)
AHEAD = (ahead.ahead, ahead.foresee, ahead.foresee_draft, ahead.receive, ahead.repeat)
KEPT = (kept.advance, kept.tick, kept.wish, kept.pin_prefix, kept.unpin_prefix)
MOVES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (*OF_REQUESTS, *OF_BLOCKS, *OF_BATCHES, *AHEAD, *KEPT)
}


def make(play: Play, move: Move) -> Any:
    """Make a move on a run; return the value of its last call, None if it made none."""
    return MOVES[move.verb](play, *move.args)
