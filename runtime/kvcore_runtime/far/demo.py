# SPDX-License-Identifier: Apache-2.0
"""`make demo-apart`: SmolLM2 in two processes, one computes prompts, the other one answers.

The pages go through Redis (a server of its own on the loopback interface, if there is a program for
it) or a directory. Of each prompt the answering process measures the time to its first token, with
the pages and without, and compares the tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kvcore import Config
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.handover import as_decode, as_prefill, hand_over, read_handover
from kvcore_runtime.far.options import FarOptions
from kvcore_runtime.far.redis_store import RedisStore
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.far.tier import BlockingStore
from kvcore_runtime.model.model import Llama, tiny_model
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.model.weights import find_smollm2, load_llama, open_gguf

WAIT_S = 10.0
NUM_NEW_TOKENS = 9
LENGTHS = (256, 404, 640, 1000)
OPTIONS = FarOptions(fetch_timeout_s=5.0, staging_pages=256)


def main(argv: list[str] | None = None) -> int:
    """Run both; 0 if all tokens are equal."""
    parser = argparse.ArgumentParser(prog="kvcore_runtime.far.demo", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the random model")
    parser.add_argument("--directory", action="store_true", help="through files, not Redis")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        if options.place is not None:
            _prefill(_make_engine(options.tiny, options.place))
            return 0
        with _place(options.directory) as place, _other(options.tiny, place) as other:
            return _decode(_make_engine(options.tiny, place), other)
    except KvcoreRuntimeError as error:
        print(f"kvcore_runtime.far.demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _make_engine(tiny: bool, place: str) -> Engine:
    model = tiny_model(invariant=True) if tiny else _load()
    config = Config(200, 16, hash_seed=b"apart")
    store: BlockingStore
    store = RedisStore(place) if place.startswith("redis") else DirectoryStore(Path(place))
    return Engine(
        model,
        config,
        EngineOptions(token_budget=256),
        exchange=lambda engine: FarExchange(engine, ThreadedTier(store), OPTIONS),
    )


def _load() -> Llama:
    return load_llama(open_gguf(find_smollm2()))


def _prefill(engine: Engine) -> None:
    """Answer each line, a request, with a line, its hand-over."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = _request(**json.loads(line))
        engine.add_request(as_prefill(request))
        (completion,) = engine.run()
        handover = hand_over(engine, request, completion, WAIT_S)
        print("" if handover is None else handover.to_json(), flush=True)


def _decode(engine: Engine, other: subprocess.Popen[str]) -> int:
    assert other.stdin is not None
    assert other.stdout is not None
    if other.stdout.readline() != "ready\n":
        return 1
    vocabulary = engine.model.config.vocab_size
    draw = torch.Generator().manual_seed(1)
    all_equal = True
    print("prompt   computed   fetched    share   tokens computed")
    for length in LENGTHS:
        prompt = torch.randint(vocabulary, (length,), generator=draw).tolist()
        alone = _request(f"alone {length}", prompt, cache_salt="alone")
        alone_s, expected, num_alone = _timed(engine, alone)
        name = f"apart {length}"
        other.stdin.write(json.dumps({"request_id": name, "prompt": prompt}) + "\n")
        other.stdin.flush()
        handover = read_handover(other.stdout.readline())
        request = as_decode(engine, _request(name, prompt), handover)
        apart_s, tokens, num_apart = _timed(engine, request)
        print(
            f"{length:6}   {alone_s:6.3f} s   {apart_s:6.3f} s   {apart_s / alone_s:5.2f}   "
            f"{num_apart} instead of {num_alone}"
        )
        all_equal &= tokens == expected
    print("all tokens are equal" if all_equal else "TOKENS DIFFER")
    return 0 if all_equal else 1


def _request(
    request_id: str, prompt: list[int], cache_salt: str | None = None
) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    return GenerationRequest(
        request_id=request_id, prompt=tuple(prompt), sampling=sampling, cache_salt=cache_salt
    )


def _timed(engine: Engine, request: GenerationRequest) -> tuple[float, tuple[int, ...], int]:
    """Seconds to the first token that this engine samples, all tokens, positions computed."""
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


@contextlib.contextmanager
def _place(directory: bool) -> Iterator[str]:
    """A store for both processes, gone at the end."""
    program = None if directory else shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        with tempfile.TemporaryDirectory() as folder:
            print("pages go through files", flush=True)
            yield folder
        return
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --maxmemory 1gb".split()
    server = subprocess.Popen([program, *options, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        _wait_for(url)
        print(f"pages go through {Path(program).name} at port {port}", flush=True)
        yield url
    finally:
        server.terminate()
        server.wait()


def _wait_for(url: str) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            RedisStore(url)
            return
        except TierUnusable:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def _other(tiny: bool, place: str) -> Iterator[subprocess.Popen[str]]:
    """The process that computes prompts; it ends with its input."""
    command = [sys.executable, "-m", "kvcore_runtime.far.demo", "--place", place]
    process = subprocess.Popen(
        [*command, *(["--tiny"] if tiny else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()


if __name__ == "__main__":
    sys.exit(main())
