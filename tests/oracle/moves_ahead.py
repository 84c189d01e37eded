# SPDX-License-Identifier: Apache-2.0
"""Moves of an engine that runs ahead: positions whose tokens are handed in later.

The engine draws a token when it schedules its position, and the verdict on drafts when it schedules
them, so that the device can write at the true positions; the manager hears of it afterwards.
"""

from __future__ import annotations

from array import array
from typing import Any

from kvcore import Appended, Refused
from kvcore.types.errors import InOpenBatch, StaleOutput
from tests.oracle.device import Span
from tests.oracle.engine import Engine
from tests.oracle.finding import demand
from tests.oracle.moves_requests import draw_tokens
from tests.oracle.requests import Guess, OracleRequest


def run_ahead(e: Engine) -> None:
    """Give some requests a slot for a token that is to come."""
    decode(e, able(e), known=False)


def follow(e: Engine) -> None:
    """Let some requests hand in the next token to come, and get a slot for another one."""
    decode(e, [each for each in able(e) if num_plain(each)], known=True)


def guess(e: Engine) -> None:
    """Give a request slots for a token to come and drafts after it."""
    requests = [each for each in able(e) if each.count + 2 < e.limit]
    if not requests:
        return
    request = e.rng.choice(requests)
    num_drafts = e.rng.randint(1, min(3, e.limit - request.count - 1, max(1, e.most - 1)))
    before, count = e.before(), num_drafts + 1
    got = e.call("allocate_slots", request.name, count, num_output_placeholders=count)
    if isinstance(got, Refused):
        e.refused(got, before, request.name)
        return
    accepted = e.rng.randint(0, num_drafts)
    request.future.append((draw_tokens(e, 1)[0], request.sampler))
    offset = len(request.stuff) + len(request.future)
    request.future += [(token, None) for token in draw_tokens(e, accepted)]
    note_ahead(e, request, 1 + accepted, num_drafts - accepted)
    request.guesses.append(Guess(offset, accepted, num_drafts - accepted))
    e.learn_keys(request)


def able(e: Engine) -> list[OracleRequest]:
    """Return the requests that can get a slot for a token that is to come."""
    ready = [each for each in e.idle() if not each.drafts and each.base is None and each.count]
    return [each for each in ready if each.is_caught_up and each.count < e.limit]


def num_plain(request: OracleRequest) -> int:
    """Count the tokens to come that can be handed in before the next verdict on drafts."""
    if not request.guesses:
        return len(request.future)
    return min(len(request.future), request.guesses[0].offset - len(request.stuff))


def decode(e: Engine, requests: list[OracleRequest], *, known: bool) -> None:
    """Make a step that runs ahead. known: whether each request hands in its next token."""
    if not requests:
        return
    chosen = e.rng.sample(requests, e.rng.randint(1, len(requests)))
    names: Any = [each.name for each in chosen]
    if e.rng.random() < 0.4:
        names = array("i", [each.row for each in chosen])
    options: dict[str, Any] = {}
    samplers = {each.future[0][1] for each in chosen if known}
    if len(samplers) == 1 and None not in samplers and e.rng.random() < 0.5:
        options["batch"] = samplers.pop()
    handed = [each.future[0][0] for each in chosen] if known else None
    before = e.before()
    appended: Appended = e.call("append", names, handed, **options)
    wrong = f"{appended!r} of {len(chosen)} requests"
    demand((appended.done < len(chosen)) == (appended.refused is not None), wrong)
    for request in chosen[: appended.done]:
        if known:
            request.add([request.future.pop(0)[0]])
        request.future.append((draw_tokens(e, 1)[0], request.sampler))
        note_ahead(e, request, 1, 0)
        e.learn_keys(request)
    if appended.refused is not None:
        at = before if appended.done == 0 else b""
        e.refused(appended.refused, at, chosen[appended.done].name)


def note_ahead(e: Engine, request: OracleRequest, new: int, rejected: int) -> None:
    """Note what the device writes: tokens where they belong, and rejected drafts after them."""
    request.base = request.kept = request.count
    first = request.count - request.num_rejected
    request.count += new + rejected
    chain = request.chain(e.contents)
    span = Span(name=request.name, row=request.row, first=first, end=first + new, chain=chain)
    span.encoder = (request.encoder, request.num_encoder_tokens)
    span.lookahead = rejected
    e.spans.append(span)


def receive(e: Engine) -> None:
    """Hand in tokens that a request waits for, in order."""
    waiting = [each for each in e.known.values() if each.future or each.guesses]
    if not waiting:
        return
    request = e.rng.choice(waiting)
    most = num_plain(request)
    if most:
        handed = request.future[: e.rng.randint(1, most)]
        batch = handed[0][1] if len(handed) == 1 else None
        hand_in(e, request, [token for token, _ in handed], 0, batch)
    elif request.guesses[0].batch is not None:
        verdict = request.guesses.pop(0)
        tokens = [token for token, _ in request.future[: verdict.accepted + 1]]
        missing = verdict.accepted + 1 - len(tokens)  # a cancel may have cut into the drafts
        if missing > 0:
            tokens += draw_tokens(e, missing)
        e.shift(request, verdict.rejected)
        hand_in(e, request, tokens, verdict.rejected, verdict.batch)


def hand_in(
    e: Engine, request: OracleRequest, tokens: list[int], num_rejected: int, batch: int | None
) -> None:
    """Add tokens that a batch sampled; named or not, and not twice if it is."""
    options: dict[str, Any] = {"num_rejected": num_rejected} if num_rejected else {}
    named: dict[str, Any] = {"batch": batch} if batch is not None and e.rng.random() < 0.5 else {}
    e.call("add_tokens", request.name, tokens, **options, **named)
    request.add(tokens)
    del request.future[: len(tokens)]
    e.learn_keys(request)
    if named:
        again = e.call(
            "add_tokens", request.name, tokens, **named, allowed=(StaleOutput, InOpenBatch)
        )
        demand(again is not None, f"{request.name} takes output twice")
    check_filled(e, request, len(tokens))


def check_filled(e: Engine, request: OracleRequest, new: int) -> None:
    """Demand that the blocks which these new tokens fill can be hit."""
    if e.config.publish != "scheduled" or not e.config.enable_events or request.own is not None:
        return
    keys = e.learn_keys(request)
    e.hear()
    tables = e.manager.ask("get_block_ids", request.name)
    for at, group in enumerate(e.config.groups):
        first = (len(request.stuff) - new) // group.block_size
        last = min(request.count, len(request.stuff)) // group.block_size
        for position in range(first, min(last, len(keys[at]))):
            if group.kind != "cross_attention":
                null = e.config.null_block and tables[at][position] == 0
                found = keys[at][position] in e.router.found
                demand(null or found, f"{request.name}: filled block {position} cannot be hit")
