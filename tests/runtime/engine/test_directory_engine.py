# SPDX-License-Identifier: Apache-2.0
"""An engine over a directory of blocks: what is there is not computed again, and what fails is."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from kvcore_runtime.cache.directory import DirectoryTier, describe
from kvcore_runtime.cache.errors import BlockDamaged, BlockForeign, BlockMissing, TierFailed
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.directory_exchange import DirectoryExchange
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import Completion, GenerationRequest, Sequence
from kvcore_runtime.model.model import Llama
from torch import Tensor

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.backends import both_backends
from tests.runtime.model import questions
from tests.runtime.model.questions import DEEP_MODELS as MODELS
from tests.runtime.model.questions import answer, assert_drained, model_of


def model(name: str) -> Llama:
    return model_of(MODELS[name])


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """The twin; `make explore` has Python, too."""
    return backend_of_engine


class Faulty(DirectoryTier):
    """Stores, or loads, fail: every one whose number is a multiple of `every`."""

    def __init__(self, path: Path, description: str, every: int, what: str) -> None:
        super().__init__(path, description)
        self._every = every
        self._what = what
        self._num_calls = 0

    def store(self, key: bytes, page: Tensor) -> None:
        self._fail("store", key)
        super().store(key, page)

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        self._fail("load", key)
        return super().load(key, num_bytes)

    def _fail(self, what: str, key: bytes) -> None:
        if what == self._what:
            self._num_calls += 1
            if self._num_calls % self._every == 0:
                raise TierFailed(key=key.hex(), place=self.path, reason="told to fail")


class Slow(DirectoryExchange):
    """Hears of each operation's end some steps late."""

    def poll(self) -> list[Sequence]:
        self.num_polls = getattr(self, "num_polls", 0) + 1
        return super().poll() if self.num_polls % 4 == 0 else []


def make_engine(
    name: str,
    backend: Backend,
    path: Path,
    *,
    num_blocks: int = 300,
    num_host_blocks: int = 0,
    seed: bytes = b"seed",
    faulty: tuple[int, str] | None = None,
    weights: str = "tiny",
    kind: type[DirectoryExchange] = DirectoryExchange,
) -> Engine:
    config = Config(
        num_blocks,
        num_host_blocks=num_host_blocks,
        groups=make_groups(MODELS[name], 16),
        max_num_batched_tokens=64,
        hash_seed=seed,
    )
    options = EngineOptions(backend=backend, token_budget=64, guard=True, keep_logits=True)

    def exchange(engine: Engine) -> DirectoryExchange:
        description = describe(engine.runtime.cache, weights)
        if faulty is not None:
            return kind(engine, Faulty(path, description, *faulty))
        return kind(engine, DirectoryTier(path, description))

    return Engine(model(name), config, options, exchange=exchange)


def exchange_of(engine: Engine) -> DirectoryExchange:
    assert isinstance(engine.exchange, DirectoryExchange)
    return engine.exchange


def requests() -> list[GenerationRequest]:
    """Three prompts of 73, 81 and 125 tokens, of which one asks for three samples."""
    return questions.requests()[:3]


def assert_same_answers(completions: dict[str, Completion], name: str) -> None:
    questions.assert_same_answers(completions, questions.references(model(name)), requests())


def salted(salt: str) -> list[GenerationRequest]:
    return [attrs.evolve(each, cache_salt=salt) for each in requests()]


@pytest.mark.parametrize("name", MODELS)
def test_another_engine_computes_only_what_the_directory_has_not(
    backend: Backend, name: str, tmp_path: Path
) -> None:
    first = make_engine(name, backend, tmp_path)
    assert_same_answers(answer(first, requests()), name)
    assert_drained(first)
    assert exchange_of(first).errors == []
    num_files = len(list(tmp_path.iterdir()))
    assert 0 < num_files <= exchange_of(first).num_stored
    second = make_engine(name, backend, tmp_path)
    assert_same_answers(answer(second, requests()), name)
    assert_drained(second)
    assert exchange_of(second).errors == []
    assert exchange_of(second).num_loaded > 0
    num_decoded = sum(each.num_samples * (each.sampling.max_tokens - 1) for each in requests())
    # Of each prompt only what does not fill its last block is computed.
    assert second.metrics.num_computed_tokens - num_decoded == sum(
        (len(each.prompt) - 1) % 16 + 1 for each in requests()
    )


def test_the_salt_is_in_the_key(backend: Backend, tmp_path: Path) -> None:
    answer(make_engine("full", backend, tmp_path), salted("a"))
    for salt, found in (("a", True), ("b", False)):
        engine = make_engine("full", backend, tmp_path)
        assert_same_answers(answer(engine, salted(salt)), "full")
        assert (exchange_of(engine).num_loaded > 0) == found
    plain = make_engine("full", backend, tmp_path)
    answer(plain, requests())
    assert exchange_of(plain).num_loaded == 0


def test_another_hash_seed_finds_nothing(backend: Backend, tmp_path: Path) -> None:
    answer(make_engine("full", backend, tmp_path), requests())
    other = make_engine("full", backend, tmp_path, seed=b"another")
    answer(other, requests())
    assert exchange_of(other).num_loaded == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("every", [1, 3])
def test_a_store_that_fails_costs_no_answer(
    backend: Backend, name: str, every: int, tmp_path: Path
) -> None:
    engine = make_engine(name, backend, tmp_path, faulty=(every, "store"))
    assert_same_answers(answer(engine, requests()), name)
    assert_drained(engine)
    assert {type(each) for each in exchange_of(engine).errors} == {TierFailed}
    assert (exchange_of(engine).num_stored == 0) == (every == 1)
    # What is there is whole: another engine goes as far as it can with it.
    again = make_engine(name, backend, tmp_path)
    assert_same_answers(answer(again, requests()), name)
    assert exchange_of(again).errors == []
    assert_drained(again)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("every", [1, 4])
def test_what_a_failed_load_leaves_out_is_computed(
    backend: Backend, name: str, every: int, tmp_path: Path
) -> None:
    answer(make_engine(name, backend, tmp_path), requests())
    engine = make_engine(name, backend, tmp_path, faulty=(every, "load"))
    assert_same_answers(answer(engine, requests()), name)
    assert_drained(engine)
    assert {type(each) for each in exchange_of(engine).errors} == {TierFailed}


def spoil_damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("name", "spoil"), [("full", spoil_damaged), ("windowed", spoil_damaged), ("full", spoil_cut)]
)
def test_damaged_files_are_told_computed_and_stored_anew(
    backend: Backend, name: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    answer(make_engine(name, backend, tmp_path), requests())
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for path in sorted(tmp_path.iterdir())[::3]:
        spoil(path)
    engine = make_engine(name, backend, tmp_path)
    assert_same_answers(answer(engine, requests()), name)
    assert_drained(engine)
    errors = exchange_of(engine).errors
    assert errors
    # Who shares a damaged block with the first that read it misses it.
    assert BlockDamaged in {type(each) for each in errors} <= {BlockDamaged, BlockMissing}
    # What was read and found spoiled is whole again, byte for byte; the rest was not read.
    keys = {str(each.fields["key"]) for each in errors}
    for key in keys:
        file = f"{key}.kv"
        assert (tmp_path / file).read_bytes() == whole[file]


def test_files_that_vanish_between_look_up_and_load_are_missing(
    backend: Backend, tmp_path: Path
) -> None:
    answer(make_engine("full", backend, tmp_path), requests())

    class Forgetful(DirectoryTier):
        def load(self, key: bytes, num_bytes: int) -> Tensor:
            self.file(key).unlink(missing_ok=True)
            return super().load(key, num_bytes)

    engine = make_engine("full", backend, tmp_path)
    engine.runtime.external = Forgetful(tmp_path, describe(engine.runtime.cache, "tiny"))
    assert_same_answers(answer(engine, requests()), "full")
    assert {type(each) for each in exchange_of(engine).errors} == {BlockMissing}
    assert_drained(engine)


def test_blocks_of_another_model_are_not_believed(backend: Backend, tmp_path: Path) -> None:
    answer(make_engine("full", backend, tmp_path, weights="other"), requests())
    engine = make_engine("full", backend, tmp_path)
    assert_same_answers(answer(engine, requests()), "full")
    assert {type(each) for each in exchange_of(engine).errors} == {BlockForeign}
    assert_drained(engine)


@both_backends
def test_a_small_pool_loads_too(backend: Backend, tmp_path: Path) -> None:
    answer(make_engine("windowed", backend, tmp_path), requests())
    engine = make_engine("windowed", backend, tmp_path, num_blocks=29, num_host_blocks=9)
    assert_same_answers(answer(engine, requests()), "windowed")
    assert exchange_of(engine).num_loaded > 0
    assert engine.scheduler.preemptions.total > 0
    assert_drained(engine)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_an_abort_in_flight_holds_its_blocks_until_the_operations_end(
    backend: Backend, name: str, num_steps: int, tmp_path: Path
) -> None:
    answer(make_engine(name, backend, tmp_path), requests())
    engine = make_engine(name, backend, tmp_path, num_blocks=60, kind=Slow)
    for request in requests():
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    was_loading = bool(engine.scheduler.loading)
    assert was_loading or num_steps > 3
    for request in requests():
        engine.abort(request.request_id)
        engine.manager.check()
    assert engine.scheduler.unfinished() == []
    if was_loading:
        assert engine.manager.num_free_blocks < engine.manager.config.num_usable_blocks
        assert not engine.is_idle
    assert engine.run() == []
    assert_drained(engine)
    assert_same_answers(answer(engine, requests()), name)
    assert_drained(engine)
