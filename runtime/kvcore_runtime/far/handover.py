# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill: one engine computes a prompt, another continues from a far tier.

The first engine answers with one token and stores the prompt's blocks; the second gets the prompt,
that token, and whatever blocks it finds. A hand-over is only a hint: with any part of the blocks,
or none, the tokens are the same, and blocks that are not found are computed.
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
    """Text that is not a hand-over of this version, or one for another request."""

    message = "the hand-over cannot be used: {reason}"


@attrs.frozen(kw_only=True)
class Handover:
    """What the second engine needs to know; how it gets there is up to the caller.

    num_tokens: of the prompt. first_token: of the answer. identity: of the model and layout whose
    pages were stored.
    """

    request_id: str
    num_tokens: int
    first_token: int
    identity: str
    version: int = VERSION

    def to_json(self) -> str:
        """Write the hand-over as one line of text."""
        return json.dumps(attrs.asdict(self))


def read_handover(text: str | bytes) -> Handover:
    """Read a hand-over from text; the inverse of `to_json`. Raises BadHandover."""
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
    """Return the request for the first engine, which answers with one token."""
    return attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=1))


def hand_over(
    engine: Engine, request: GenerationRequest, completion: Completion, timeout_s: float = 10.0
) -> Handover | None:
    """Wait until the prompt's blocks are stored. Returns None if the answer is complete already.

    The step after the one that gave the completion copies the last blocks, so let the engine do it
    before. request: the original one. completion: of `as_prefill(request)`. timeout_s: the longest
    wait; the blocks that are stored by then must do. Raises BadHandover if the engine has no far
    tier.
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
    """Return the request for the second engine, which continues the answer.

    A hand-over of another model is ignored: then this is the original request. Raises BadHandover
    for one of another request.
    """
    said = handover.request_id, handover.num_tokens
    if said != (request.request_id, len(request.prompt)):
        expected = f"request {request.request_id!r} has {len(request.prompt)} tokens"
        raise BadHandover(reason=f"it is of request {said[0]!r} of {said[1]} tokens; {expected}")
    exchange = engine.exchange
    if not isinstance(exchange, FarExchange) or exchange.identity != handover.identity:
        return request
    return attrs.evolve(request, answered=(handover.first_token,))
