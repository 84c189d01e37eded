# SPDX-License-Identifier: Apache-2.0
"""Models with states: sizes by hand, which layer keeps what, and what is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcore import KVCacheManager, Request
from kvcore.sizing import (
    AttentionSpec,
    Limits,
    StateLayer,
    StateSpec,
    make_layer_specs,
    make_manager_config,
    read_model,
    size_model,
    to_json,
    to_text,
)
from kvcore.sizing.errors import (
    ContradictoryFields,
    HeadsDoNotSplit,
    InvalidField,
    MissingField,
    NoInterval,
    SizingError,
    UnevenHashes,
    UnsupportedModel,
)
from kvcore.types.errors import InvalidCount, KvcoreError
from tests.conftest import Backend
from tests.sizing.models import CONFIGS, HYBRIDS, write

GIB = 2**30
LIMITS = Limits(max_model_len=32768, null_block=True)


@attrs.frozen
class Figures:
    """By hand. token_bytes: of a layer of attention. state_bytes: of a layer's state. block_size:
    least multiple of 16 tokens whose bytes reach a state. layers, groups: attention, then states.
    """

    token_bytes: int
    state_bytes: int
    block_size: int
    layers: tuple[int, int]
    groups: tuple[int, int]


FIGURES = {
    # Key and value * heads * size * bytes; inputs of the convolution * positions * bytes, and the
    # recurrent part: heads * size * state * bytes.
    "qwen3-next-80b-a3b": Figures(
        2 * 2 * 256 * 2,
        (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 2,
        544,
        (12, 36),
        (1, 3),
    ),
    "nemotron-h-8b": Figures(
        2 * 8 * 128 * 2,
        (128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4,
        1040,
        (4, 24),
        (1, 6),
    ),
    "jamba-v0.1": Figures(2 * 8 * 128 * 2, 8192 * 3 * 2 + 8192 * 16 * 2, 80, (4, 28), (1, 7)),
    "falcon-h1-7b": Figures(
        2 * 2 * 128 * 2,
        (24 * 128 + 2 * 1 * 256) * 3 * 2 + 24 * 128 * 256 * 2,
        1568,
        (44, 44),
        (1, 1),
    ),
    "granite-4.0-h-small": Figures(
        2 * 8 * 128 * 2,
        (128 * 64 + 2 * 1 * 128) * 3 * 2 + 128 * 64 * 128 * 2,
        528,
        (4, 36),
        (1, 9),
    ),
    "lfm2-1.2b": Figures(2 * 8 * 64 * 2, 2048 * 2 * 2, 16, (6, 10), (3, 5)),
}


def size(path: Path, **options: Any) -> dict[str, Any]:
    return to_json(size_model(read_model(path), 80 * GIB, LIMITS, **options))


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_example_comes_to_its_figures(name: str) -> None:
    figures, path = FIGURES[name], CONFIGS / f"{name}.json"
    assert (figures.block_size - 16) * figures.token_bytes < figures.state_bytes
    assert figures.block_size * figures.token_bytes >= figures.state_bytes
    specs = make_layer_specs(read_model(path)).values()
    attention = [each for each in specs if isinstance(each, AttentionSpec)]
    states = [each for each in specs if isinstance(each, StateSpec)]
    assert {each.token_bytes for each in attention} == {figures.token_bytes}
    assert {each.state_bytes for each in states} == {figures.state_bytes}
    assert (len(attention), len(states)) == figures.layers
    report = size(path)
    assert {group["block_size"] for group in report["groups"]} == {figures.block_size}
    counted = Counter(group["kind"] for group in report["groups"])
    assert (counted["full_attention"], counted["state"]) == figures.groups
    assert not any(group["num_empty_slots"] for group in report["groups"])
    page = figures.block_size * figures.token_bytes
    assert report["block_bytes"] == page * max(
        len(group["layer_names"]) for group in report["groups"]
    )
    padding = {group["padding_bytes"] for group in report["groups"] if group["kind"] == "state"}
    assert padding == {page - figures.state_bytes}
    full = -(-32768 // figures.block_size) * figures.groups[0]
    assert report["blocks_per_request"] == full + 2 * figures.groups[1]
    assert report["token_bytes"] == figures.token_bytes * figures.layers[0]


def test_a_recurrent_state_in_float32_needs_longer_blocks(tmp_path: Path) -> None:
    base = json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text())
    report = size(write(tmp_path, base, mamba_ssm_dtype="float32"))
    assert {group["block_size"] for group in report["groups"]} == {1056}


def test_states_are_kept_as_often_as_is_said() -> None:
    report = size(CONFIGS / "jamba-v0.1.json", checkpoint_interval=4096)
    sizes = {group["kind"]: group["block_size"] for group in report["groups"]}
    assert sizes == {"full_attention": 80, "state": 4096}


def test_the_text_says_what_states_take_and_lose() -> None:
    text = to_text(size_model(read_model(CONFIGS / "jamba-v0.1.json"), 80 * GIB, LIMITS))
    lost = 1 - 311_296 / 327_680
    assert "jamba: 32 layers that keep something, cache in bfloat16" in text
    assert f"state: 28 layers, 311,296 bytes per state, {lost:.1%} of its block lost" in text
    assert "its states 14 of these blocks, 17.50 MiB" in text


def test_devices_share_the_heads_of_a_state_and_copy_groups_that_do_not_split() -> None:
    model = read_model(CONFIGS / "falcon-h1-7b.json")
    specs = make_layer_specs(model, tensor_parallel=2).values()
    sizes = {each.state_bytes for each in specs if isinstance(each, StateSpec)}
    assert sizes == {(12 * 128 + 2 * 1 * 256) * 3 * 2 + 12 * 128 * 256 * 2}
    with pytest.raises(HeadsDoNotSplit, match="5"):
        make_layer_specs(model, tensor_parallel=5)


def test_a_layer_may_keep_both() -> None:
    model = read_model(CONFIGS / "falcon-h1-7b.json")
    assert model.names[:3] == (
        "layers.0.full_attention",
        "layers.0.state",
        "layers.1.full_attention",
    )


def test_a_manager_gets_a_group_of_states_for_each_group(backend: Backend) -> None:
    """LFM2 has 3 groups of attention and 5 of states; without limits.null_block, too."""
    limits = Limits(max_model_len=40)
    report = size_model(read_model(CONFIGS / "lfm2-1.2b.json"), 32 * 2**16, limits)
    config = make_manager_config(report.config, limits)
    assert (config.num_blocks, config.null_block) == (32, True)
    assert [group.kind for group in config.groups] == ["full_attention"] * 3 + ["state"] * 5
    assert {group.page_bytes for group in config.groups} == {2 * 16 * 2048}
    manager = KVCacheManager(config, backend)
    manager.add_request(Request("r", range(40)))
    assert manager.allocate_slots("r", 32)
    assert manager.num_free_blocks == 31 - (3 * 2 + 5)
    manager.take_batch()
    assert manager.allocate_slots("r", 8)
    assert 31 - manager.num_free_blocks == report.blocks_per_request == 3 * 3 + 5 * 2


@pytest.mark.parametrize("interval", [None, 160])
def test_hits_end_inside_the_large_blocks_of_attention(interval: int | None) -> None:
    report = size_model(
        read_model(CONFIGS / "jamba-v0.1.json"), 80 * GIB, LIMITS, checkpoint_interval=interval
    )
    config = make_manager_config(report.config, LIMITS)
    assert (config.has_tails, config.hash_block_size) == (True, 16)
    assert report.hit_alignment == config.hit_alignment == to_json(report)["hit_alignment"] == 16
    line = (
        "hits       end at multiples of 16 tokens, inside blocks too (hash_block_size=16),"
        " where a state was kept"
    )
    assert line in to_text(report).splitlines()


def test_hashes_that_fill_all_blocks_leave_hits_at_whole_blocks_unless_fewer_are_said() -> None:
    """16 is the most that divides 80 and 4,096: hits inside blocks need hashes of fewer tokens."""
    model = read_model(CONFIGS / "jamba-v0.1.json")
    report = size_model(model, 80 * GIB, LIMITS, checkpoint_interval=4096)
    config = make_manager_config(report.config, LIMITS)
    assert (config.has_tails, config.hash_block_size) == (False, 16)
    assert report.hit_alignment == config.hit_alignment == 80
    report = size_model(model, 80 * GIB, LIMITS, checkpoint_interval=4096, hash_block_size=8)
    config = make_manager_config(report.config, LIMITS)
    assert (config.has_tails, report.hit_alignment, config.hit_alignment) == (True, 8, 8)


@pytest.mark.parametrize(("given", "error"), [(48, UnevenHashes), (0, InvalidCount)])
def test_a_hash_fills_every_block(given: int, error: type[KvcoreError]) -> None:
    model = read_model(CONFIGS / "jamba-v0.1.json")
    with pytest.raises(error, match=str(given)):
        size_model(model, 80 * GIB, LIMITS, hash_block_size=given)


def test_hits_end_at_whole_blocks_if_a_hash_is_said_to_be_a_block() -> None:
    model = read_model(CONFIGS / "jamba-v0.1.json")
    report = size_model(model, 80 * GIB, LIMITS, hash_block_size=80)
    config = make_manager_config(report.config, LIMITS)
    assert (config.has_tails, config.hit_alignment, report.hit_alignment) == (False, 80, 80)
    line = "hits       end at multiples of 80 tokens, where a state was kept"
    assert line in to_text(report).splitlines()
    partial = size_model(model, 80 * GIB, LIMITS).config
    assert make_manager_config(partial, LIMITS, hash_block_size=None).hit_alignment == 80


def test_blocks_that_are_no_larger_for_their_states_are_hit_whole() -> None:
    report = size_model(read_model(CONFIGS / "lfm2-1.2b.json"), 80 * GIB, LIMITS)
    config = make_manager_config(report.config, LIMITS)
    assert (report.hit_alignment, config.hit_alignment, config.has_tails) == (16, 16, False)


def test_a_short_prompt_is_hit_by_the_manager_of_a_sized_model(backend: Backend) -> None:
    """240 tokens end inside the first block of Qwen3-Next, which has 544."""
    limits = Limits(max_model_len=1024, null_block=True, num_blocks=64)
    report = size_model(read_model(CONFIGS / "qwen3-next-80b-a3b.json"), 80 * GIB, limits)
    manager = KVCacheManager(make_manager_config(report.config, limits), backend)
    manager.add_request(Request("first", [*range(240), 1000]))
    advised = manager.checkpoint_stop("first", 241)
    assert advised == (240, True)
    assert manager.allocate_slots("first", 240, checkpoint=True)
    manager.take_batch()
    manager.add_request(Request("second", [*range(240), 2000, 2001]))
    assert manager.get_computed_blocks("second").num_tokens == 240


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_not_verified_is_said(name: str) -> None:
    report = size_model(read_model(CONFIGS / f"{name}.json"), 80 * GIB, LIMITS)
    unverified = name not in ("qwen3-next-80b-a3b", "jamba-v0.1")
    said = [note for note in report.notes if "not verified against the published" in note]
    assert len(said) == unverified
    assert all(f"note       {note}" in to_text(report).splitlines() for note in said)


def test_states_alone_need_an_interval(tmp_path: Path) -> None:
    base = json.loads((CONFIGS / "lfm2-1.2b.json").read_text())
    model = read_model(write(tmp_path, base, full_attn_idxs=[99]))
    with pytest.raises(NoInterval, match="--checkpoint-interval"):
        size_model(model, GIB, LIMITS)
    report = to_json(size_model(model, GIB, LIMITS, checkpoint_interval=64))
    assert {group["block_size"] for group in report["groups"]} == {64}


def test_both_ways_of_writing_a_pattern_are_read(tmp_path: Path) -> None:
    base = json.loads((CONFIGS / "nemotron-h-8b.json").read_text())
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    listed = [names[letter] for letter in base["hybrid_override_pattern"]]
    other = write(
        tmp_path,
        base,
        hybrid_override_pattern=...,
        num_hidden_layers=...,
        layers_block_type=listed,
    )
    model, same = read_model(other), read_model(CONFIGS / "nemotron-h-8b.json")
    assert (model.names, model.layers) == (same.names, same.layers)
    assert [isinstance(each, StateLayer) for each in same.layers].count(True) == 24


def test_a_head_size_that_is_automatic_follows_from_the_inner_size(tmp_path: Path) -> None:
    base = json.loads((CONFIGS / "granite-4.0-h-small.json").read_text())
    found = read_model(write(tmp_path, base, mamba_d_head="auto"))
    assert found.layers == read_model(CONFIGS / "granite-4.0-h-small.json").layers


@pytest.mark.parametrize(
    ("name", "changes", "error", "reason"),
    [
        (
            "granite-4.0-h-small",
            {"layer_types": ["retnet"] * 40},
            UnsupportedModel,
            r'layer_types\[0\] is "retnet": known are full_.*model_type is "granitemoehybrid"',
        ),
        (
            "nemotron-h-8b",
            {"hybrid_override_pattern": "MX"},
            UnsupportedModel,
            r'hybrid_override_pattern\[1\] is "X": known are M, \*, -, E',
        ),
        (
            "granite-4.0-h-small",
            {"layer_types": ["mamba"] * 39},
            ContradictoryFields,
            "39 items for 40 layers",
        ),
        ("lfm2-1.2b", {"full_attn_idxs": ...}, MissingField, "layer_types"),
        ("granite-4.0-h-small", {"layer_types": []}, MissingField, "says what each layer keeps"),
        ("lfm2-1.2b", {"conv_L_cache": ...}, MissingField, "conv_L_cache"),
        ("jamba-v0.1", {"attn_layer_period": ...}, MissingField, "attn_layer_period"),
        ("jamba-v0.1", {"mamba_d_state": "many"}, InvalidField, "mamba_d_state"),
        ("qwen3-next-80b-a3b", {"linear_key_head_dim": 0}, InvalidField, "linear_key_head_dim"),
        ("falcon-h1-7b", {"mamba_d_ssm": 3000}, ContradictoryFields, "24 heads of 128 are 3072"),
        ("nemotron-h-8b", {"mamba_ssm_cache_dtype": "int3"}, InvalidField, "float32"),
    ],
)
def test_what_cannot_be_sized_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], error: type[SizingError], reason: str
) -> None:
    base = json.loads((CONFIGS / f"{name}.json").read_text())
    with pytest.raises(error, match=reason):
        read_model(write(tmp_path, base, **changes))
