# SPDX-License-Identifier: Apache-2.0
"""The shares of a model add up to it, and what cannot be shared is refused."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from kvcore_runtime.attention.delta_rule import DeltaShape
from kvcore_runtime.attention.visibility import FULL, STATE
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.contiguous import generate_reference
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.ranks.errors import NotLed, UnevenShard
from kvcore_runtime.ranks.leader import Leader
from kvcore_runtime.ranks.shard import pad_heads, shard

from kvcore import Config, Group

PROMPT = tuple(b"Where is the gold?")


def model(**sizes: Any) -> Llama:
    return tiny_model(config=attrs.evolve(tiny_config(), **sizes), dtype=torch.float64)


def logits(of: Llama) -> torch.Tensor:
    sampling = Sampling(temperature=0.0, max_tokens=4)
    found = generate_reference(of, [PROMPT], [sampling], keep_logits=True)[0].logits
    assert found is not None
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_each_layers_parts_add_up_to_the_layer(world: int) -> None:
    whole = model(visibilities=(FULL, STATE))
    shares = [shard(whole, rank, world) for rank in range(world)]
    x = torch.randn(5, whole.config.hidden_size, dtype=torch.float64)
    for number, layer in enumerate(whole.weights.layers):
        parts = [share._mlp(share.weights.layers[number], x) for share in shares]
        torch.testing.assert_close(sum(parts), whole._mlp(layer, x))
    sizes = [share.config.num_kv_heads for share in shares]
    assert sizes == [whole.config.num_kv_heads // world] * world
    assert {share.config.state_parts(share.dtype)[0].shape[0] for share in shares} == set(sizes)


def test_heads_of_zeros_change_no_answer() -> None:
    whole = model(num_heads=6, num_kv_heads=3, visibilities=(FULL, STATE))
    padded = pad_heads(whole, 2)
    assert (padded.config.num_heads, padded.config.num_kv_heads) == (8, 4)
    # States are float32, and how their products are summed depends on the number of heads.
    torch.testing.assert_close(logits(padded), logits(whole), rtol=1.3e-6, atol=1e-5)
    assert pad_heads(whole, 3) is whole


@pytest.mark.parametrize(
    ("sizes", "world", "reason"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "key-value heads 3 .* over 2 ranks"),
        ({"num_heads": 3, "num_kv_heads": 3}, 2, "query heads 3 .* over 2 ranks"),
        ({}, 0, "query heads 4 .* over 0 ranks"),
        ({"intermediate_size": 127}, 2, "inner size 127 .* over 2 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(sizes: dict[str, int], world: int, reason: str) -> None:
    with pytest.raises(UnevenShard, match=reason):
        shard(model(**sizes), 0, world)


def test_ranks_do_not_share_delta_nets() -> None:
    delta = DeltaShape(num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=4, kernel_size=2)
    shape = attrs.evolve(tiny_config(visibilities=(FULL, STATE)), delta=delta)
    whole = tiny_model(config=shape)
    with pytest.raises(UnsupportedModelFile, match=r"delta is DeltaShape.* ranks share"):
        shard(whole, 0, 2)
    with pytest.raises(UnsupportedModelFile, match=r"delta is DeltaShape.* ranks share"):
        pad_heads(whole, 3)


def test_engines_that_others_cannot_follow_are_refused() -> None:
    links: object = None
    ahead = Engine(tiny_model(), Config(9, max_in_flight=1), EngineOptions(token_budget=32))
    with pytest.raises(NotLed, match="max_in_flight must be 0"):
        Leader(ahead, links)  # type: ignore[arg-type] # refused before it is looked at
    shape = tiny_config(visibilities=(FULL, STATE))
    groups = (Group(8), Group(8, kind="state", draft_states=2))
    options = EngineOptions(token_budget=32, drafter=PromptLookup())
    drafting = Engine(tiny_model(config=shape), Config(12, groups=groups), options)
    with pytest.raises(NotLed, match="drafts beside states"):
        Leader(drafting, links)  # type: ignore[arg-type]
