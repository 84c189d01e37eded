# SPDX-License-Identifier: Apache-2.0
"""The moves of an engine that runs ahead: it schedules positions before their tokens are known.

The tokens that the device will sample, and its verdicts on drafts, are arguments of the move that
schedules their positions. So the device writes the true tokens where they belong, behind accepted
drafts, while the manager counts rejected ones until it is told. Output is handed in once the batch
that sampled it was executed; then it must be accepted (OUTPUT-ONCE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.check.simulate.play import Play
from kvcore.check.simulate.prefixes import Guess, SimulatedRequest
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended, Refused, Status


def ahead(play: Play, names: Sequence[str], tokens: Sequence[int], follow: bool) -> Any:
    """Give requests a slot for a token to come each; tokens: what the device will sample there.

    follow: hand in the token to come before that in the same call.
    """
    pairs = [
        (name, token)
        for name, token in zip(names, tokens, strict=True)
        if can_run_ahead(play, name) and (not follow or num_plain(play, name))
    ]
    if not pairs:
        return None
    some = [play.known[name] for name, _ in pairs]
    if follow:
        value = play.call("append", [each.name for each in some], [e.future[0][0] for e in some])
    else:
        value = play.call("append", [each.name for each in some])
    if isinstance(value, Misuse):
        raise InvariantViolation("OUTPUT-ONCE", f"{play.calls[-1]} gives {value}")
    if isinstance(value, Appended):
        for known, (_, token) in list(zip(some, pairs, strict=True))[: value.done]:
            if follow:
                play.prefixes.grow(known, [known.future.pop(0)[0]])
            known.future.append((token, known.sampler))
            _schedule(play, known, 1, 0)
        play.goals["token to come"] += value.done
    return value


def foresee(play: Play, name: str, tokens: Sequence[int], num_rejected: int) -> Any:
    """Give a request slots for a token to come, accepted drafts after it, and rejected ones."""
    count = len(tokens) + num_rejected
    if count < 2 or play.config.has_states or not can_run_ahead(play, name):
        return None
    known = play.known[name]
    value = play.call("allocate_slots", name, count, num_output_placeholders=count)
    if isinstance(value, Misuse | Refused):
        return value
    known.future.append((tokens[0], known.sampler))
    known.guesses.append(
        Guess(len(known.tokens) + len(known.future), len(tokens) - 1, num_rejected)
    )
    known.future += [(token, None) for token in tokens[1:]]
    _schedule(play, known, len(tokens), num_rejected)
    play.goals["drafts to come"] += 1
    return value


def foresee_draft(play: Play, name: str, draft: int, right: bool) -> Any:
    """Give a request beside states slots for its last known tokens and for a draft to come behind
    them. right: whether the draft will be accepted.
    """
    if not can_foresee_draft(play, name):
        return None
    known, count = play.known[name], play.left(name) + 1
    value = play.call("allocate_slots", name, count, num_output_placeholders=1)
    if isinstance(value, Misuse | Refused):
        return value
    known.future.append((draft, None))
    known.guesses.append(Guess(len(known.tokens), 1, 0, wrong=not right))
    _schedule(play, known, count, 0)
    play.goals["draft to come beside states"] += 1
    return value


def receive(play: Play, name: str, more: int, named: bool) -> Any:
    """Hand in the oldest output of a request whose batch was executed: one token, or the verdict on
    drafts with one token more. more: that token, if no position was scheduled for it. named:
    whether the batch is named.
    """
    known = play.known.get(name)
    if known is None or play.status(name) is not Status.RUNNING:
        return None
    if num_plain(play, name):
        token, sampler = known.future[0]
        tokens, rejected = [token], 0
    elif known.guesses:
        guess = known.guesses[0]
        sampler, rejected = guess.batch, guess.rejected
        tokens = [token for token, _ in known.future[: guess.accepted + 1]]
        tokens += [more] * (guess.accepted + 1 - len(tokens))
        if guess.wrong:
            tokens, rejected = [tokens[0] + 1], 1
        if sampler is None:
            return None
    else:
        return None
    if any(each.request_id == name for each in play.passes) and sampler is None:
        return None
    if sampler is not None and not play.has_run(sampler):
        return None
    options: dict[str, Any] = {"num_rejected": rejected} if rejected else {}
    if named and sampler is not None:
        options["batch"] = sampler
    count = play.manager.num_computed_tokens(name) - rejected
    anew = play.config.has_states and rejected > 0
    value = (play.careful if anew else play.call)("add_tokens", name, tokens, **options)
    if isinstance(value, Misuse):
        if anew and value.error == "HitInOpenBatch":
            return value
        raise InvariantViolation("OUTPUT-ONCE", f"{play.calls[-1]} gives {value}")
    if known.guesses and not num_plain(play, name):
        known.guesses.pop(0)
    play.prefixes.grow(known, tokens)
    if anew:
        later = [each for each in known.future if each[1] not in (None, sampler)]
        play.leave([name])
        known.dropped, count = later[0] if later else None, 0
        play.goals["begun anew"] += 1
    del known.future[: len(tokens)]
    _check_taken(play, known, count)
    if "batch" in options:
        again = play.careful("add_tokens", name, tokens, batch=sampler)
        if not isinstance(again, Misuse):
            raise InvariantViolation("OUTPUT-ONCE", f"{name!r} takes {play.calls[-1]} twice")
    play.goals["output taken"] += 1
    return value


def repeat(play: Play, name: str) -> Any:
    """Hand in output from before a cut or from behind a rejected draft, which must be refused."""
    known = play.known.get(name)
    if known is None or known.dropped is None:
        return None
    token, sampler = known.dropped
    known.dropped = None
    value = play.careful("add_tokens", name, [token], batch=sampler)
    if not isinstance(value, Misuse):
        raise InvariantViolation("OUTPUT-ONCE", f"{name!r} takes output that is none of its own")
    return value


def can_run_ahead(play: Play, name: str) -> bool:
    """Return whether a request can get a slot for a token to come: its last known position, or the
    last one to come, was scheduled in a batch before.
    """
    known = play.known.get(name)
    if known is None or play.status(name) is not Status.RUNNING or play.loading(name):
        return False
    count = play.manager.num_computed_tokens(name)
    caught_up = count == len(known.tokens) + len(known.future) + known.num_rejected
    is_open = any(each.request_id == name for each in play.passes)
    room = count + 4 < play.config.length_limit
    return caught_up and room and not (known.drafts or is_open) and known.sampler is not None


def can_foresee_draft(play: Play, name: str) -> bool:
    """Return whether a request beside states has known tokens to compute and none to come."""
    known = play.known.get(name)
    if known is None or play.status(name) is not Status.RUNNING or play.loading(name):
        return False
    count, waits = play.manager.num_computed_tokens(name), known.drafts or known.future
    room = len(known.tokens) + 4 < play.config.length_limit
    return 0 < count < len(known.tokens) and room and play.config.has_states and not waits


def num_plain(play: Play, name: str) -> int:
    """Count the tokens to come of a request before its next drafts to come."""
    known = play.known[name]
    if not known.guesses:
        return len(known.future)
    return min(len(known.future), known.guesses[0].offset - len(known.tokens))


def _schedule(play: Play, known: SimulatedRequest, new: int, rejected: int) -> None:
    """Note the pass over the newest positions to come, which stand behind accepted drafts."""
    end = len(known.tokens) + len(known.future)
    play.schedule(known, end - new, end - new, end, end + rejected)


def _check_taken(play: Play, known: SimulatedRequest, count: int) -> None:
    """Check that the manager has the tokens, and counts all positions but rejected ones."""
    num_tokens = play.manager.num_tokens(known.name)
    computed = play.manager.num_computed_tokens(known.name)
    if (num_tokens, computed) != (len(known.tokens), count):
        detail = f"{known.name!r} has {num_tokens} tokens and counts {computed}, not {count}"
        raise InvariantViolation("COMPUTED-RULE", detail)
