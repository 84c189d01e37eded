# SPDX-License-Identifier: Apache-2.0
"""Configurations that cannot work are refused where they are made, with the number that would."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvcore import Config, Group, KVCacheManager, Refused, _twin
from kvcore.types.errors import BackendMissing, GroupsDoNotFit, InvalidConfig
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.helpers.stories import add, admit, make

POLICIES = "lru, uncached_first, queue_aware, lru2, s3fifo, learned, retention"
SIZES: list[tuple[dict[str, Any], str, str]] = [
    # One request needs a block; the null block is one more.
    ({"num_blocks": 0}, "0", "must be an integer of at least 1"),
    ({"num_blocks": -1}, "-1", "must be an integer of at least 1"),
    ({"num_blocks": 1}, "1", "one request needs 1 block and the null block, so 2"),
    ({"num_blocks": 1, "groups": (Group(4), Group(4)), "null_block": False}, "1", "needs 2 blocks"),
    # 33 tokens in blocks of 16 are three blocks per group.
    ({"num_blocks": 3, "max_model_len": 33}, "3", "needs 3 blocks and the null block, so 4"),
    ({"num_blocks": 2, "max_model_len": 33, "null_block": False}, "2", "needs 3 blocks, so 3"),
    (
        {"num_blocks": 6, "max_model_len": 33, "groups": (Group(16), Group(16))},
        "6",
        "max_model_len=33 tokens needs 6 blocks and the null block, so 7",
    ),
    ({"num_blocks": 2**31}, "2147483648", "must be at most 2147483647"),
    ({"num_blocks": 1.5}, "1.5", "must be an integer"),
    ({"num_blocks": True}, "True", "must be an integer"),
    ({"num_blocks": "8"}, "'8'", "must be an integer"),
]

OPTIONS: list[tuple[str, Any, str]] = [
    ("num_host_blocks", -1, "must be an integer of at least 0"),
    ("num_host_blocks", 2**31, "must be at most 2147483647"),
    ("num_host_blocks", None, "must be an integer of at least 0"),
    ("num_preallocate_tokens", -1, "must be an integer of at least 0"),
    ("max_model_len", 0, "must be an integer of at least 1"),
    ("max_model_len", -5, "must be an integer of at least 1"),
    ("max_model_len", "8", "must be an integer of at least 1"),
    ("max_num_batched_tokens", 0, "must be an integer of at least 1"),
    ("watermark_blocks", -1, "must be an integer of at least 0"),
    ("use_eagle", 1, "must be True or False"),
    ("record_new_blocks", "no", "must be True or False"),
    ("hide_salts", 1, "must be True or False"),
    ("hashing", "md5", "must be one of sha256, sha256_cbor, xxh3, siphash"),
    ("eviction", "mru", f"must be one of {POLICIES}"),
    ("eviction", None, f"must be one of {POLICIES}"),
    ("duplicates", "drop", "must be one of keep, merge"),
    ("enable_caching", 1, "must be True or False"),
    ("null_block", "yes", "must be True or False"),
    ("enable_events", None, "must be True or False"),
    ("hash_seed", "text", "must be bytes"),
    ("max_in_flight", -1, "must be an integer of at least 0"),
    ("max_in_flight", 63, "must be at most 62"),
    ("max_in_flight", True, "must be an integer of at least 0"),
    ("publish", "early", "must be one of scheduled, completed"),
]


@pytest.mark.parametrize(("options", "value", "reason"), SIZES)
def test_a_pool_that_cannot_hold_one_request_says_how_many_blocks_are_needed(
    options: dict[str, Any], value: str, reason: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Config(**options)
    assert caught.value.fields["field"] == "num_blocks"
    assert repr(caught.value.fields["value"]) == value
    assert reason in str(caught.value)


@pytest.mark.parametrize("options", [options for options, _, reason in SIZES if "so " in reason])
def test_the_pool_of_the_size_that_the_message_names_holds_the_longest_request(
    options: dict[str, Any], backend: Backend
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Config(**options)
    named = int(str(caught.value).rsplit("so ", 1)[1])
    length = options.get("max_model_len", 16)
    manager = KVCacheManager(Config(**{**options, "num_blocks": named}), backend)
    add(manager, "longest", range(length))
    admit(manager, "longest")
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize(("name", "value", "reason"), OPTIONS)
def test_an_option_out_of_its_range_is_named_with_its_value(
    name: str, value: Any, reason: str
) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidConfig) as caught:
        Config(8, 2, **options)
    check_error(caught.value, InvalidConfig(field=name, value=value, reason=reason))


@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5, True, None])
def test_a_block_holds_at_least_one_token(size: Any) -> None:
    expected = InvalidConfig(field="block_size", value=size, reason="must be from 1 to 2147483647")
    with pytest.raises(InvalidConfig) as caught:
        Config(8, size)
    check_error(caught.value, expected)
    with pytest.raises(InvalidConfig) as caught:
        Config(8, groups=(Group(size),))
    check_error(caught.value, expected)


POLICY = "hits inside blocks need the eviction policy lru or uncached_first"
UNITS: list[tuple[dict[str, Any], str]] = [
    ({"hash_block_size": 0}, "must be an integer of at least 1"),
    ({"hash_block_size": -1}, "must be an integer of at least 1"),
    ({"hash_block_size": True}, "must be an integer of at least 1"),
    ({"hash_block_size": "x"}, "must be an integer of at least 1"),
    ({"hash_block_size": 1.5}, "must be an integer of at least 1"),
    (
        {"hash_block_size": 3},
        "must divide the block sizes, whose greatest common divisor is 4",
    ),
    (
        {"hash_block_size": 8},
        "must divide the block sizes, whose greatest common divisor is 4",
    ),
    *(
        ({"hash_block_size": 2, "eviction": name}, POLICY)
        for name in ("queue_aware", "lru2", "s3fifo", "learned", "retention")
    ),
    (
        {"hash_block_size": 2, "max_model_len": 8, "floors": {"a": 1}},
        "hits inside blocks cannot be combined with floors",
    ),
]


@pytest.mark.parametrize(("options", "reason"), UNITS)
def test_hits_cannot_end_at_multiples_of_a_number_that_does_not_fit(
    options: dict[str, Any], reason: str
) -> None:
    value = options["hash_block_size"]
    with pytest.raises(InvalidConfig) as caught:
        Config(8, groups=(Group(4), Group(12)), **options)
    check_error(caught.value, InvalidConfig(field="hash_block_size", value=value, reason=reason))


@pytest.mark.parametrize("eviction", ["queue_aware", "retention"])
def test_the_default_given_as_a_number_is_the_default(eviction: Any) -> None:
    """Also beside options that exclude hits inside blocks."""
    groups = (Group(4), Group(12))
    given = Config(9, groups=groups, hash_block_size=4, eviction=eviction, hash_seed=b"")
    assert given == Config(9, groups=groups, eviction=eviction, hash_seed=b"")
    assert (given.hash_block_size, given.has_tails, given.hit_alignment) == (4, False, 12)


FLOORS: list[tuple[dict[str, Any], Any, str]] = [
    ({"floors": 3}, 3, "must be a mapping of salts to blocks"),
    ({"floors": {"a": 0}}, [0], "each must be an integer from 1 to 2147483647"),
    ({"floors": {"a": 2**31}}, [2**31], "each must be an integer from 1 to 2147483647"),
    ({"floors": {"a": 1.5}}, [1.5], "each must be an integer from 1 to 2147483647"),
    ({"floors": {"a": True}}, [True], "each must be an integer from 1 to 2147483647"),
    ({"floors": {"": 1}}, [1], "each is for a cache salt, a text that is not empty"),
    ({"floors": {"\ud800": 1}}, [1], "each is for a cache salt, a text that is not empty"),
    ({"floors": {7: 1}}, [1], "each is for a cache salt, a text that is not empty"),
    ({"floors": dict.fromkeys("abcdefghijklmnopq", 1)}, [1] * 17, "at most 16 floors"),
    ({"floors": {"b": 2, "a": 1}}, [1, 2], "needs max_model_len: one request must fit beside the"),
    # 7 usable blocks of two tokens: 4 for the request, 3 are left.
    (
        {"floors": {"a": 2, "b": 2}, "max_model_len": 8},
        [2, 2],
        "beside them one request of max_model_len=8 tokens needs 4 blocks of 7",
    ),
    (
        {"floors": {"a": 2}, "max_model_len": 8, "max_pinned_blocks": 2},
        [2],
        "beside them and 2 pinned blocks one request of max_model_len=8 tokens needs 4 blocks of 7",
    ),
]


@pytest.mark.parametrize(("options", "value", "reason"), FLOORS)
def test_floors_that_cannot_be_kept_are_refused_without_their_salts(
    options: dict[str, Any], value: Any, reason: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Config(8, 2, **options)
    assert (caught.value.fields["field"], caught.value.fields["value"]) == ("floors", value)
    assert reason in str(caught.value)


def test_floors_leave_fewer_blocks_to_pins_that_have_no_number_of_their_own() -> None:
    assert Config(17, 2, max_model_len=16).most_pinned == 4
    assert Config(17, 2, max_model_len=16, floors={"a": 3, "b": 3}).most_pinned == 2


WINDOW_GROUPS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"kind": "sliding_window", "window": 0}, "window", 0, "needs 1 to 2147483647 tokens"),
    ({"kind": "sliding_window", "window": -4}, "window", -4, "needs 1 to 2147483647 tokens"),
    ({"kind": "sliding_window"}, "window", None, "needs 1 to 2147483647 tokens"),
    ({"kind": "chunked_local", "window": 1.5}, "window", 1.5, "needs 1 to 2147483647 tokens"),
    ({"window": 4}, "window", 4, "a full_attention group has none"),
    ({"kind": "mla", "window": 4}, "window", 4, "a mla group has none"),
    ({"kind": "ring"}, "kind", "ring", "must be one of full_attention, mla, sliding_window"),
    ({"eagle": 1}, "eagle", 1, "must be True or False"),
    ({"zero_new_blocks": None}, "zero_new_blocks", None, "must be True or False"),
    ({"page_bytes": 0}, "page_bytes", 0, "must be at least 1"),
    ({"page_bytes": 2**63}, "page_bytes", 2**63, "must be at least 1"),
    ({"kind": "state", "window": 4}, "window", 4, "a state group has none"),
    ({"kind": "state", "draft_states": -1}, "draft_states", -1, "must be an integer of at least 0"),
    ({"kind": "state", "draft_states": 4}, "draft_states", 4, "must be smaller than block_size=4"),
    ({"draft_states": 1}, "draft_states", 1, "a full_attention group has none"),
    ({"kind": "state", "eagle": True}, "eagle", True, "a state group has no hit block to drop"),
]


@pytest.mark.parametrize(("options", "field", "value", "reason"), WINDOW_GROUPS)
def test_a_group_that_cannot_work_names_its_field(
    options: dict[str, Any], field: str, value: Any, reason: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Group(4, **options)
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (field, value)
    assert reason in str(caught.value)


def test_a_block_has_sixteen_tokens_unless_told_otherwise() -> None:
    assert Group().block_size == Config(8).block_size == 16


@pytest.mark.parametrize("option", ["mla", 8, True])
def test_the_options_of_a_group_have_names(option: Any) -> None:
    with pytest.raises(TypeError):
        Group(4, option)  # type: ignore[call-arg] # the error that is asked for


TOGETHER: list[tuple[tuple[Group, ...], dict[str, Any], str]] = [
    ((Group(4, kind="sliding_window", window=8),), {"null_block": False}, "needs the null block"),
    ((Group(4), Group(4, kind="state")), {"null_block": False}, "state group needs the null block"),
    ((Group(4), Group(4, kind="cross_attention")), {}, "set enable_caching=False"),
    ((Group(4, kind="cross_attention"),), {"enable_caching": False}, "needs a group beside it"),
    ((Group(4, eagle=True),), {}, "flagged eagle, but use_eagle is off"),
    ((Group(2**30 - 1), Group(2**30)), {}, "the least common multiple"),
]


@pytest.mark.parametrize(("groups", "options", "reason"), TOGETHER)
def test_groups_and_options_that_exclude_each_other_are_refused(
    groups: tuple[Group, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Config(8, groups=groups, **options)
    assert caught.value.fields["field"] == "groups"
    assert reason in str(caught.value)


def test_groups_with_blocks_of_different_bytes_are_named_with_their_sizes() -> None:
    groups = (Group(4, page_bytes=512), Group(4), Group(8, page_bytes=1024))
    with pytest.raises(GroupsDoNotFit) as caught:
        Config(8, groups=groups)
    check_error(caught.value, GroupsDoNotFit(groups=[0, 2], sizes=[512, 1024]))
    Config(8, groups=(Group(4, page_bytes=512), Group(4), Group(8, page_bytes=512)))


def test_a_windowed_group_needs_no_more_than_its_window_and_a_step() -> None:
    # 100 tokens, 4 per step, a window of 8: of blocks of 4 tokens min(7 + 4, 100) fill three, and
    # one
    # more since the window need not begin where a block does.
    window = Group(4, kind="sliding_window", window=8)
    Config(5, groups=(window,), max_model_len=100, max_num_batched_tokens=4)
    with pytest.raises(InvalidConfig, match="needs 4 blocks and the null block, so 5"):
        Config(4, groups=(window,), max_model_len=100, max_num_batched_tokens=4)
    # A chunk of 8 and 4 per step fill three blocks, and begin where a block does.
    chunk = Group(4, kind="chunked_local", window=8)
    Config(4, groups=(chunk,), max_model_len=100, max_num_batched_tokens=4)
    with pytest.raises(InvalidConfig, match="needs 3 blocks and the null block, so 4"):
        Config(3, groups=(chunk,), max_model_len=100, max_num_batched_tokens=4)


def test_a_chunk_that_starts_within_a_block_takes_one_more(backend: Backend) -> None:
    # Chunks of 5 in blocks of 4, 3 tokens per step: at 14 the chunk begins at 10, so positions 8 to
    # 16 are held, three blocks, whereas 5 + 3 tokens would fill two.
    chunk = Group(4, kind="chunked_local", window=5)
    options: dict[str, Any] = {"max_model_len": 100, "max_num_batched_tokens": 3}
    with pytest.raises(InvalidConfig, match="needs 3 blocks"):
        Config(3, groups=(chunk,), **options)
    manager = make(backend, 4, groups=(chunk,), **options)
    add(manager, "long", range(100))
    for count in (3, 3, 3, 3, 2, 3, *[3] * 27, 2):
        assert not isinstance(manager.allocate_slots("long", count), Refused)
        manager.take_batch()
    assert manager.num_computed_tokens("long") == 100


def test_a_seed_of_vllm_hashes_is_text() -> None:
    Config(8, 2, hashing="sha256_cbor", hash_seed="größer".encode())
    with pytest.raises(InvalidConfig, match="must be UTF-8 text for sha256_cbor"):
        Config(8, 2, hashing="sha256_cbor", hash_seed=b"\xff")


def test_more_groups_than_a_table_has_columns_are_refused() -> None:
    Config(66, groups=(Group(4),) * 64)
    with pytest.raises(InvalidConfig, match="at most 64 groups"):
        Config(66, groups=(Group(4),) * 65)


def test_a_config_is_not_changed_after_it_was_checked() -> None:
    config = Config(8, 2)
    with pytest.raises(AttributeError):
        config.num_blocks = 0  # type: ignore[misc] # that is what is tested


def test_a_manager_without_length_limit_takes_any_request_and_refuses_by_blocks(
    backend: Backend,
) -> None:
    # Three usable blocks of two tokens: seven tokens need four, which no waiting brings.
    manager = make(backend, 4)
    add(manager, "long", range(7))
    assert manager.can_allocate("long", 6).value == "ok"
    assert manager.can_allocate("long", 7).value == "never"


@pytest.mark.parametrize("name", ["cuda", "Rust", "python "])
def test_an_unknown_backend_is_named_with_those_that_there_are(name: Any) -> None:
    with pytest.raises(BackendMissing) as caught:
        KVCacheManager(Config(8, 2), name)
    reason = 'the backends are "rust" and "python"'
    check_error(caught.value, BackendMissing(backend=name, reason=reason))


def test_a_missing_twin_is_named_with_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_twin, "_missing", True)
    with pytest.raises(BackendMissing, match=r"'rust' is not available: .*`make twin` builds it"):
        KVCacheManager(Config(8, 2), "rust")


def test_without_the_twin_the_default_is_python_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_twin, "_missing", True)
    with pytest.warns(RuntimeWarning, match="the slow Python core is used"):
        assert KVCacheManager(Config(8, 2)).backend == "python"


def test_a_watermark_that_lets_nobody_in_is_refused() -> None:
    # Four blocks hold 64 tokens, and five stay free: with the null block ten.
    Config(10, 16, max_model_len=64, watermark_blocks=5)
    with pytest.raises(InvalidConfig, match="needs 4 blocks and the null block, 5 stay free, so 1"):
        Config(9, 16, max_model_len=64, watermark_blocks=5)
    with pytest.raises(InvalidConfig, match="needs 1 block and the null block, 9 stay free, so 11"):
        Config(10, 16, watermark_blocks=9)


def test_a_block_size_that_contradicts_the_groups_is_refused() -> None:
    assert Config(8, groups=(Group(32),)).block_size == 32
    assert Config(8, 32, groups=(Group(32),)).block_size == 32
    for size in (4, 16):
        with pytest.raises(InvalidConfig, match="the first group has 32 tokens per block"):
            Config(8, size, groups=(Group(32),))
    with pytest.raises(InvalidConfig, match="the first group has 16 tokens per block"):
        attrs.evolve(Config(8), block_size=4)
