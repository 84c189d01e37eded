# SPDX-License-Identifier: Apache-2.0
"""`kvcore generate`: answers a file of prompts from a pool of blocks, and verifies the answers.

All input is read and checked before the model is loaded, and before anything is written. Exit
codes: 0 success; 1 an answer was not verified, or a prompt never fits; 2 bad arguments or input; 3
all answers are right, but something that --require-all demands did not happen; 130 interrupted. An
answer is shown as soon as it is complete, before it is verified; JSON is written at the end. If
interrupted, it reports what was done, without verification. Progress goes to stderr if that is a
terminal, results to stdout.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from kvcore import InvariantViolation, KvcoreError
from kvcore.cli.pipes import INTERRUPTED, ends_cleanly
from kvcore.far.options import FarOptions
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.errors import ExecutorDied, ExecutorNotStarted
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.generate.arguments import Arguments, read_arguments
from kvcore_runtime.generate.conversation import Held, hold_conversations
from kvcore_runtime.generate.picture import draw_pool
from kvcore_runtime.generate.pool_record import PoolRecord
from kvcore_runtime.generate.report import (
    as_json,
    format_answer,
    format_count,
    format_refusal,
    format_table,
    summarise,
)
from kvcore_runtime.generate.verify import (
    NotExercised,
    NotVerified,
    verify_answers,
    verify_drained,
    verify_pressure,
)
from kvcore_runtime.model.identity import identify
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from kvcore_runtime.model.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from kvcore_runtime.model.weights import find_smollm2, load_llama, open_gguf

DIRECTORY_SEED = "kvcore generate --directory"
"""Together with the model's identity the root of all keys in files, the same in every run."""
DISK_S = 30.0
"""Generous, since a disk does answer, and a slow one must not change the run of a command."""


@ends_cleanly
def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        arguments = read_arguments(argv)
        model, tokenizer = load_model(arguments)
        engine, record = make_engine(arguments, model, tokenizer)
    except (KvcoreError, KvcoreRuntimeError) as error:
        print(f"kvcore generate: {error}", file=sys.stderr)
        return 2
    try:
        held = run(arguments, engine, tokenizer)
    except (ExecutorDied, ExecutorNotStarted) as error:
        print(f"kvcore generate: {error}", file=sys.stderr)
        return 2
    summary = summarise(engine, held)
    if not arguments.as_json:
        for refusal in held.refusals:
            print(f"{format_refusal(refusal)}\n")
        print(f"{format_table(summary)}\n", flush=True)
    proof = prove(arguments, engine, held, tokenizer)
    if arguments.as_json:
        result = as_json(summary, held, proof.as_json(), proof.not_exercised)
        print(json.dumps(result, ensure_ascii=False, indent=1), flush=True)
    if arguments.picture is not None and record is not None:
        draw(arguments, record, summary)
    if not arguments.as_json and proof.counts and proof.failure is None:
        counts = (format_count(count, name) for name, count in proof.counts.items())
        print(f"verified: {', '.join(counts)}")
    for refusal in held.refusals:
        print(f"kvcore generate: {refusal.reason}", file=sys.stderr)
    if proof.not_exercised is not None:
        print(f"kvcore generate: not exercised: {proof.not_exercised}", file=sys.stderr)
    if proof.failure is not None:
        print(f"kvcore generate: NOT verified: {proof.failure}", file=sys.stderr)
    if held.interrupted:
        answers = format_count(len(held.answers), "answers")
        print(f"kvcore generate: interrupted: {answers}, not verified", file=sys.stderr)
        return INTERRUPTED
    if proof.failure is not None or held.refusals:
        return 1
    return 0 if proof.not_exercised is None else 3


def load_model(arguments: Arguments) -> tuple[Llama, Tokenizer]:
    """Load the model, in invariant mode if answers will be verified, and its tokenizer.

    Raises ModelNotFound, UnsupportedModelFile.
    """
    torch.set_num_threads(arguments.threads)
    if arguments.model == "tiny":
        config = tiny_config(visibilities=arguments.visibilities)
        model = tiny_model(invariant=arguments.verify, config=config, device=arguments.device)
        return model, ByteTokenizer()
    file = open_gguf(find_smollm2())
    with tqdm(desc="loading", unit="layer", leave=False, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_llama(file, device=arguments.device, invariant=arguments.verify, progress=show)
    return model, BpeTokenizer(file)


def make_engine(
    arguments: Arguments, model: Llama, tokenizer: Tokenizer
) -> tuple[Engine, PoolRecord | None]:
    """Make the engine, and the record for a picture if one is requested."""
    record = PoolRecord() if arguments.picture is not None else None
    config, exchange = arguments.config, None
    if arguments.directory is not None:
        identity = identify(model, config.groups)
        config = attrs.evolve(config, hash_seed=f"{DIRECTORY_SEED} {identity}".encode())
        exchange = partial(keep_in_directory, path=arguments.directory, weights=identity)
    engine = Engine(
        model,
        config,
        arguments.options,
        exchange=exchange,
        decode=tokenizer.decode,
        observe=record,
    )
    return engine, record


def keep_in_directory(engine: Engine, *, path: Path, weights: str) -> Exchange:
    """Let an engine keep its blocks in files. weights: a name that no other model has."""
    options = FarOptions(
        weights=weights, min_fetch_tokens=1, fetch_timeout_s=DISK_S, store_timeout_s=DISK_S
    )
    return FarExchange(engine, ThreadedTier(DirectoryStore(path)), options)


def run(arguments: Arguments, engine: Engine, tokenizer: Tokenizer) -> Held:
    """Hold all conversations, under a progress bar; as text, each answer is printed at once."""
    total = sum(len(each.turns) * each.num_samples for each in arguments.prompts)
    num_shown = [0]
    with tqdm(desc="answering", total=total, unit="answer", disable=None) as bar:

        def show(held: Held) -> None:
            bar.set_postfix_str(
                f"{engine.metrics.num_generated_tokens} tokens, "
                f"pool {engine.metrics.usages[-1]:.0%}",
                refresh=False,
            )
            show_answers(held)

        def show_answers(held: Held) -> None:
            new = held.answers[num_shown[0] :]
            num_shown[0] += len(new)
            bar.update(len(new))
            if new and not arguments.as_json:
                with bar.external_write_mode(file=sys.stdout):
                    for answer in new:
                        print(f"{format_answer(answer)}\n", flush=True)

        held = hold_conversations(engine, tokenizer, arguments.prompts, show)
        show_answers(held)  # those of a step that was interrupted
        engine.exchange.flush(DISK_S)
        return held


@attrs.frozen(kw_only=True)
class Proof:
    """The checks of a run: counts by subject, and failures.

    failure: why the answers are not verified. not_exercised: required events that did not happen.
    """

    counts: dict[str, int]
    failure: str | None = None
    not_exercised: str | None = None

    def as_json(self) -> dict[str, Any] | None:
        """Return the counts or the failure, None if nothing was requested."""
        return (self.counts or None) if self.failure is None else {"failed": self.failure}


def prove(arguments: Arguments, engine: Engine, held: Held, tokenizer: Tokenizer) -> Proof:
    """Run the requested checks; none after an interrupt."""
    counts: dict[str, int] = {}
    failure = not_exercised = None
    try:
        if not held.interrupted:
            counts |= check_answers(arguments, engine, held, tokenizer)
    except (NotVerified, InvariantViolation) as error:
        failure = str(error)
    except KeyboardInterrupt:
        held.interrupted = True
    if arguments.require_all and not held.interrupted:
        try:
            counts |= verify_pressure(engine, refused=bool(held.refusals))
        except NotExercised as error:
            not_exercised = str(error)
    return Proof(counts=counts, failure=failure, not_exercised=not_exercised)


def check_answers(
    arguments: Arguments, engine: Engine, held: Held, tokenizer: Tokenizer
) -> dict[str, int]:
    """Return how much was computed again and found equal. Raises NotVerified,
    InvariantViolation.
    """
    verify_drained(engine)
    if not arguments.verify:
        return {}
    total = len(held.answers)
    with tqdm(desc="verifying", total=total, unit="answer", disable=None) as bar:
        decode, progress = tokenizer.decode, bar.update
        return verify_answers(engine.model, held.answers, decode=decode, progress=progress)


def draw(arguments: Arguments, record: PoolRecord, summary: Mapping[str, Any]) -> None:
    """Write the picture and print its path; does nothing without steps."""
    assert arguments.picture is not None
    if not summary["steps"]:
        print("kvcore generate: no picture: there was no step to draw", file=sys.stderr)
        return
    answers = format_count(summary["num_answers"], "answers")
    title = (
        "Block pool over time: {num_blocks} blocks of {block_size} tokens, ".format_map(summary)
        + f"{answers} in {format_count(summary['steps'], 'steps')}"
    )
    draw_pool(record, arguments.picture, title=title, first_block=int(arguments.config.null_block))
    print(f"picture: {arguments.picture}", file=sys.stderr)
