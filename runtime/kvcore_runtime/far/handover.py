# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: one engine computes a prompt, another one goes on from a far tier.

The first engine answers with one token and stores the prompt's blocks; the second gets the prompt,
that token, and whatever blocks it finds. A hand-over is a hint: any part of the blocks, or none,
gives the same tokens, and what is not found is computed.
"""

from __future__ import annotations

import json

import attrs

from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import Completion, GenerationRequest
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.model.sampling import FinishReason

VERSION = 1
BYTES_MAX = 4096
_HEX_DIGITS = 64


class BadHandover(KvcoreRuntimeError):
    """Text that is no hand-over of this version, or one of another request."""

    message = "the hand-over cannot be used: {reason}"


@attrs.frozen(kw_only=True)
class Handover:
    """What the second engine is told, by any way.

    num_tokens: of the prompt. first_token: of the answer. identity: of the model and layout whose
    pages were stored.
    """

    request_id: str
    num_tokens: int
    first_token: int
    identity: str
    version: int = VERSION

    def to_json(self) -> str:
        """As text, on one line."""
        return json.dumps(attrs.asdict(self))


def read_handover(text: str | bytes) -> Handover:
    """The hand-over of some text; undoes `to_json`. Raises BadHandover."""
    if len(text) > BYTES_MAX:
        raise BadHandover(reason=f"{len(text)} bytes, at most {BYTES_MAX}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise BadHandover(reason="it is not JSON") from None
    names = attrs.fields_dict(Handover)
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise BadHandover(reason=f"expected an object with {', '.join(names)}")
    if values["version"] != VERSION or isinstance(values["version"], bool):
        raise BadHandover(reason=f"version {values['version']!r}, expected {VERSION}")
    for name in ("num_tokens", "first_token"):
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise BadHandover(reason=f"{name} is {value!r}, expected a number")
    for name in ("request_id", "identity"):
        if not isinstance(values[name], str):
            raise BadHandover(reason=f"{name} is {values[name]!r}, expected text")
    identity = values["identity"]
    if len(identity) != _HEX_DIGITS or set(identity) - set("0123456789abcdef"):
        raise BadHandover(reason=f"identity is {identity!r}, expected {_HEX_DIGITS} digits")
    return Handover(**values)


def as_prefill(request: GenerationRequest) -> GenerationRequest:
    """The request as the first engine answers it: with one token."""
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=1))


def hand_over(
    engine: Engine, request: GenerationRequest, completion: Completion, timeout_s: float = 10.0
) -> Handover | None:
    """Wait until the prompt's blocks are stored, and say so; None if the answer is over already.

    request: as it was asked. completion: of `as_prefill(request)`. timeout_s: after it, what is
    stored by then must do. Raises BadHandover if the engine has no far tier.
    """
    if completion.reason is not FinishReason.LENGTH or request.sampling.max_tokens == 1:
        return None
    exchange = engine.exchange
    if not isinstance(exchange, FarExchange) or exchange.identity is None:
        raise BadHandover(reason="the engine keeps its blocks in no far tier")
    exchange.flush(timeout_s)
    return Handover(
        request_id=request.request_id,
        num_tokens=len(request.prompt),
        first_token=completion.tokens[0],
        identity=exchange.identity,
    )


def as_decode(engine: Engine, request: GenerationRequest, handover: Handover) -> GenerationRequest:
    """The request as the second engine goes on with it.

    A hand-over of another model says nothing here: then the request is as it was asked. Raises
    BadHandover for one of another request.
    """
    said = handover.request_id, handover.num_tokens
    if said != (request.request_id, len(request.prompt)):
        asked = f"request {request.request_id!r} has {len(request.prompt)} tokens"
        raise BadHandover(reason=f"it is of request {said[0]!r} of {said[1]} tokens; {asked}")
    exchange = engine.exchange
    if not isinstance(exchange, FarExchange) or exchange.identity != handover.identity:
        return request
    return attrs.evolve(request, answered=(handover.first_token,))
