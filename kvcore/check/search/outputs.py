# SPDX-License-Identifier: Apache-2.0
"""The outputs that an engine has yet to hand in: when they are awaited, stale, or dropped."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import attrs

from kvcore.check.names.in_flight import Output, Pending
from kvcore.check.world.model import CheckedCall
from kvcore.check.world.world import Move
from kvcore.trace.calls import Call, Misuse
from kvcore.types.values import Refused

CUTTING = ("truncate", "rewind")


def oldest(outputs: Sequence[Output]) -> list[Output]:
    """Return the first output of each request."""
    found: dict[str, Output] = {}
    for each in outputs:
        found.setdefault(each.request_id, each)
    return list(found.values())


def without(outputs: tuple[Output, ...], output: Output) -> tuple[Output, ...]:
    """Return the outputs but for one."""
    return tuple(each for each in outputs if each is not output)


def gives(move: Call | Move, names: Container[str]) -> bool:
    """Return whether a move gives one of these requests a token of the engine's own."""
    if not isinstance(move, Call):
        return False
    given = move.args[0][0] if move.name == "append" else move.args[0] if move.args else None
    return move.name in ("append", "add_tokens") and given in names


def sampled_by(batch: Pending) -> Iterator[Output]:
    """Yield the output to come of a batch, for the requests that it computes to the last token."""
    for write in batch.writes:
        samples = write.end >= len(batch.requests[write.request_id].tokens)
        if samples and write.loaded < write.end:
            yield Output(write.request_id, batch.number)


def followed(outputs: tuple[Output, ...], step: CheckedCall) -> tuple[Output, ...]:
    """Return the outputs after a call: those of a removed request are dropped, those of one that is
    cut or scheduled anew are stale, as are those behind a rejected draft beside states.
    """
    call, value = step.call, step.outcome.value
    if isinstance(value, Misuse | Refused):
        return outputs
    if not call.args:
        return outputs
    name, stale = call.args[0], False
    if call.name == "remove_request":
        return tuple(each for each in outputs if each.request_id != name)
    if call.name in ("allocate_slots", "load"):
        request = step.before.requests[name]
        stale = request.num_computed < len(request.tokens)
    elif call.name == "add_tokens" and step.before.config.has_states:
        to_come = step.before.requests[name].num_output_placeholders
        stale = min(call.options.get("num_rejected", 0), to_come) > 0
    elif call.name in CUTTING:
        stale, name = True, name[0] if call.name == "rewind" else name
    if not stale:
        return outputs
    return tuple(
        attrs.evolve(each, stale=True) if each.request_id == name else each for each in outputs
    )
