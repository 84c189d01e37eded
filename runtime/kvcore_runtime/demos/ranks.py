# SPDX-License-Identifier: Apache-2.0
"""`make demo-ranks`: SmolLM2 on several processes of this machine, compared with one process.

Rank 0 answers the prompts with the others, then alone with the whole model, and compares the
answers token by token. SmolLM2 has 3 key-value heads; on 2 ranks it gets a fourth head, of zeros.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

import attrs
import torch

from kvcore import Config
from kvcore_runtime.demos.models import load_model, load_tokenizer
from kvcore_runtime.demos.processes import end_as_by_ctrl_c, free_port
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.spans import Attributes
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.generate.conversation import Answer, Held, hold_conversations
from kvcore_runtime.generate.prompts import Prompt, read_prompts
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.model.tokenizer import Tokenizer
from kvcore_runtime.ranks.follower import RankFollower
from kvcore_runtime.ranks.leader import Leader
from kvcore_runtime.ranks.links import Links, connect
from kvcore_runtime.ranks.shard import pad_heads, shard

GRACE_S = 10.0
"""How long the others may take to end by themselves once a rank has failed."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks and wait for them. Returns 0 if all answers are equal."""
    options = _parser().parse_args(argv)
    end_as_by_ctrl_c()
    if options.rank is not None:
        return _run_rank(options)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    given = sys.argv[1:] if argv is None else argv
    command = [sys.executable, "-m", "kvcore_runtime.demos.ranks", *given, "--endpoint", endpoint]
    ranks: list[subprocess.Popen[bytes]] = []
    name = "the tiny model" if options.tiny else "SmolLM2"
    print(f"{options.world} processes load {name} and answer the prompts", flush=True)
    try:
        for rank in range(options.world):
            started = [*command, "--rank", str(rank)]
            ranks.append(subprocess.Popen(started, start_new_session=rank > 0))
        return _wait(ranks)
    except KeyboardInterrupt:
        return 130
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for the ranks; return the exit code of the first that fails, after a grace period."""
    while True:
        codes = [each.poll() for each in ranks]
        if all(code == 0 for code in codes):
            return 0
        failed = [code for code in codes if code]
        if failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for each in ranks:
                    each.wait(GRACE_S)
            return abs(failed[0])
        time.sleep(0.05)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvcore_runtime.demos.ranks", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--tiny", action="store_true", help="the random model and its prompts")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts.jsonl"))
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds until a rank is lost")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    return parser


def _run_rank(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        model, tokenizer = load_model(tiny=options.tiny), load_tokenizer(tiny=options.tiny)
        links = connect(options.rank, options.world, options.endpoint, timeout_s=options.timeout)
        share = shard(pad_heads(model, options.world), options.rank, options.world, links.reduce)
        config, engine_options = _sizes(tiny=options.tiny)
        if options.rank:
            RankFollower(share, config, engine_options, links).run()
            return 0
        prompts = _prompts(options)
        times = StepTimes()
        engine = Engine(share, config, attrs.evolve(engine_options, on_span=times))
        apart = _answer_apart(engine, links, times, tokenizer, prompts)
        whole = hold_conversations(Engine(model, config, engine_options), tokenizer, prompts)
        return _compare(apart, whole)
    except KvcoreRuntimeError as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class StepTimes:
    """The times of the steps that were sent, by what they were spent on, in nanoseconds."""

    def __init__(self) -> None:
        self._times: dict[str, list[int]] = defaultdict(list)

    def __call__(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """See `OnSpan`."""
        del attributes
        self._times[name].append(end_ns - start_ns)

    def median_us(self, name: str) -> float:
        """Return the median time of the spans of a name, in microseconds."""
        return statistics.median(self._times[name]) / 1e3


def _answer_apart(
    engine: Engine, links: Links, times: StepTimes, tokenizer: Tokenizer, prompts: list[Prompt]
) -> Held:
    """Answer the prompts with all ranks; print the traffic and time per step."""
    with Leader(engine, links) as leader:
        held = hold_conversations(engine, tokenizer, prompts)
        metrics, num_steps = engine.metrics, leader.num_steps
        print(
            f"{links.world} ranks: {len(held.answers)} answers in {num_steps} steps, with"
            f" {metrics.num_blocks_out} blocks swapped out, {metrics.num_copies} copied on write"
            f" and {metrics.num_evictions} evicted"
        )
        print(
            f"a step: {leader.num_bytes / num_steps:.0f} bytes;"
            f" {times.median_us('kvcore.ranks.send'):.0f} us to write and send it,"
            f" {times.median_us('kvcore.ranks.agree'):.0f} us until all ranks have applied its"
            " batch (medians)"
        )
    return held


def _compare(apart: Held, whole: Held) -> int:
    expected = {_name(each): each.completion.tokens for each in whole.answers}
    found = {_name(each): each.completion.tokens for each in apart.answers}
    different = [name for name in expected if found.get(name) != expected[name]]
    num_equal = len(expected) - len(different)
    print(f"one process: {num_equal} of {len(expected)} answers have the same tokens")
    if different:
        print(f"different: {', '.join(map(str, different))}", file=sys.stderr)
    return 1 if different or found.keys() != expected.keys() else 0


def _name(answer: Answer) -> tuple[str, int]:
    return answer.completion.request_id, answer.completion.sample


def _sizes(*, tiny: bool) -> tuple[Config, EngineOptions]:
    """Choose a pool that is too small for all prompts at once."""
    num_blocks, num_host_blocks = (64, 40) if not tiny else (40, 12)
    config = Config(num_blocks, 16, num_host_blocks=num_host_blocks, hash_seed=b"ranks")
    return config, EngineOptions(token_budget=256, max_sequences=16)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    greedy = Sampling(temperature=0.0, max_tokens=32)
    if options.tiny:
        path = Path(str(files("kvcore_runtime.generate") / "tiny_prompts.jsonl"))
        return read_prompts(path, greedy)
    return read_prompts(options.prompts, greedy)


if __name__ == "__main__":
    sys.exit(main())
