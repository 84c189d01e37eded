# SPDX-License-Identifier: Apache-2.0
"""Engines whose weights have one name and whose models differ: none loads the other's pages."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.model.model import Llama

from kvcore import Config
from tests.runtime.far.kept import keep_in, settled
from tests.runtime.model.questions import DEEP_MODELS, model_of, requests

FIRST = model_of(DEEP_MODELS["full"])


def changed(**fields: Any) -> Llama:
    """Return the model with the same weights and another shape."""
    return attrs.evolve(FIRST, config=attrs.evolve(FIRST.config, **fields))


def answer(model: Llama, path: Path | None) -> tuple[tuple[int, ...], int]:
    """Answer a prompt; return its tokens, and how many pages were loaded."""
    config = Config(60, groups=make_groups(model.config.layer_visibilities, 16), hash_seed=b"same")
    exchange = None if path is None else (lambda engine: keep_in(path, engine))
    engine = Engine(model, config, exchange=exchange)
    engine.add_request(requests()[0])
    (done,) = engine.run()
    return done.tokens, 0 if path is None else settled(engine).num_loaded


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(changed(rope_theta=500.0), id="positions"),
        pytest.param(changed(rms_norm_eps=0.5), id="norms"),
        pytest.param(attrs.evolve(FIRST, invariant=not FIRST.invariant), id="mode"),
    ],
)
def test_pages_of_another_model_are_not_loaded(tmp_path: Path, other: Llama) -> None:
    pages = tmp_path / "pages"
    answer(FIRST, pages)
    assert answer(other, pages) == (answer(other, None)[0], 0)
    assert answer(FIRST, pages)[1] == (len(requests()[0].prompt) - 1) // 16


def test_a_model_with_longer_requests_has_the_same_pages(tmp_path: Path) -> None:
    answer(FIRST, tmp_path / "pages")
    longer = changed(max_model_len=2 * FIRST.config.max_model_len)
    assert answer(longer, tmp_path / "pages")[1] > 0
