# SPDX-License-Identifier: Apache-2.0
"""Moves on requests: they come, are looked up, scheduled, guessed ahead, forked, cut and freed."""

from __future__ import annotations

from array import array
from typing import Any

from kvcore import Appended, Hit, Refused, Request, Verdict
from kvcore.types.errors import HitInOpenBatch, StaleHits, WrongHit
from tests.oracle.device import Span
from tests.oracle.engine import Engine, FailedLoad
from tests.oracle.finding import demand
from tests.oracle.requests import NUM_TOKEN_IDS, OracleRequest, draw_request

REQUESTS_MAX = 6


def add(e: Engine) -> None:
    """Add a request."""
    if len(e.known) >= REQUESTS_MAX:
        return
    e.num_named += 1
    size, caching = e.hash_size, e.config.enable_caching
    name = f"r{e.num_named}"
    request, known = draw_request(e.rng, name, e.contents, e.families, caching, size)
    if any(group.kind == "cross_attention" for group in e.config.groups):
        known.encoder, known.num_encoder_tokens = e.rng.randint(1, 4), e.rng.randint(0, 6)
    known.row = e.call("add_request", request)
    rows = {each.row for each in e.known.values()}
    demand(known.row not in rows, f"{name} is given the row of another request")
    e.known[name] = known
    e.learn_keys(known)


def extend(e: Engine) -> None:
    """Add tokens, or the engine's hashes."""
    requests = [each for each in e.known.values() if not each.drafts and not each.num_to_come]
    if requests:
        request = e.rng.choice(requests)
        if e.rng.random() < 0.6:
            tokens = draw_tokens(e, e.rng.randint(1, 4))
            e.call("add_tokens", request.name, tokens)
            request.add(tokens)
        e.add_hashes(request)
        e.learn_keys(request)


def admit(e: Engine) -> None:
    """Look up a request without blocks and schedule it."""
    requests = e.idle(running=False)
    if not requests:
        return
    request = e.rng.choice(requests)
    found_hit = look_up(e, request)
    hit = None if e.rng.random() < 0.1 else found_hit
    found = 0 if hit is None else hit.num_tokens
    room = max(0, min(len(request.stuff), e.limit) - found)
    external = e.rng.randint(0, room) if e.rng.random() < 0.25 else 0
    room -= external
    new = min(e.most, e.rng.randint(0, room)) if external else min(e.most, room)
    if e.rng.random() < 0.5:
        new = e.rng.randint(0, new)
    if new + external:
        schedule(e, request, new, hit, external)


def look_up(e: Engine, request: OracleRequest) -> Hit:
    """Look up a request's hit, and check its length by the events."""
    keys = e.learn_keys(request)
    hit: Hit = e.call("get_computed_blocks", request.name)
    want = 0
    if e.config.enable_events:
        e.hear()
        want = e.router.longest(keys, len(request.stuff))
        want = 0 if request.skips or not e.config.enable_caching else want
        wrong = f"{request.name} hits {hit.num_tokens} tokens, by the events it is {want}"
        demand(hit.num_tokens == want, wrong)
    return hit


def grow(e: Engine) -> None:
    """Allocate slots for the next tokens and drafts of a request with blocks."""
    requests = [
        each
        for each in e.idle(running=True)
        if each.count < min(e.limit, len(each.stuff) + len(each.drafts))
    ]
    if requests:
        request = e.rng.choice(requests)
        most = min(e.limit, len(request.stuff) + len(request.drafts)) - request.count
        schedule(e, request, e.rng.randint(1, min(most, e.most)), None, 0)


def schedule(e: Engine, request: OracleRequest, new: int, hit: Hit | None, external: int) -> None:
    """Allocate slots, and note what the batch will fill."""
    rng, name = e.rng, request.name
    options: dict[str, Any] = {}
    if external:
        options["num_external_computed_tokens"] = external
    delayed = rng.random() < (0.4 if external else 0.08)
    if delayed:
        options["delay_cache_blocks"] = True
    late = bool(external and delayed and not new and not request.num_encoder_tokens)
    lookahead = rng.randint(1, 4) if rng.random() < 0.15 else 0
    if lookahead:
        options["num_lookahead_tokens"] = lookahead
    fresh = request.count == 0 and request.num_encoder_tokens > 0
    if fresh:
        options["num_encoder_tokens"] = request.num_encoder_tokens
    if rng.random() < 0.1:
        options["full_sequence_must_fit"] = True
    if rng.random() < 0.1:
        options["reserved_blocks"] = rng.randint(1, 3)
    verdict = None
    if rng.random() < 0.15:
        verdict = e.call("can_allocate", name, new, hit, **options)
    before = e.before()
    got = e.call("allocate_slots", name, new, hit, **options)
    said = Verdict(got.reason.value) if isinstance(got, Refused) else Verdict.OK
    demand(verdict in (None, said), f"can_allocate says {verdict}, allocate_slots {said}")
    if isinstance(got, Refused):
        e.refused(got, before, name)
        if rng.random() < 0.3:
            free(e)
        return
    note_scheduled(e, request, new, hit, external, late, lookahead, fresh)
    if e.config.publish == "scheduled" and not delayed and e.config.enable_events:
        check_published(e, request, new)


def note_scheduled(
    e: Engine,
    request: OracleRequest,
    new: int,
    hit: Hit | None,
    external: int,
    late: bool,
    lookahead: int,
    fresh: bool,
) -> None:
    """Note what an allocation scheduled; late: the external tokens come in the background."""
    chain = request.chain(e.contents)
    if request.base is None:
        request.base, request.kept = request.count, max(request.count, 1)
    if hit is not None:
        e.note_hit(request)
    first = request.count + (0 if hit is None else hit.num_tokens)
    end = first + external
    if end > request.count or fresh:
        request.kept = end + (fresh and new > 0)
    request.count = end + new
    if late:
        request.transfer = (first, end, -1)
    encoder = (request.encoder, request.num_encoder_tokens)
    if external and not late:
        span = Span(name=request.name, row=request.row, first=first, end=end, chain=chain)
        span.loaded = True
        if e.rng.random() < 0.4:
            e.num_loads += 1
            kept = e.rng.randint(first, end - 1)
            span.fails = (e.num_loads, kept)
            e.failing[e.num_loads] = FailedLoad(request.name, span, kept)
        e.spans.append(span)
    if not late:
        span = Span(name=request.name, row=request.row, first=end, end=end + new, chain=chain)
        span.encoder, span.new_encoder, span.lookahead = encoder, fresh, lookahead
        e.spans.append(span)


def check_published(e: Engine, request: OracleRequest, new: int) -> None:
    """Demand that the blocks which these new tokens fill can be hit."""
    if e.rng.random() < 0.3 and e.config.enable_caching:
        keys = e.learn_keys(request)
        e.hear()
        tables = e.manager.ask("get_block_ids", request.name)
        end = min(request.count, len(request.stuff))
        for at, group in enumerate(e.config.groups):
            first, last = (request.count - new) // group.block_size, end // group.block_size
            for position in range(first, min(last, len(keys[at]))):
                null = e.config.null_block and tables[at][position] == 0
                found = keys[at][position] in e.router.found
                demand(null or found, f"{request.name}: full block {position} cannot be hit")


def append(e: Engine) -> None:
    """Make a decode step of some requests, by ids or by rows."""
    able = [each for each in e.idle() if not each.drafts and each.count < e.limit]
    able = [each for each in able if each.count == len(each.stuff) and each.base is None]
    chosen = e.rng.sample(able, e.rng.randint(1, len(able))) if able else []
    if not chosen:
        return
    tokens = draw_tokens(e, len(chosen))
    names: Any = [each.name for each in chosen]
    if e.rng.random() < 0.4:
        names = array("i", [each.row for each in chosen])
    before = e.before()
    appended: Appended = e.call("append", names, tokens)
    wrong = f"{appended!r} of {len(chosen)} requests"
    demand((appended.done < len(chosen)) == (appended.refused is not None), wrong)
    for request, token in list(zip(chosen, tokens, strict=True))[: appended.done]:
        request.add([token])
        note_scheduled(e, request, 1, None, 0, False, 0, False)
    if appended.refused is not None:
        at = before if appended.done == 0 else b""
        e.refused(appended.refused, at, chosen[appended.done].name)


def draft(e: Engine) -> None:
    """Give a request drafts."""
    requests = [each for each in e.idle() if not each.num_to_come]
    if requests:
        request = e.rng.choice(requests)
        request.drafts = draw_tokens(e, e.rng.randint(0, 4))
        e.call("add_drafts", request.name, request.drafts)


def accept(e: Engine) -> None:
    """Accept the first scheduled drafts, and drop the others."""
    requests = [
        each
        for each in e.known.values()
        if each.drafts and not each.swapped and (each.is_settled or each.base is None)
    ]
    if requests:
        request = e.rng.choice(requests)
        count = e.rng.randint(0, max(0, request.count - len(request.stuff)))
        e.call("accept", request.name, count)
        request.add(request.drafts[:count])
        request.drafts = []
        request.count = min(request.count, len(request.stuff))
        e.learn_keys(request)


def cache(e: Engine) -> None:
    """Publish blocks whose caching was delayed."""
    requests = e.idle()
    if requests:
        request = e.rng.choice(requests)
        e.call("cache_blocks", request.name, e.rng.randint(0, request.count))


def fork(e: Engine) -> None:
    """Fork a child that shares a request's computed blocks."""
    requests = e.idle()
    if requests and len(e.known) < REQUESTS_MAX:
        fork_of(e, e.rng.choice(requests))


def fork_of(e: Engine, parent: OracleRequest) -> OracleRequest:
    """Return the child of a request."""
    e.num_named += 1
    name = f"r{e.num_named}"
    tables = e.manager.ask("get_block_ids", parent.name)
    row = e.call("fork", parent.name, name)
    count = parent.settled_count()
    child = OracleRequest(name=name, row=row, stuff=list(parent.stuff), own=parent.own)
    child.count = 0 if e.is_gone(count, tables) else count
    child.embedded, child.marked, child.skips = parent.embedded, parent.marked, parent.skips
    child.encoder, child.num_encoder_tokens = parent.encoder, parent.num_encoder_tokens
    e.known[name] = child
    for load in e.failing.values():
        if parent.name in load.holding:
            load.note(name, min(load.reporters[parent.name], child.count))
    return child


def free(e: Engine) -> None:
    """Free a request's blocks, whatever it waits for."""
    if e.known:
        e.free(e.rng.choice(list(e.known.values())))


def remove(e: Engine) -> None:
    """Remove a request without blocks."""
    requests = [each for each in e.known.values() if not each.count and not each.swapped]
    if requests:
        remove_request(e, e.rng.choice(requests))


def remove_request(e: Engine, request: OracleRequest) -> None:
    """Remove a request, if it is certain for each failed load which requests can report it then.

    If no request is left that may, nothing rests on the load any more.
    """
    e.note_reporters()
    left = e.known.keys() - {request.name}
    gone = [number for number, load in e.failing.items() if not load.perhaps & left]
    for number, load in e.failing.items():
        if number not in gone and not e.can_report(load, but=request.name):
            return
    e.call("remove_request", request.name)
    del e.known[request.name]
    for number in gone:
        del e.failing[number]
    e.reported |= set(gone)


def truncate(e: Engine) -> None:
    """Keep a request's first tokens."""
    requests = e.idle(settled=False)
    if requests:
        request = e.rng.choice(requests)
        keep = e.rng.randint(1, len(request.stuff))
        if e.leave("truncate", [request], request.name, keep, count=keep):
            request.cut(keep, e.hash_size)
            e.learn_keys(request)


def unschedule(e: Engine) -> None:
    """Let the open batch compute less of a request."""
    requests = [
        each
        for each in e.idle()
        if each.base is not None and each.kept < each.count and not each.drafts + each.guesses
    ]
    if not requests:
        return
    request = e.rng.choice(requests)
    count = e.rng.randint(request.kept, request.count - 1)
    said = e.call("unschedule", request.name, count, allowed=(HitInOpenBatch,))
    if said is not None:
        others = [e.known[each] for each in said.fields["requests"]]
        wrong = [each for each in others if each.base is None or each is request]
        demand(bool(others) and not wrong, f"{said!r} names the wrong requests")
        return
    mine = [span for span in e.spans if span.name == request.name and not span.loaded]
    for span in mine:
        span.end, span.lookahead = min(span.end, count), 0
    gone = [span for span in mine if span.first >= span.end and not span.new_encoder]
    e.spans = [span for span in e.spans if span not in gone]
    del request.future[max(0, count - len(request.stuff)) :]
    request.count = count
    request.base = None if count == request.base else request.base


def rewind(e: Engine) -> None:
    """Rewind a request's count, by an ordinary cut."""
    requests = e.idle(running=True, settled=False)
    if requests:
        request = e.rng.choice(requests)
        count = e.rng.randint(0, request.count)
        e.take_back(request, count)


def trim(e: Engine) -> None:
    """Give back blocks that no later query sees."""
    requests = e.idle(settled=False)
    if requests:
        request = e.rng.choice(requests)
        most = min(request.count, len(request.stuff))
        e.call("remove_skipped_blocks", request.name, e.rng.randint(0, most))


def stale_hit(e: Engine) -> None:
    """Use a hit after another request was scheduled."""
    requests = e.idle(running=False)
    if len(requests) >= 2 and e.config.enable_caching:
        request = e.rng.choice(requests)
        hit = look_up(e, request)
        for _ in range(3):
            admit(e)
        if request.count == 0 and hit.num_tokens < min(e.limit, len(request.stuff)):
            new = min(e.most, e.limit - hit.num_tokens, len(request.stuff) - hit.num_tokens)
            fresh = request.num_encoder_tokens > 0
            name = request.name
            got = e.call("allocate_slots", name, new, hit, allowed=(StaleHits, WrongHit))
            if not isinstance(got, Refused | StaleHits | WrongHit):
                note_scheduled(e, request, new, hit, 0, False, 0, fresh)


def chase(e: Engine) -> None:
    """Let a request hit what another is about to compute, which then perhaps leaves the batch."""
    leaders = [each for each in e.idle() if each.base is not None and not each.num_encoder_tokens]
    leaders = [each for each in leaders if all(len(stuff) == 1 for stuff in each.stuff)]
    if leaders and len(e.known) < REQUESTS_MAX:
        leader = e.rng.choice(leaders)
        tokens = [stuff[0] for stuff in leader.stuff]
        e.num_named += 1
        chaser = OracleRequest(name=f"r{e.num_named}", row=-1, stuff=list(leader.stuff))
        chaser.row = e.call("add_request", Request(chaser.name, tokens))
        e.known[chaser.name] = chaser
        hit = look_up(e, chaser)
        room = min(e.limit, len(tokens), e.most + hit.num_tokens) - hit.num_tokens
        if room > 0:
            schedule(e, chaser, e.rng.randint(1, room), hit, 0)
        if e.rng.random() < 0.5 and leader.name in e.known:
            e.free(leader)


def draw_tokens(e: Engine, count: int) -> list[int]:
    """Return some tokens."""
    return [e.rng.randrange(NUM_TOKEN_IDS) for _ in range(count)]
