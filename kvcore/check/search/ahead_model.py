# SPDX-License-Identifier: Apache-2.0
"""Batches in flight whose output comes later: positions are scheduled before tokens are known.

The device is separate from the engine. It runs batches in order and keeps the text of each request:
a pass feeds from the tokens that the passes before it sampled, accepts any number of its drafts,
and samples one token more. So a pass that was planned behind drafts begins where the accepted ones
end. The engine hands in the output of a batch at any moment after it was executed, oldest first for
each request, alone or by an append that schedules the next position. Output must be taken unless
its request was cut or scheduled anew since, under no number but its batch's (OUTPUT-ONCE), and a
taken output must make the request's tokens equal to those that the device fed from. The slot of a
rejected draft is undefined; when all taken batches are run on a copy, so are the slots of all
positions that a pass may write and whose tokens are not known yet. With `max_in_flight=0` a batch
is done when it is executed. Twin: rust/src/check/search/ahead_model.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import attrs

from kvcore.check.names.in_flight import Node, Output, Pending, Unreported
from kvcore.check.search.actions import Children, continuations, known_children
from kvcore.check.search.core_model import Steps, follow
from kvcore.check.search.flight_model import NOTHING, Ending, FlightModel, Sampled, Texts, fills
from kvcore.check.search.moves import ahead_calls, grows
from kvcore.check.search.other_output import taken_instead
from kvcore.check.search.outputs import followed, gives, oldest, sampled_by, without
from kvcore.check.world.model import CheckedCall, Edge
from kvcore.check.world.world import Move
from kvcore.oracle.content_oracle import Pass
from kvcore.oracle.prefixes import Prefixes, in_epoch
from kvcore.oracle.schedule import Write
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended

Closing = list[CheckedCall]


@attrs.frozen
class DeviceTokens:
    """The tokens of a request on the device. known: whether the last is the newest sampled one."""

    tokens: tuple[int, ...]
    known: bool


class AheadModel(FlightModel):
    """The nodes of a world whose engine runs ahead of the output."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outputs: tuple[Output, ...] = ()
        self._texts: dict[str, DeviceTokens] = {}
        self._change: Callable[[Node], Node] = _pruned

    def _guarded(self, name: str, steps: Steps, make: Any) -> Iterator[Edge]:
        self._change = _pruned
        yield from super()._guarded(name, steps, make)

    def edges(self, node: Any) -> Iterator[Edge]:
        """Yield everything that can happen next, handing in output last."""
        self._outputs = node.outputs
        yield from super().edges(node)
        for output in oldest(node.outputs):
            if output.text:
                yield from self._guarded("output", (), partial(self._hand_in, node, output))
                if not node.filled and self._is_appended(node.state, output):
                    yield from self._guarded("append", (), partial(self._append, node, output))

    def check(self, node: Any) -> None:
        """Check a node as with batches in flight, except for tokens that are not sampled yet."""
        self._recall_texts(node)
        super().check(node)

    def _is_full(self, node: Node) -> bool:
        most = self.world.config.max_in_flight
        most_outputs = self.world.num_outputs
        full = super()._is_full(node) if most else len(node.waiting) >= most_outputs
        return full or len(node.outputs) >= most_outputs

    def _possible(self, state: State, path: Steps) -> list[Call | Move]:
        """Return the moves after a path; a token is the engine's own if none is to come."""
        outputs = self._outputs
        for step in path:
            outputs = followed(outputs, step)
        awaited = {each.request_id for each in outputs if not each.stale}
        found = [move for move in super()._possible(state, path) if not gives(move, awaited)]
        return [*found, *ahead_calls(self.world, state, awaited)]

    def _fill(self, node: Node, steps: Steps, full: bool, closing: Closing) -> Node:
        outputs = node.outputs
        for step in steps:
            outputs = followed(outputs, step)

        def change(after: Node) -> Node:
            if len(after.pending) == len(node.pending):
                return attrs.evolve(after, outputs=outputs)
            *before, batch = after.pending
            feeds = {name: node.texts[name] for name in fed_by_executed(batch, before, node.texts)}
            return attrs.evolve(
                after,
                pending=(*before, attrs.evolve(batch, feeds=feeds)),
                outputs=(*outputs, *sampled_by(batch)),
            )

        self._change = change
        return super()._fill(node, steps, full, closing)

    def _closed(self, node: Node, state: State, start: State | None = None) -> Node:
        """Close a node as with batches in flight, once the awaited output is known."""
        change, self._change = self._change, _pruned
        return super()._closed(_pruned(change(node)), state, start)

    def _endings(self, node: Node) -> Iterator[Ending]:
        """Yield the ways in which a batch can end: the load that fails, and the samples."""
        batch = node.waiting[0]
        children = None
        if self.symmetry.tokens:
            texts = [*node.texts.values(), *(each.text for each in node.outputs)]
            children = known_children(node.state, self.prefixes, texts)
        self._recall_texts(node, batch)
        awaited = {each.request_id for each in node.outputs if each.batch == batch.number}
        ways = [
            list(self._samples(batch.requests[write.request_id], write, children))
            if write.request_id in awaited
            else [()]
            for write in batch.writes
        ]
        for failing, _ in super()._endings(node):
            for sampled in product(*ways):
                yield failing, sampled

    def _samples(
        self, request: RequestState, write: Write, children: Children | None
    ) -> Iterator[Sampled]:
        """Yield what a pass can add to its request's text: accepted drafts, and one token."""
        text = self._text_of(request, write)
        first = write.start if write.start < len(request.tokens) else len(text.tokens) - 1
        num_drafts = first + write.end - write.start - len(text.tokens)
        left = self.world.num_tokens - len(text.tokens)
        if left <= 0:
            yield ()
        most = len(text.tokens) + min(num_drafts + 1, left)
        for longer in continuations(self.world, children, text.tokens, most):
            yield longer[len(text.tokens) :]

    def _execute(self, node: Node, ending: Ending, closing: Closing) -> Node:
        batch = node.waiting[0]
        self._recall_texts(node, batch)
        before = {name: text.tokens for name, text in self._texts.items()}
        self._change = partial(self._executed, batch, before, ending)
        return super()._execute(node, ending, closing)

    def _executed(self, batch: Pending, before: Texts, ending: Ending, node: Node) -> Node:
        """Return a node with the samples of a batch. before: the texts that it ran on."""
        outputs = []
        for output in node.outputs:
            if output.batch == batch.number:
                output = self._sampled(batch, output, ending)
            if output.batch != batch.number or output.num_new:
                outputs.append(output)
        texts = {name: text.tokens for name, text in self._texts.items() if text.known}
        pending = [
            attrs.evolve(each, texts=before, feeds={}) if each.number == batch.number else each
            for each in node.pending
            if self.world.config.max_in_flight or each.number != batch.number
        ]
        for name in texts.keys() & batch.requests.keys():
            feed_next(pending, batch.number, name, texts[name])
        return attrs.evolve(node, pending=tuple(pending), outputs=tuple(outputs), texts=texts)

    def _sampled(self, batch: Pending, output: Output, ending: Ending) -> Output:
        """Return the output of an executed batch for a request."""
        name = output.request_id
        (at,) = (at for at, write in enumerate(batch.writes) if write.request_id == name)
        write, sampled = batch.writes[at], ending[1][at]
        text = self._texts[name].tokens
        first = write.start
        if write.start >= len(batch.requests[name].tokens):
            first = len(text) - len(sampled) - 1
        rejected = max(0, first + write.end - write.start - (len(text) - 1))
        row, end = batch.requests[name].row, first + write.end - write.start - rejected
        spoilt = self._ghost.holds_spoilt(row, end - 1)
        return attrs.evolve(
            output, text=text, num_new=len(sampled), num_rejected=rejected, spoilt=spoilt
        )

    def _forward(
        self,
        requests: Mapping[str, RequestState],
        writes: Sequence[Write],
        sampled: Sequence[Sampled] = (),
        feeds: Texts = NOTHING,
    ) -> None:
        """Play the forward pass of a batch, given its requests' texts, and its samples."""
        for name, tokens in feeds.items():
            self._texts[name] = DeviceTokens(tokens, True)
        passes = []
        for at, write in enumerate(writes):
            request = requests[write.request_id]
            text = self._text_of(request, write)
            added = sampled[at] if sampled else ()
            passes.append(pass_of(self.prefixes, request, write, text, added))
            if write.end >= len(request.tokens):
                self._texts[write.request_id] = DeviceTokens((*text.tokens, *added), len(added) > 0)
        self.checker.run_check(self._ghost.forward, passes)

    def _text_of(self, request: RequestState, write: Write) -> DeviceTokens:
        """Return the text that a pass feeds from: the engine's tokens, or the device's."""
        tokens = tuple(request.tokens)
        if write.start < len(tokens):
            return DeviceTokens(tokens, True)
        return self._texts.get(write.request_id, DeviceTokens(tokens, False))

    def _recall_texts(self, node: Node, batch: Pending | None = None) -> None:
        """Record the texts on the device, if a batch is to run; their requests may have left."""
        feeds = {} if batch is None else batch.feeds
        texts = {**dict(node.texts), **dict(feeds)}
        self._texts = {name: DeviceTokens(tokens, True) for name, tokens in texts.items()}

    def _cancel(self, node: Node, number: int, closing: Closing) -> Node:
        texts = node.texts
        for batch in reversed(node.pending):
            if batch.number >= number and batch.executed:
                texts = batch.texts
        kept = tuple(each for each in node.outputs if each.batch < number)
        self._change = partial(attrs.evolve, outputs=kept, texts=texts)
        return super()._cancel(node, number, closing)

    def _report_load(self, node: Node, failure: Unreported, name: str, closing: Closing) -> Node:
        def change(after: Node) -> Node:
            fell = closing[-1].outcome.value
            outputs = tuple(
                attrs.evolve(each, stale=each.stale or is_made_stale(each, fell))
                for each in after.outputs
            )
            return attrs.evolve(after, outputs=outputs)

        def is_made_stale(output: Output, fell: Sequence[str]) -> bool:
            """Return whether the report makes an output stale."""
            after = closing[-1].outcome.state.requests[output.request_id]
            reached = after.output_from != node.state.requests[output.request_id].output_from
            left = reached and not after.num_computed
            return output.spoilt or output.request_id in (name, *fell) or left

        self._change = change
        return super()._report_load(node, failure, name, closing)

    def _hand_in(self, node: Node, output: Output, closing: Closing) -> Node:
        """Hand in the output of a batch for a request. Raises InvariantViolation (OUTPUT-ONCE)."""
        start, schedule, name = node.state, self._schedule_at(node), output.request_id
        before = start.requests[name]
        tokens = list(output.text[len(output.text) - output.num_new :])
        options = {"num_rejected": output.num_rejected, "batch": output.batch}
        after = self._call(start, Call("add_tokens", (name, tokens), options), closing)
        self._check_taken(output, closing[-1])
        refused = isinstance(closing[-1].outcome.value, Misuse)
        for other in () if refused else taken_instead(start, output, node.outputs):
            self._complain(f"output of batch {output.batch} is taken as that of {other}")
        pending = node.pending
        if not refused:
            follow(schedule, closing[-1])
            self.checker.run_check(schedule.check, after)
            count = min(output.num_rejected, before.num_output_placeholders)
            pending = tuple(
                _begun_earlier(batch, name, len(before.tokens), count) for batch in pending
            )
        is_made_stale = attrs.evolve(
            node,
            before=schedule.scheduled(),
            writes=schedule.writes(),
            filled=node.filled or fills(start, after),
            pending=pending,
            outputs=followed(without(node.outputs, output), closing[-1]),
        )
        return self._closed(is_made_stale, after, start)

    def _is_appended(self, state: State, output: Output) -> bool:
        """Return whether an engine can hand in an output by an append."""
        one = output.num_new == 1 and not output.num_rejected
        return one and grows(self.world, state, state.requests[output.request_id])

    def _append(self, node: Node, output: Output, closing: Closing) -> Node:
        """Hand in the output of a batch by an append, which schedules the position behind it, too.
        Raises InvariantViolation (OUTPUT-ONCE).
        """
        args = ([output.request_id], [output.text[-1]])
        self._call(node.state, Call("append", args, {"batch": output.batch}), closing)
        value = closing[-1].outcome.value
        self._check_taken(output, closing[-1])
        if isinstance(value, Misuse) or value.done:
            node = _pruned(attrs.evolve(node, outputs=without(node.outputs, output)))
        return self._fill(node, (closing[-1],), self._is_full(node), closing)

    def _check_taken(self, output: Output, step: CheckedCall) -> None:
        """Raise InvariantViolation (OUTPUT-ONCE) unless a step took an output, or refused a stale
        one.
        """
        name, value = output.request_id, step.outcome.value
        refused = isinstance(value, Misuse)
        self.notes["goal", "stale output"] += refused
        if refused != output.stale:
            self._complain(f"output of batch {output.batch} for {name!r} gives {value}")
        taken = not refused and not (isinstance(value, Appended) and not value.done)
        if taken and tuple(step.outcome.state.requests[name].tokens) != output.text:
            self._complain(f"{name!r} has other tokens than the device fed from")

    def _complain(self, detail: str) -> None:
        if self.checker.counts("OUTPUT-ONCE"):
            raise InvariantViolation("OUTPUT-ONCE", detail)


def fed_by_executed(batch: Pending, before: Sequence[Pending], texts: Texts) -> Iterator[str]:
    """Yield the requests of a batch that feed from the device after an executed batch."""
    waiting = [each for each in before if not each.executed]
    for write in batch.writes:
        name = write.request_id
        ahead = write.start >= len(batch.requests[name].tokens) and name in texts
        if ahead and not any(name in each.requests for each in waiting):
            yield name


def feed_next(pending: list[Pending], number: int, name: str, text: tuple[int, ...]) -> None:
    """Let the next batch of a request feed from its text, if it feeds from the device."""
    for at, batch in enumerate(pending):
        if batch.number > number and name in batch.requests:
            (write,) = (each for each in batch.writes if each.request_id == name)
            if write.start >= len(batch.requests[name].tokens):
                pending[at] = attrs.evolve(batch, feeds={**batch.feeds, name: text})
            return


def pass_of(
    prefixes: Prefixes, request: RequestState, write: Write, text: DeviceTokens, sampled: Sampled
) -> Pass:
    """Return the pass of a write on the device; drafts that were not accepted are undefined."""
    known, slots = len(text.tokens), write.num_slots - write.end
    start, loaded, stop = write.start, write.loaded, write.end
    ahead = write.start >= len(request.tokens)
    if ahead:
        start = loaded = known - 1 if text.known else known
        stop = start + write.end - write.start if text.known else write.end
    end = min(stop, known) + max(0, len(sampled) - 1)
    letters = in_epoch(tuple((token,) for token in (*text.tokens, *sampled)), request.epoch)
    return Pass(
        request_id=write.request_id,
        row=request.row,
        start=start,
        loaded=loaded,
        end=end,
        num_slots=stop + slots,
        nodes=prefixes.number(letters)[request.epoch > 0 :],
        failed=write.failed,
        num_rejected=stop - end,
        ahead=ahead,
    )


def _begun_earlier(batch: Pending, name: str, known: int, count: int) -> Pending:
    """Return a batch with its first position of a request moved for rejected drafts."""
    before = batch.before.get(name, 0)
    if not count or before <= known:
        return batch
    return attrs.evolve(batch, before={**batch.before, name: before - count})


def _pruned(node: Node) -> Node:
    """Return the node without the texts that no batch feeds from."""
    fed = {each.request_id for each in node.outputs}
    texts = {name: text for name, text in node.texts.items() if name in fed}
    return attrs.evolve(node, texts=texts)
