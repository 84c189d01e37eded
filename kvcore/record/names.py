# SPDX-License-Identifier: Apache-2.0
"""The form of a record by keys: hashes of full blocks, and nothing of what they are hashes of.

A request or pin is named after the call that added it, or after its place when the record began.
Tokens are 0, a salt is the number of its floor, the seed is empty. Each request has the hashes of
its blocks as if they were its own. The state keeps no events, nor any that a batch is to announce.
Twin: rust/src/record/names.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from immutables import Map
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.state import RequestMap, RequestState, State
from kvcore.types.config import Config
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.tokens import PackedTokens

UNKNOWN = "?"
"""Stands for a name that does not exist."""


def salt_of(config: Config, salt: str | None) -> str | None:
    """Return the salt that stands for one with a floor; None for any other."""
    tenant = config.tenant_of(salt)
    return f"{tenant:02}" if tenant else None


class Names:
    """What a record by keys calls requests, by row, and pins, by name."""

    def __init__(self, state: State) -> None:
        self.config = state.config
        rows = [row for row, request_id in enumerate(state.rows) if request_id is not None]
        self.requests = {row: f"start-{row}" for row in rows}
        self.pins = {name: f"start-{place}" for place, name in enumerate(sorted(state.named_pins))}

    def request(self, row: int | None, name: Any) -> str:
        """Return the name of the request in this row, or of one that is not known."""
        return self.requests[row] if row is not None else _stand_in(name)

    def pin(self, name: Any) -> str:
        """Return the name of a pin."""
        known = self.pins.get(name) if isinstance(name, str) else None
        return _stand_in(name) if known is None else known

    def note(self, name: str, given: Mapping[str, Any], value: Any, number: int) -> None:
        """Note the names that call `number` has given or taken."""
        if name in ("add_request", "fork"):
            self.requests[value] = str(number)
        elif name == "pin_prefix":
            self.pins[given["name"]] = str(number)
        elif name == "unpin_prefix":
            del self.pins[given["name"]]


def keys_form(state: State, names: Names) -> State:
    """Return the state in this form, for `encode` only: its maps keep the ids of requests."""
    config = state.config
    floors = {str(salt_of(config, salt)): size for salt, size in config.floors.items()}
    batch, named = state.batch, state.named_pins

    def renamed(request: RequestState) -> RequestState:
        salt = salt_of(config, request.extra_keys.cache_salt)
        return replace(
            request,
            request_id=names.requests[request.row],
            tokens=PackedTokens().extend([0] * len(request.tokens)),
            drafts=pvector([0] * len(request.drafts)),
            own_hashes=True,
            extra_keys=NO_EXTRA_KEYS if salt is None else ExtraKeys(cache_salt=salt),
        )

    def name_of(request_id: str) -> str:
        return names.requests[state.requests[request_id].row]

    return replace(
        state,
        config=attrs.evolve(config, hash_seed=b"", enable_events=False, floors=floors),
        requests=RequestMap.of({name: renamed(each) for name, each in state.requests.items()}),
        batch=replace(
            batch,
            merges=pvector(
                replace(each, request_id=name_of(each.request_id)) for each in batch.merges
            ),
        ),
        events=pvector(),
        device=attrs.evolve(state.device, silent=frozenset()),
        in_flight=tuple(
            replace(each, owed=tuple(replace(owed, event=None) for owed in each.owed))
            for each in state.in_flight
        ),
        operations=Map(
            {
                number: replace(each, request_id=each.request_id and name_of(each.request_id))
                for number, each in state.operations.items()
            }
        ),
        named_pins=Map({names.pins[name]: pin for name, pin in named.items()}),
    )


def _stand_in(name: Any) -> str:
    return UNKNOWN if isinstance(name, str) and name else ""
