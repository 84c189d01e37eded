# SPDX-License-Identifier: Apache-2.0
"""Steps planned while others are computed give the same answers, bit by bit, as one after another.

With one thread or two nothing here depends on time: the engine waits at fixed places.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.connector import Channel, Receiver, Sender
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.forward import Begun, Computed
from kvcore_runtime.engine.scheduler import ScheduledChunk
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.generate import command
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config
from tests.conftest import Backend
from tests.helpers.amount import every_second
from tests.runtime.engine.spoiled import Spoiled
from tests.runtime.far.kept import keep_in, settled
from tests.runtime.model.questions import (
    MODELS,
    SYSTEM,
    answer,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

SPOILED = Spoiled(drafter=PromptLookup(), seed=3, share=0.4, num_tokens=260)
OPTIONS = EngineOptions(token_budget=64, guard=True, keep_logits=True)


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


def model(name: str = "full") -> Llama:
    return model_of(MODELS[name])


def make_config(name: str = "full", num_blocks: int = 120, **options: Any) -> Config:
    config = Config(num_blocks, groups=make_groups(MODELS[name], 16), max_num_batched_tokens=64)
    return attrs.evolve(config, **{"max_in_flight": 1, **options})


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_host_blocks", "max_in_flight", "publish", "options"),
    [
        pytest.param("full", 120, 0, 1, "scheduled", {}, id="all fits"),
        pytest.param("full", 120, 0, 5, "completed", {}, id="all fits, five in flight"),
        pytest.param("full", 120, 0, 1, "completed", {"token_budget": 24}, id="small chunks"),
        pytest.param("full", 19, 40, 1, "scheduled", {}, id="swaps"),
        pytest.param("full", 20, 40, 2, "completed", {}, id="swaps, two in flight"),
        pytest.param("full", 20, 0, 1, "completed", {"preemption": "recompute"}, id="recomputes"),
        pytest.param("full", 16, 9, 2, "scheduled", {"token_budget": 40}, id="both"),
        pytest.param("full", 11, 6, 1, "scheduled", {"token_budget": 7}, id="one at a time"),
        pytest.param("windowed", 27, 60, 1, "completed", {}, id="windows"),
        pytest.param("windowed", 33, 0, 2, "scheduled", {"token_budget": 40}, id="recomputed"),
        pytest.param("full", 20, 9, 1, "completed", {"drafter": PromptLookup()}, id="drafts"),
        pytest.param("windowed", 60, 30, 2, "scheduled", {"drafter": SPOILED}, id="all at once"),
    ],
)
def test_answers_do_not_depend_on_batches_in_flight(
    backend: Backend,
    name: str,
    num_blocks: int,
    num_host_blocks: int,
    max_in_flight: int,
    publish: str,
    options: dict[str, Any],
) -> None:
    config = make_config(
        name,
        num_blocks,
        num_host_blocks=num_host_blocks,
        max_in_flight=max_in_flight,
        publish=publish,
    )
    engine = Engine(model(name), config, attrs.evolve(OPTIONS, backend=backend, **options))
    assert_same_answers(answer(engine, requests()), references(model(name)))
    assert_drained(engine)
    assert engine.metrics.num_overlapped > 0
    assert engine.metrics.num_cancelled == 0


def test_a_pool_under_pressure_brings_about_all_that_is_claimed(backend: Backend) -> None:
    config = make_config(num_blocks=15, num_host_blocks=9)
    engine = Engine(model(), config, attrs.evolve(OPTIONS, backend=backend))
    answer(engine, requests())
    metrics, scheduler = engine.metrics, engine.scheduler
    assert metrics.num_evictions > 0
    assert metrics.num_copies > 0
    assert metrics.num_blocks_out > 0
    assert metrics.num_blocks_in > 0
    assert scheduler.preemptions.by_swap > 0
    assert scheduler.num_waits > 0
    assert metrics.num_stalls > 0
    assert 0 < metrics.num_overlapped < metrics.num_steps


def test_both_backends_take_the_same_steps_ahead() -> None:
    pytest.importorskip("kvcore._rust")
    backends: tuple[Backend, Backend] = ("python", "rust")
    config = make_config(num_blocks=20, num_host_blocks=9, publish="completed")
    engines = [Engine(model(), config, attrs.evolve(OPTIONS, backend=each)) for each in backends]
    for engine in engines:
        for request in requests():
            engine.add_request(request)
    while not engines[0].is_idle:
        done = [engine.step() for engine in engines]
        assert [(each.request_id, each.sample) for each in done[0]] == [
            (each.request_id, each.sample) for each in done[1]
        ]
        assert engines[0].manager.encode() == engines[1].manager.encode()
    assert engines[1].is_idle


class Gate:
    """Lets a forward pass wait on the executor until the next plan is made."""

    def __init__(self, engine: Engine) -> None:
        self.planned = multiprocessing.Event()
        self.num_planned = 0
        self.num_ahead = 0
        self._compute = engine.forward.compute
        self._schedule = engine.scheduler.schedule
        self._engine = engine

    def compute(self, begun: Begun) -> Computed:
        assert self.planned.wait(60), "no step was planned while this one waited"
        self.planned.clear()
        return self._compute(begun)

    def schedule(self, in_flight: bool = False) -> list[ScheduledChunk]:
        chunks = self._schedule(in_flight)
        self.num_planned += in_flight
        self.num_ahead += sum(each.is_ahead for each in chunks)
        self.planned.set()
        return chunks


def test_each_step_is_planned_while_the_one_before_is_computed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model(), make_config(), attrs.evolve(OPTIONS, backend=backend))
    gate = Gate(engine)
    monkeypatch.setattr(engine.forward, "compute", gate.compute)
    monkeypatch.setattr(engine.scheduler, "schedule", gate.schedule)
    assert_same_answers(answer(engine, requests()), references(model()))
    assert gate.num_planned > engine.metrics.num_overlapped > 0
    # The last token of an answer is not computed, and what two of the three samples of a prompt
    # began with is known by the time that they begin. All others run ahead.
    expected = references(model()).values()
    assert gate.num_ahead == sum(len(each.tokens) - 1 for each in expected) - 2


def test_a_stop_that_is_found_late_leaves_what_was_computed_of_it_to_be_hit(
    backend: Backend,
) -> None:
    """The end token was computed as if the answer went on, and it fills a block."""
    sampling = Sampling(temperature=2.0, seed=1, max_tokens=9)
    whole = GenerationRequest(request_id="whole", prompt=tuple(SYSTEM)[:14], sampling=sampling)
    options = attrs.evolve(OPTIONS, backend=backend)
    (answered,) = answer(Engine(model(), make_config(), options), [whole]).values()
    first, end = answered.tokens[:2]
    assert first != end
    ended = attrs.evolve(sampling, end_ids=frozenset({end}))
    engine = Engine(model(), make_config(), options)
    (done,) = answer(engine, [attrs.evolve(whole, sampling=ended)]).values()
    assert done.tokens == (first, end)
    prompt = (*whole.prompt, *done.tokens)
    assert engine.metrics.num_computed_tokens == len(prompt)
    engine.manager.take_stats()
    answer(engine, [attrs.evolve(whole, request_id="next", prompt=(*prompt, 1))])
    assert engine.manager.take_stats().hits == len(prompt)
    assert_drained(engine)


@pytest.mark.parametrize("num_steps", every_second([1, 2, 3, 5, 9, 14, 20, 26]))
@pytest.mark.parametrize("publish", ["scheduled", "completed"])
def test_an_abort_in_flight_leaks_nothing(backend: Backend, num_steps: int, publish: str) -> None:
    config = make_config(num_blocks=16, num_host_blocks=9, publish=publish, max_in_flight=2)
    engine = Engine(model(), config, attrs.evolve(OPTIONS, backend=backend, token_budget=40))
    for request in requests():
        engine.add_request(request)
    done = [each for _ in range(num_steps) for each in engine.step()]
    for request in requests()[::2]:
        engine.abort(request.request_id)
        engine.manager.check()
    kept = requests()[1::2]
    done += engine.run()
    names = {each.request_id for each in kept}
    completions = {f"{each.request_id}#{each.sample}": each for each in done}
    completions = {key: each for key, each in completions.items() if each.request_id in names}
    assert_same_answers(completions, references(model()), kept)
    assert_drained(engine)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_in_a_directory_is_loaded_by_batches_in_flight(
    backend: Backend, name: str, tmp_path: Path
) -> None:
    config = make_config(name, 300, hash_seed=b"seed", max_in_flight=2)
    computed: list[int] = []
    for publish in ("scheduled", "completed", "scheduled"):
        engine = Engine(
            model(name),
            attrs.evolve(config, publish=publish),
            attrs.evolve(OPTIONS, backend=backend),
            exchange=partial(keep_in, tmp_path),
        )
        requested = requests()[:3]
        assert_same_answers(answer(engine, requested), references(model(name)), requested)
        assert_drained(engine)
        counts = settled(engine)
        assert counts.num_failed == 0
        assert (counts.num_loaded > 0) == bool(computed)
        computed.append(engine.metrics.num_computed_tokens)
    assert computed[1] == computed[2] < computed[0]


@pytest.mark.parametrize("publish", ["scheduled", "completed"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_handed_over_while_batches_are_in_flight(
    backend: Backend, name: str, publish: str
) -> None:
    config = make_config(name, 150, publish=publish, max_in_flight=2)
    options = attrs.evolve(OPTIONS, backend=backend)
    channel = Channel()
    ends: tuple[Callable[[Engine], Exchange], ...] = (
        partial(Sender, channel=channel),
        partial(Receiver, channel=channel),
    )
    first, second = (Engine(model(name), config, options, exchange=each) for each in ends)
    requested = [each for each in requests() if each.num_samples == 1]
    short = [attrs.evolve(each.sampling, max_tokens=1) for each in requested]
    answer(
        first,
        [attrs.evolve(each, sampling=cut) for each, cut in zip(requested, short, strict=True)],
    )
    assert_same_answers(answer(second, requested), references(model(name)), requested)
    assert second.metrics.num_computed_tokens < first.metrics.num_computed_tokens
    assert len(channel) == 0
    for engine in (first, second):
        assert_drained(engine)


def run_command(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = command.main(["--tiny", "--backend", "python", *options])
    return code, capsys.readouterr().out


def test_the_command_overlaps_steps_and_says_what_it_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = ["--picture", str(tmp_path / "pool.png")]
    options = ["--max-in-flight", "2", "--publish", "completed", "--guard"]
    code, out = run_command(capsys, *options, *picture, "--json")
    assert code == 0
    result = json.loads(out)
    summary = result["summary"]
    assert result["verified"]["rows of logits bit by bit"] == summary["generated_tokens"]
    assert (summary["max_in_flight"], summary["publish"]) == (2, "completed")
    assert 0 < summary["steps_overlapped"] < summary["steps"]
    assert summary["stalls"] > 0
    assert summary["batches_cancelled"] == 0
    assert Path(picture[1]).read_bytes().startswith(b"\x89PNG")
    code, out = run_command(capsys, *options[:2])
    assert code == 0
    assert " steps planned while another ran, 0 cancelled\n" in out
    assert re.search(r"^waits +\d+ for tokens in flight, \d+ for blocks$", out, re.MULTILINE)
    assert re.search(r"^published +when scheduled$", out, re.MULTILINE)


def test_the_command_says_which_numbers_of_batches_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--tiny", "--max-in-flight", "99"]) == 2
    assert "max_in_flight=99: must be at most 62" in capsys.readouterr().err
