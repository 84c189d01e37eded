# SPDX-License-Identifier: Apache-2.0
"""What each fault of an engine that runs ahead does: it is refused, or why it is none."""

from __future__ import annotations

import pytest

from kvcore import KVCacheManager
from kvcore.types.errors import (
    BeyondDrafts,
    KvcoreError,
    OutputOutOfOrder,
    StaleOutput,
    UnknownRequest,
)
from tests.conftest import Backend
from tests.core.misuse.bad_drafts import drafted
from tests.core.misuse.bad_output import completed, flying, short
from tests.helpers.misuse import Row, bad, check_error
from tests.helpers.stories import add, make, unchanged


def newest_drafts(backend: Backend) -> KVCacheManager:
    """Compute two tokens and two drafts of "guess" in batch 0: at most three tokens are sampled."""
    manager = make(backend, num_blocks=24, max_in_flight=2)
    add(manager, "guess", [0, 1])
    manager.allocate_slots("guess", 4, num_output_placeholders=2)
    manager.take_batch()
    return manager


def drafts_in_flight(backend: Backend) -> KVCacheManager:
    """As `newest_drafts`; batch 1 samples the token after those of batch 0."""
    manager = newest_drafts(backend)
    manager.allocate_slots("guess", 1, num_output_placeholders=3)
    manager.take_batch()
    return manager


def handed_in(backend: Backend) -> KVCacheManager:
    """As `flying`, with the output of batch 0 for "both"."""
    manager = flying(backend)
    manager.add_tokens("both", [3], batch=0)
    return manager


NOBODY = UnknownRequest(request="nobody")
REFUSED: dict[str, list[Row]] = {
    "tokens for nobody": [
        bad(flying, NOBODY, "add_tokens", "nobody", [1], batch=0),
        bad(flying, NOBODY, "append", ["both", "nobody"], [1, 1], batch=0),
    ],
    "more tokens than the batch sampled": [
        bad(
            flying,
            OutputOutOfOrder(request="both", batch=0, num_tokens=4, expected=1),
            *("add_tokens", "both", [1, 1]),
            batch=0,
        ),
        bad(
            flying,
            OutputOutOfOrder(request="last", batch=1, num_tokens=2, expected=None),
            *("add_tokens", "last", [1, 1]),
            batch=1,
        ),
    ],
    "the next output after too few tokens": [
        bad(
            short,
            OutputOutOfOrder(request="short", batch=1, num_tokens=3, expected=None),
            *("add_tokens", "short", [1]),
            batch=1,
        ),
    ],
    "the same output twice": [
        bad(
            handed_in,
            StaleOutput(request="both", batch=0, output_from=1),
            *(call, *arguments),
            batch=0,
        )
        for call, arguments in (("add_tokens", ("both", [3])), ("append", (["both"], [3])))
    ],
    "output out of order": [
        bad(
            flying,
            OutputOutOfOrder(request="both", batch=1, num_tokens=3, expected=0),
            *(call, *arguments),
            batch=1,
        )
        for call, arguments in (("add_tokens", ("both", [4])), ("append", (["both"], [4])))
    ],
    "acceptance above what was drafted": [
        bad(
            drafts_in_flight,
            OutputOutOfOrder(request="guess", batch=0, num_tokens=5, expected=1),
            *("add_tokens", "guess", [2, 3, 4, 5]),
            batch=0,
        ),
        *(
            bad(
                newest_drafts,
                OutputOutOfOrder(
                    request="guess", batch=0, num_tokens=5 - num_rejected, expected=None
                ),
                *("add_tokens", "guess", [2, 3, 4, 5][: 4 - num_rejected]),
                num_rejected=num_rejected,
                batch=0,
            )
            for num_rejected in range(3)
        ),
        bad(
            drafted,
            BeyondDrafts(request="settles", num_scheduled=2, requested=3),
            *("accept", "settles", 3),
        ),
    ],
    "the next output after a completion without tokens": [
        bad(
            completed,
            OutputOutOfOrder(request="both", batch=1, num_tokens=3, expected=0),
            *("add_tokens", "both", [4]),
            batch=1,
        ),
    ],
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_fault_is_refused_by_name(fault: str, backend: Backend) -> None:
    for row in REFUSED[fault]:
        manager = row.world(backend)
        with unchanged(manager), pytest.raises(KvcoreError) as caught:
            getattr(manager, row.call.name)(*row.call.args, **row.call.options)
        check_error(caught.value, row.error)


def test_a_batch_may_be_completed_before_its_tokens_come(backend: Backend) -> None:
    # Output may be late: it is taken in order whenever it comes.
    manager = completed(backend)
    manager.add_tokens("both", [3], batch=0)
    manager.add_tokens("both", [4], batch=1)
    assert list(manager.state().requests["both"].tokens) == [0, 1, 2, 3, 4]
    manager.check()


def test_fewer_tokens_than_a_batch_sampled_end_an_answer(backend: Backend) -> None:
    # An answer may end inside its drafts: what comes after its end is not handed in.
    manager = drafts_in_flight(backend)
    manager.add_tokens("guess", [2], batch=0)
    manager.free("guess")
    assert list(manager.state().requests["guess"].tokens) == [0, 1, 2]
    manager.check()


def test_more_drafts_are_rejected_than_are_to_come(backend: Backend) -> None:
    # Late output of a preempted request names drafts that were dropped with its blocks.
    manager = drafts_in_flight(backend)
    manager.add_tokens("guess", [2], num_rejected=9, batch=0)
    assert manager.num_output_placeholders("guess") == 0
    assert list(manager.state().requests["guess"].tokens) == [0, 1, 2]
    manager.check()
