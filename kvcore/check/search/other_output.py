# SPDX-License-Identifier: Apache-2.0
"""Output under the number of another batch, which the core must refuse.

Twin: rust/src/check/search/other_output.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.check.names.in_flight import Output
from kvcore.state.state import State
from kvcore.transitions import requests
from kvcore.types.errors import KvcoreError


def taken_instead(state: State, output: Output, outputs: Sequence[Output]) -> list[int]:
    """Return the other batches under whose number a token would be taken in place of an output.

    Tried are the batches of all outputs to come, and the last one taken.
    """
    numbers = {each.batch for each in outputs} | {state.batch.number - 1}
    return [each for each in sorted(numbers - {output.batch}) if is_taken(state, output, each)]


def is_taken(state: State, output: Output, batch: int) -> bool:
    """Tell whether a request takes a token of a batch."""
    try:
        requests.add_tokens(state, output.request_id, list(output.text[-1:]), batch=batch)
    except KvcoreError:
        return False
    return True
