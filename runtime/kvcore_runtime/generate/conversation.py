# SPDX-License-Identifier: Apache-2.0
"""Holds conversations with an engine, turn by turn, each turn after the real answer to the last.

All prompts begin at once; the next turn of a conversation starts as soon as the last answer is
complete, so its prompt begins with blocks that the previous turn left in the cache.
"""

from collections.abc import Callable, Sequence

import attrs

from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.errors import NeverFits
from kvcore_runtime.engine.sequence import Completion, GenerationRequest
from kvcore_runtime.generate.prompts import Prompt
from kvcore_runtime.model.sampling import cut_at_stop
from kvcore_runtime.model.tokenizer import Tokenizer

NO_ANSWER = "(no answer)"
"""Stands in the history for an answer without text."""


@attrs.frozen(kw_only=True, eq=False)
class Answer:
    """One answer to one turn of a prompt. turn and sample count from 0."""

    prompt: Prompt
    turn: int
    request: GenerationRequest
    completion: Completion
    text: str


@attrs.frozen(kw_only=True)
class RefusedTurn:
    """A turn that can never be answered; it ends the conversation."""

    request_id: str
    reason: str


@attrs.define(kw_only=True)
class Held:
    """The results of all conversations: answers in the order they were finished.

    interrupted: whether a KeyboardInterrupt came before all were complete.
    """

    answers: list[Answer] = attrs.field(factory=list)
    refusals: list[RefusedTurn] = attrs.field(factory=list)
    interrupted: bool = False


@attrs.define(kw_only=True, eq=False)
class _Turn:
    """An unfinished turn, and the answers to earlier turns."""

    prompt: Prompt
    history: list[str]
    request: GenerationRequest
    answers: list[Answer] = attrs.field(factory=list)


def hold_conversations(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    after_step: Callable[[Held], None] | None = None,
) -> Held:
    """Send all prompts and collect all answers.

    A turn that does not fit is refused by name, and the rest goes on. A KeyboardInterrupt ends it,
    and the result contains what was done; the engine must not be used afterwards. after_step:
    called with the results so far.
    """
    held = Held()
    turns: dict[str, _Turn] = {}

    def ask(prompt: Prompt, history: list[str]) -> None:
        turn = _make_turn(prompt, history, tokenizer)
        try:
            engine.add_request(turn.request)
        except NeverFits as error:
            held.refusals.append(RefusedTurn(request_id=turn.request.request_id, reason=str(error)))
        else:
            turns[turn.request.request_id] = turn

    def hear(completion: Completion) -> None:
        turn = turns[completion.request_id]
        answer = _make_answer(turn, completion, tokenizer)
        held.answers.append(answer)
        turn.answers.append(answer)
        if len(turn.answers) < turn.prompt.num_samples:
            return
        del turns[completion.request_id]
        history = [*turn.history, answer.text.strip() or NO_ANSWER]
        if len(history) < len(turn.prompt.turns):
            ask(turn.prompt, history)

    try:
        for prompt in prompts:
            ask(prompt, [])
        while not engine.is_idle:
            for completion in engine.step():
                hear(completion)
            if after_step is not None:
                after_step(held)
    except KeyboardInterrupt:
        held.interrupted = True
    return held


def _make_turn(prompt: Prompt, history: list[str], tokenizer: Tokenizer) -> _Turn:
    single = len(prompt.turns) == 1
    request = GenerationRequest(
        request_id=prompt.prompt_id if single else f"{prompt.prompt_id}/{len(history) + 1}",
        prompt=tuple(tokenizer.encode_chat(prompt.messages(history))),
        sampling=attrs.evolve(prompt.sampling, end_ids=tokenizer.end_ids),
        num_samples=prompt.num_samples,
    )
    return _Turn(prompt=prompt, history=history, request=request)


def _make_answer(turn: _Turn, completion: Completion, tokenizer: Tokenizer) -> Answer:
    text = tokenizer.decode(completion.tokens)
    return Answer(
        prompt=turn.prompt,
        turn=len(turn.history),
        request=turn.request,
        completion=completion,
        text=cut_at_stop(turn.request.sampling, text),
    )
