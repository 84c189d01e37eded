# SPDX-License-Identifier: Apache-2.0
"""The pages that a model left in a directory are found by that model, and by no other."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.generate import command
from kvcore_runtime.model.identity import identify
from kvcore_runtime.model.model import Llama, LlamaConfig, tiny_config, tiny_model

from kvcore import Group
from tests.conftest import Backend
from tests.runtime.backends import both_backends

PROMPTS = (
    '{"id": "sea", "turns": ["Why is the sea salt, and since when?", "And how deep is it?"]}\n'
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def windowed(window: int) -> LlamaConfig:
    sliding = Visibility(kind="sliding_window", window=window)
    return tiny_config(visibilities=(FULL, sliding))


def identity(model: Llama, block_size: int = 16) -> str:
    return identify(model, make_groups(model.config.layer_visibilities, block_size))


def test_whatever_changes_keys_or_values_changes_the_identity() -> None:
    plain = tiny_model()
    sliding, chunked = (
        Visibility(kind="sliding_window", window=24),
        Visibility(kind="chunked_local", window=24),
    )
    models = [
        plain,
        tiny_model(1),
        tiny_model(dtype=torch.float16),
        tiny_model(dtype=torch.bfloat16),
        tiny_model(invariant=True),
        tiny_model(tied=False),
        tiny_model(config=windowed(24)),
        tiny_model(config=windowed(64)),
        *(
            tiny_model(config=tiny_config(visibilities=each))
            for each in ((sliding, FULL), (FULL, chunked), (sliding, sliding))
        ),
        tiny_model(config=attrs.evolve(tiny_config(), rope_theta=5e5)),
        tiny_model(config=attrs.evolve(tiny_config(), rms_norm_eps=1e-6)),
    ]
    said = [identity(each) for each in models]
    assert len(set(said)) == len(said)
    assert identity(plain, 8) not in said


def test_every_weight_is_in_the_identity() -> None:
    before = identity(tiny_model(tied=False))
    weights = tiny_model(tied=False).weights
    tensors = [weights.embedding, weights.norm, weights.head]
    tensors += [
        getattr(layer, each.name) for layer in weights.layers for each in attrs.fields(type(layer))
    ]
    assert len(tensors) == 3 + 2 * 6
    model = Llama(config=tiny_config(), weights=weights)
    assert identity(model) == before
    for tensor in tensors:
        last = tensor.view(-1)[-1:]
        value = last.clone()
        last.add_(1.0)
        assert identity(model) != before
        last.copy_(value)
    assert identity(model) == before


def test_the_same_model_is_the_same_everywhere() -> None:
    assert identity(tiny_model()) == identity(tiny_model())
    said = tiny_config(visibilities=(FULL, FULL))
    assert identity(tiny_model(config=said)) == identity(tiny_model())


def test_another_order_of_the_groups_is_another_identity() -> None:
    """Blocks of group 0 then hold other layers, of the same shape."""
    model = tiny_model(config=windowed(24))
    first, second = make_groups(model.config.layer_visibilities, 16)
    assert identify(model, (first, second)) != identify(model, (second, first))
    assert identify(model, (Group(16),)) != identify(model, (first, second))


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


@pytest.fixture
def call(tmp_path: Path, backend: Backend) -> list[str]:
    """Return a greedy call of the tiny model, verified bit by bit."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    argv = ["--prompts", str(path), "--model", "tiny", "--max-tokens", "20", "--threads", "1"]
    return [*argv, "--backend", backend, "--json"]


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, dict[str, int]]:
    """Return the answers of a call that must verify them, and its figures."""
    assert command.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    summary = result["summary"]
    assert result["verified"]["rows of logits bit by bit"] == summary["generated_tokens"]
    assert summary["pages_failed"] == summary["pages_dropped"] == 0
    return result["answers"], summary


def assert_found_by_its_own_model(
    first: list[str],
    second: list[str],
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: tuple[int, int] = (0, 0),
) -> None:
    """Assert that of two calls on one directory neither loads nor touches the other's pages."""

    def run(argv: list[str], seed: int) -> tuple[Any, dict[str, int]]:
        monkeypatch.setattr(command, "tiny_model", partial(tiny_model, seed))
        return answer(argv, capsys)

    kept = ["--directory", str(path)]
    answers, _ = run([*first, *kept], seeds[0])
    files = {each: each.read_bytes() for each in path.rglob("*.kv")}
    assert files
    others, summary = run([*second, *kept], seeds[1])
    assert others == run(second, seeds[1])[0] != answers
    assert summary["blocks_loaded"] == 0
    assert summary["blocks_stored"] == len(list(path.rglob("*.kv"))) - len(files) > 0
    assert {each: each.read_bytes() for each in files} == files
    written = set(path.rglob("*.kv"))
    again, summary = run([*first, *kept], seeds[0])
    assert again == answers
    assert summary["blocks_loaded"] > 0
    assert set(path.rglob("*.kv")) == written


def test_another_window_finds_nothing(
    call: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow, wide = [*call, "--window", "24"], [*call, "--window", "64"]
    assert_found_by_its_own_model(narrow, wide, tmp_path / "blocks", capsys, monkeypatch)


@both_backends
def test_another_seed_finds_nothing(
    call: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "blocks"
    assert_found_by_its_own_model(call, call, path, capsys, monkeypatch, seeds=(0, 1))
