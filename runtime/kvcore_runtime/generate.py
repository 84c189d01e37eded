# SPDX-License-Identifier: Apache-2.0
"""`kvcore generate`: answers a file of prompts out of a pool of blocks, and proves the answers.

All input is read and checked before the model is loaded, and before anything is written. Exit
codes: 0 all is well; 1 an answer was not verified, or a prompt never fits; 2 the call or its input
was wrong. Progress goes to stderr, results to stdout.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from kvcore import Config, InvariantViolation, KvcoreError
from kvcore_runtime.conversation import Held, hold_conversations
from kvcore_runtime.engine import Engine, EngineOptions
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.model import Llama, tiny_model
from kvcore_runtime.picture import draw_pool
from kvcore_runtime.pool_record import PoolRecord
from kvcore_runtime.prompts import Prompt, read_prompts
from kvcore_runtime.report import Summary, as_json, format_answers, format_table, summarise
from kvcore_runtime.sampling import Sampling
from kvcore_runtime.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from kvcore_runtime.verify import (
    NotVerified,
    Verified,
    verify_answers,
    verify_drained,
    verify_pressure,
)
from kvcore_runtime.weights import find_smollm2, load_llama, open_gguf

TINY_PROMPTS = Path(__file__).with_name("tiny_prompts.jsonl")
TINY: dict[str, Any] = {
    "prompts": TINY_PROMPTS,
    "model": "tiny",
    "num_blocks": 40,
    "host_blocks": 12,
    "token_budget": 96,
    "max_tokens": 24,
    "temperature": 1.0,
    "threads": 1,
    "require_all": True,
}
"""What --tiny stands for: each unless it is given too."""
DEFAULTS: dict[str, Any] = {
    "prompts": None,
    "model": "smollm2",
    "num_blocks": 64,
    "host_blocks": 40,
    "token_budget": 256,
    "max_tokens": 40,
    "temperature": 0.0,
    "threads": None,
    "require_all": False,
}
"""Otherwise; the pool is one that examples/prompts.jsonl brings under pressure."""


@attrs.frozen(kw_only=True)
class Job:
    """A checked call: everything but the model."""

    prompts: list[Prompt]
    config: Config
    options: EngineOptions
    model: str
    device: torch.device
    threads: int | None
    verify: bool
    require_all: bool
    picture: Path | None
    as_json: bool


class WrongCall(KvcoreRuntimeError):
    """A command line that cannot be carried out."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        job = read_job(argv)
        model, tokenizer = load_model(job)
        engine, record = make_engine(job, model, tokenizer)
    except (KvcoreError, KvcoreRuntimeError) as error:
        print(f"kvcore generate: {error}", file=sys.stderr)
        return 2
    held = run(job, engine, tokenizer)
    summary = summarise(engine, held)
    failure: str | None = None
    verified: dict[str, Any] | None = None
    try:
        verified = prove(job, engine, held, tokenizer)
    except (NotVerified, InvariantViolation) as error:
        failure = str(error)
        verified = {"failed": failure}
    if job.as_json:
        print(json.dumps(as_json(summary, held, verified), ensure_ascii=False, indent=1))
    else:
        print(f"{format_answers(held, job.prompts)}\n\n{format_table(summary)}\n", flush=True)
    if job.picture is not None and record is not None:
        draw(job, record, summary)
    if not job.as_json and verified is not None and failure is None:
        print(f"verified: {', '.join(f'{count} {name}' for name, count in verified.items())}")
    if failure is not None:
        print(f"kvcore generate: NOT verified: {failure}", file=sys.stderr)
    for refusal in held.refusals:
        print(f"kvcore generate: {refusal.reason}", file=sys.stderr)
    return 1 if failure is not None or held.refusals else 0


def read_job(argv: list[str]) -> Job:
    """Parse and check a command line and its prompts; argparse exits with 2 by itself.

    Raises KvcoreError or KvcoreRuntimeError.
    """
    given = _make_parser().parse_args(argv)
    preset = TINY if given.tiny else DEFAULTS
    for name, value in preset.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.prompts is None:
        raise WrongCall("--prompts FILE is needed (or --tiny, which brings its own)")
    defaults = Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
    )
    if given.picture is not None:
        _check_picture(given.picture)
    if given.threads is not None and given.threads < 1:
        raise WrongCall(f"--threads {given.threads}: expected 1 or more")
    device = _read_device(given.device)
    return Job(
        prompts=read_prompts(given.prompts, defaults),
        config=Config(given.num_blocks, given.block_size, num_host_blocks=given.host_blocks),
        options=EngineOptions(
            backend=given.backend,
            token_budget=given.token_budget,
            preemption=given.preempt,
            guard=given.guard,
            keep_logits=given.verify and given.model == "tiny",
        ),
        model=given.model,
        device=device,
        threads=given.threads,
        verify=given.verify,
        require_all=given.require_all,
        picture=given.picture,
        as_json=given.json,
    )


def load_model(job: Job) -> tuple[Llama, Tokenizer]:
    """The model, in invariant mode where it is to be verified, and its tokenizer.

    Raises ModelNotFound, UnsupportedModel.
    """
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    if job.model == "tiny":
        return tiny_model(invariant=job.verify), ByteTokenizer()
    file = open_gguf(find_smollm2())
    with tqdm(desc="loading", unit="layer", leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_llama(file, device=job.device, invariant=job.verify, progress=show)
    return model, BpeTokenizer(file)


def make_engine(job: Job, model: Llama, tokenizer: Tokenizer) -> tuple[Engine, PoolRecord | None]:
    """The engine, and the record that it fills where a picture is wanted."""
    record = PoolRecord() if job.picture is not None else None
    engine = Engine(model, job.config, job.options, decode=tokenizer.decode, observe=record)
    return engine, record


def run(job: Job, engine: Engine, tokenizer: Tokenizer) -> Held:
    """Hold all conversations, under a progress bar."""
    total = sum(len(each.turns) * each.num_samples for each in job.prompts)
    with tqdm(desc="answering", total=total, unit="answer") as bar:

        def show(held: Held) -> None:
            bar.set_postfix_str(
                f"{engine.metrics.num_generated_tokens} tokens, "
                f"pool {engine.metrics.usages[-1]:.0%}",
                refresh=False,
            )
            bar.update(len(held.answers) - bar.n)

        return hold_conversations(engine, tokenizer, job.prompts, show)


def prove(job: Job, engine: Engine, held: Held, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Check everything that was asked for; counts by what they count. Raises NotVerified."""
    counts: dict[str, Any] = {}
    verify_drained(engine)
    if job.verify:
        with tqdm(desc="verifying", total=len(held.answers), unit="answer") as bar:

            def show(num_answers: int) -> None:
                bar.update(num_answers)

            done = verify_answers(
                engine.model, held.answers, decode=tokenizer.decode, progress=show
            )
        counts |= _name_counts(done)
    if job.require_all:
        counts |= verify_pressure(engine)
    return counts or None


def draw(job: Job, record: PoolRecord, summary: Summary) -> None:
    """Write the picture and say where."""
    assert job.picture is not None
    title = (
        f"Block pool over time: {summary.num_blocks} blocks of {summary.block_size} tokens, "
        f"{summary.num_answers} answers in {summary.steps} steps"
    )
    draw_pool(record, job.picture, title=title, first_block=int(job.config.null_block))
    print(f"picture: {job.picture}", file=sys.stderr)


def _name_counts(done: Verified) -> dict[str, int]:
    counts = {
        "answers equal to a contiguous cache's": done.num_answers,
        "tokens": done.num_tokens,
    }
    if done.num_logits:
        counts["rows of logits bit by bit"] = done.num_logits
    return counts


def _check_picture(path: Path) -> None:
    if path.is_dir():
        raise WrongCall(f"--picture {path}: that is a directory")
    if not path.absolute().parent.is_dir():
        raise WrongCall(f"--picture {path}: there is no such directory")


def _read_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WrongCall(f"--device {name}: torch knows no such device") from None
    if device.type not in ("cpu", "cuda"):
        raise WrongCall(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WrongCall(f"--device {name}: torch finds no CUDA device here")
    return device


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcore generate",
        description="Answer prompts with a model whose cache lies in blocks that kvcore manages.",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one JSON object a line")
    parser.add_argument("--tiny", action="store_true", help="random model, own prompts, seconds")
    parser.add_argument("--model", choices=("smollm2", "tiny"), help="default: smollm2")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="default: cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch on the CPU")
    pool = parser.add_argument_group("pool")
    pool.add_argument("--num-blocks", type=int, metavar="N", help="device blocks, with block 0")
    pool.add_argument("--block-size", type=int, metavar="N", default=16, help="tokens a block")
    pool.add_argument("--host-blocks", type=int, metavar="N", help="blocks to swap to")
    pool.add_argument("--backend", choices=("rust", "python"), help="default: rust where built")
    pool.add_argument("--guard", action="store_true", help="check every read of a block")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--token-budget", type=int, metavar="N", help="tokens a step at most")
    engine.add_argument("--preempt", choices=("swap", "recompute"), default="swap")
    sampling = parser.add_argument_group("sampling, where a prompt does not say")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="tokens an answer at most")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--seed", type=int, default=0, metavar="S")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="invariant mode, and every answer again from a contiguous cache",
    )
    results.add_argument(
        "--require-all",
        action=argparse.BooleanOptionalAction,
        help="fail unless eviction, copy-on-write, swap and both preemptions happened",
    )
    results.add_argument("--picture", type=Path, metavar="FILE", help="PNG of the pool over time")
    results.add_argument("--json", action="store_true", help="answers and figures as JSON")
    return parser
