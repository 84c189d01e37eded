# SPDX-License-Identifier: Apache-2.0
"""`make demo-apart`: SmolLM2 in two processes, of which one computes prompts and the other answers.

The pages go through Redis (a server that the demonstration starts on the loopback interface, if one
is installed), through a Mooncake store that it starts, or through a directory. For each prompt the
answering process measures the time to its first token, with the pages and without, and compares the
tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time

import torch

from kvcore import Config
from kvcore.far.options import FarOptions
from kvcore_runtime.demos.models import load_model
from kvcore_runtime.demos.processes import (
    WAIT_S,
    end_as_by_ctrl_c,
    make_store,
    mooncake_store,
    page_store,
    python_process,
)
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import KvcoreRuntimeError, PackageMissing
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.handover import as_decode, as_prefill, hand_over, read_handover
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.model.sampling import Sampling

NUM_NEW_TOKENS = 9
LENGTHS = (256, 404, 640, 1000)
OPTIONS = FarOptions(fetch_timeout_s=5.0, staging_pages=256)


def main(argv: list[str] | None = None) -> int:
    """Run both processes. Returns 0 if all tokens are equal."""
    parser = argparse.ArgumentParser(prog="kvcore_runtime.demos.apart", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the random model")
    through = parser.add_mutually_exclusive_group()
    through.add_argument("--directory", action="store_true", help="through files, not Redis")
    through.add_argument("--mooncake", action="store_true", help="through Mooncake, not Redis")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    end_as_by_ctrl_c()
    torch.set_num_threads(1)
    try:
        if options.place is not None:
            _prefill(make_engine(options.tiny, options.place))
            return 0
        store = mooncake_store() if options.mooncake else page_store(directory=options.directory)
        with store as place, other_process(options.tiny, place) as other:
            name = "the tiny model" if options.tiny else "SmolLM2"
            print(f"two processes load {name}", flush=True)
            return _decode(make_engine(options.tiny, place), other)
    except KvcoreRuntimeError as error:
        is_mooncake = isinstance(error, PackageMissing) and options.mooncake
        hint = " (or, outside the project: make engines-mooncake)" if is_mooncake else ""
        print(f"kvcore_runtime.demos.apart: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_engine(tiny: bool, place: str) -> Engine:
    model = load_model(tiny=tiny, invariant=True)
    config = Config(200, 16, hash_seed=b"apart")
    store = make_store(place)
    return Engine(
        model,
        config,
        EngineOptions(token_budget=256),
        exchange=lambda engine: FarExchange(engine, ThreadedTier(store), OPTIONS),
    )


def other_process(
    tiny: bool, place: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start the process that computes prompts; it prints `ready` and exits when its input ends."""
    arguments = ["--place", place, *(["--tiny"] if tiny else [])]
    return python_process("kvcore_runtime.demos.apart", arguments)


def _prefill(engine: Engine) -> None:
    """Read one request per line and print its hand-over as one line."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = make_request(**json.loads(line))
        engine.add_request(as_prefill(request))
        (completion,) = engine.run()
        handover = hand_over(engine, request, completion, WAIT_S)
        print("" if handover is None else handover.to_json(), flush=True)


def _decode(engine: Engine, other: subprocess.Popen[str]) -> int:
    assert other.stdin is not None
    assert other.stdout is not None
    if other.stdout.readline() != "ready\n":
        return 1
    print("until the answering process has its first token, if it computes the prompt itself, and")
    print("if it fetches what the other process has computed; share: the second over the first")
    vocabulary = engine.model.config.vocab_size
    draw = torch.Generator().manual_seed(1)
    all_equal = True
    print("prompt   computed   fetched    share   tokens computed")
    for length in LENGTHS:
        prompt = torch.randint(vocabulary, (length,), generator=draw).tolist()
        alone = make_request(f"alone {length}", prompt, cache_salt="alone")
        alone_s, expected, num_alone = timed(engine, alone)
        name = f"apart {length}"
        other.stdin.write(json.dumps({"request_id": name, "prompt": prompt}) + "\n")
        other.stdin.flush()
        handover = read_handover(other.stdout.readline())
        request = as_decode(engine, make_request(name, prompt), handover)
        apart_s, tokens, num_apart = timed(engine, request)
        print(
            f"{length:6}   {alone_s:6.3f} s   {apart_s:6.3f} s   {apart_s / alone_s:5.2f}   "
            f"{num_apart} instead of {num_alone}"
        )
        all_equal &= tokens == expected
    print("all tokens are equal" if all_equal else "TOKENS DIFFER")
    return 0 if all_equal else 1


def make_request(
    request_id: str, prompt: list[int], cache_salt: str | None = None
) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    return GenerationRequest(
        request_id=request_id, prompt=tuple(prompt), sampling=sampling, cache_salt=cache_salt
    )


def timed(engine: Engine, request: GenerationRequest) -> tuple[float, tuple[int, ...], int]:
    """Time a request: seconds to the first token sampled here, all tokens, computed positions."""
    before = engine.metrics.num_computed_tokens
    num_before = engine.metrics.num_generated_tokens
    started = time.perf_counter()
    engine.add_request(request)
    completions = []
    seconds = None
    while not engine.is_idle:
        completions += engine.step()
        if seconds is None and engine.metrics.num_generated_tokens > num_before:
            seconds = time.perf_counter() - started
            num_computed = engine.metrics.num_computed_tokens - before
    assert seconds is not None
    return seconds, completions[0].tokens, num_computed


if __name__ == "__main__":
    sys.exit(main())
