# SPDX-License-Identifier: Apache-2.0
"""`kvcore.compat` keeps the core in step with an engine's request objects.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import Config
from kvcore.compat import KVCacheManager, TokensChanged, request_registry
from kvcore.manager import KVCacheManager as Core
from kvcore.types.errors import (
    CountMismatch,
    EmptyTokens,
    InvalidCount,
    InvalidToken,
    WrongArgument,
)
from kvcore.types.values import Appended
from tests.compat.stories import CountingTokens, admit, finish, make, plain
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


def num_known(manager: KVCacheManager) -> int:
    """Count the requests that the core knows."""
    return len(manager.core.state().requests)


def test_only_new_tokens_cross_over(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[list[int]] = []
    add, append = manager.core.add_tokens, manager.core.append

    def add_tokens(name: str, tokens: list[int], *, num_rejected: int) -> None:
        crossed.append(tokens)
        add(name, tokens, num_rejected=num_rejected)

    def append_tokens(names: Sequence[str], tokens: Sequence[int]) -> Appended:
        crossed.append(list(tokens))
        return append(names, tokens)

    monkeypatch.setattr(manager.core, "add_tokens", add_tokens)
    monkeypatch.setattr(manager.core, "append", append_tokens)
    request, _ = admit(manager, "r", [1, 2, 3])
    for token in (4, 5):
        manager.new_step_starts()
        request.output.append(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    assert crossed == [[4], [5]]
    assert manager.core.num_tokens("r") == 5


def test_a_decoded_token_is_one_call_of_the_core(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = admit(manager, "r", [1, 2, 3])
    manager.new_step_starts()
    request.output.append(4)
    calls: list[str] = []
    for name in [each for each in dir(Core) if not each.startswith("_")]:
        if callable(requested := getattr(manager.core, name)):

            def counted(
                *given: Any, _name: str = name, _requested: Any = requested, **options: Any
            ) -> Any:
                calls.append(_name)
                return _requested(*given, **options)

            monkeypatch.setattr(manager.core, name, counted)
    assert manager.allocate_slots(request, 1) is not None
    manager.step_ends()
    request.num_computed_tokens += 1
    assert calls == ["append", "take_batch"]
    manager.new_step_starts()
    calls.clear()
    request.output.append(5)  # a block begins
    assert manager.allocate_slots(request, 1) is not None
    assert calls == ["append"]


@pytest.mark.parametrize("hashes", [None, []])
def test_a_prompt_without_tokens_has_no_hit_and_gets_no_slots(
    manager: KVCacheManager, hashes: list[bytes] | None
) -> None:
    request = plain("r", [], block_hashes=hashes)
    before = manager.core.encode()
    assert manager.get_computed_blocks(request) == (manager.empty_kv_cache_blocks, 0)
    with pytest.raises(EmptyTokens):
        manager.allocate_slots(request, 1)
    manager.free(request)
    assert manager.core.encode() == before


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_of_a_prompt_with_hashes_are_kept_if_the_engine_wants_them(
    backend: Backend, keep: bool
) -> None:
    manager = KVCacheManager(Config(9, 4), backend=backend, keep_tokens=keep)
    request = plain("r", list(range(1, 10)), block_hashes=[bytes(32), bytes([1] * 32)])
    assert manager.allocate_slots(request, 9) is not None
    request.num_computed_tokens = 9
    manager.new_step_starts()
    request.all_token_ids.append(6)
    request.num_tokens = 10
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    tokens = [*range(1, 10), 6] if keep else [0] * 10
    assert list(manager.core.state().requests["r"].tokens) == tokens
    assert manager.get_blocks("r").get_unhashed_block_ids() == [3]


def test_of_a_prompt_that_is_not_kept_only_the_last_token_is_read(backend: Backend) -> None:
    for caching in (False, True):
        config = Config(9, 4, enable_caching=caching)
        manager = KVCacheManager(config, backend=backend, keep_tokens=False)
        tokens = CountingTokens(range(1, 10))
        assert manager.allocate_slots(plain("r", tokens, block_hashes=[]), 9) is not None
        assert tokens.num_read == 1


def test_decoded_tokens_that_are_not_kept_are_not_read(backend: Backend) -> None:
    manager = KVCacheManager(Config(9, 4), backend=backend, keep_tokens=False)
    tokens = CountingTokens([1, 2, 3, 4, 5])
    request = plain("r", tokens, block_hashes=[bytes(32)])
    assert manager.allocate_slots(request, 5) is not None
    for number in range(6, 10):
        request.num_computed_tokens = number - 1
        manager.new_step_starts()
        tokens.append(-1)  # no token, and never looked at
        request.num_tokens = number
        if number % 4 == 0:
            request.block_hashes.append(bytes([number] * 32))
        assert manager.allocate_slots(request, 1) is not None
    assert tokens.num_read == 1
    assert manager.get_blocks("r").get_unhashed_block_ids() == [3]


def test_a_prompt_that_is_not_kept_must_have_its_tokens(backend: Backend) -> None:
    manager = KVCacheManager(Config(9, 4), backend=backend, keep_tokens=False)
    request = plain("r", [1, 2, 3, 4, 5], block_hashes=[])
    request.num_tokens = 10**13
    with pytest.raises(CountMismatch) as caught:
        manager.allocate_slots(request, 5)
    assert caught.value.fields["given"] == 5
    assert not manager.core.state().requests


def test_a_decode_step_with_bad_input_is_refused(manager: KVCacheManager) -> None:
    request, _ = admit(manager, "r", [1, 2, 3])
    manager.new_step_starts()
    request.output.append(4)  # inside a block
    before = manager.core.encode()
    wrong: Any = None
    for options in (
        {"num_new_computed_tokens": wrong},
        {"num_lookahead_tokens": wrong},
        {"num_external_computed_tokens": wrong},
    ):
        with pytest.raises(InvalidCount):
            manager.allocate_slots(request, 1, **options)
    assert manager.core.encode() == before


def test_a_decoding_request_with_too_few_tokens_is_refused(manager: KVCacheManager) -> None:
    tokens = [1, 2, 3]
    request = SimpleNamespace(
        request_id="r", num_tokens=3, num_computed_tokens=0, all_token_ids=tokens
    )
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    manager.new_step_starts()
    request.num_tokens = 4  # and no fourth token
    with pytest.raises(CountMismatch):
        manager.allocate_slots(request, 1)
    assert manager.core.num_computed_tokens("r") == 3


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("i", tokens)])
def test_tokens_are_read_from_any_kind_of_sequence(backend: Backend, kind: Any) -> None:
    manager = make(backend)
    assert manager.allocate_slots(plain("whole", kind([1, 2, 3, 4])), 4) is not None
    split = SimpleNamespace(
        request_id="split",
        num_tokens=5,
        num_computed_tokens=0,
        prompt_token_ids=kind([1, 2, 3]),
        output_token_ids=kind([4, 5]),
    )
    assert manager.get_computed_blocks(split)[1] == 4


def test_objects_that_are_no_requests_are_named(manager: KVCacheManager) -> None:
    for wrong in (
        SimpleNamespace(request_id="r", num_tokens=1),
        SimpleNamespace(request_id="r", num_tokens=1, num_computed_tokens=0),
    ):
        with pytest.raises(WrongArgument, match="an object with"):
            manager.get_computed_blocks(wrong)
    with pytest.raises(CountMismatch, match="given 2 tokens, expected 3"):
        manager.get_computed_blocks(plain("r", [1, 2], num_tokens=3))
    with pytest.raises(InvalidToken):
        manager.get_computed_blocks(plain("r", [1, -2]))
    assert num_known(manager) == 0


@pytest.mark.parametrize("caching", [True, False])
def test_ids_below_zero_are_taken_with_the_engines_hashes(caching: bool, backend: Backend) -> None:
    manager = make(backend, enable_caching=caching)
    request = plain("r", [1, -2, 3], block_hashes=[b"1" * 32] if caching else [])
    assert manager.allocate_slots(request, 3) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 3
    request.all_token_ids.append(-1)
    request.num_tokens += 1
    if caching:
        request.block_hashes.append(b"2" * 32)
    assert manager.allocate_slots(request, 1) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 4
    manager.free(request)
    other = plain("other", [1, -2, 3, -1, 9], block_hashes=list(request.block_hashes))
    assert manager.get_computed_blocks(other)[1] == (4 if caching else 0)


def test_what_is_finished_is_forgotten_and_what_rests_comes_back(
    manager: KVCacheManager,
) -> None:
    first, _ = admit(manager, "first", [1, 2, 3])
    manager.free(first)
    first.num_computed_tokens = 0
    assert num_known(manager) == 1
    assert manager.get_computed_blocks(first)[1] == 2
    for ended in ({"status": "FINISHED_ABORTED"}, {"is_finished": lambda: True}):
        request = plain("r", [1, 2, 3], **ended)
        assert manager.allocate_slots(request, 3) is not None
        assert num_known(manager) == 2
        manager.free(request)
        assert num_known(manager) == 1
    finish(manager, first)
    assert num_known(manager) == 0


def test_only_so_many_requests_rest(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_registry, "MAX_RESTING", 3)
    held, _ = admit(manager, "held", [1, 2, 3])
    waiting = [EngineRequest(f"w{number}", [1, 2, number]) for number in range(5)]
    for request in waiting:
        manager.get_computed_blocks(request)
    assert num_known(manager) == 4
    assert manager.get_block_ids("held") == ([1, 2],)
    # The oldest was forgotten and comes back; the youngest of the others stays.
    assert manager.get_computed_blocks(waiting[0])[1] == 2
    assert set(manager.core.state().requests) == {"held", "w0", "w3", "w4"}
    manager.get_computed_blocks(waiting[3])
    manager.get_computed_blocks(waiting[1])
    assert set(manager.core.state().requests) == {"held", "w0", "w1", "w3"}
    finish(manager, held)


def test_the_object_that_was_freed_is_the_one_that_comes_back(manager: KVCacheManager) -> None:
    admit(manager, "r", [1, 2, 3])
    freed = EngineRequest("r", [1, 2, 3], num_computed_tokens=3)
    manager.free(freed)
    freed.num_computed_tokens = 0
    blocks, num_hit = manager.get_computed_blocks(freed)
    assert manager.allocate_slots(freed, 1, num_hit, blocks) is not None
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.preempted_requests) == (1, 1)


@pytest.mark.parametrize("same_object", [False, True])
def test_a_resting_id_with_other_tokens_is_another_request(
    manager: KVCacheManager, same_object: bool
) -> None:
    first, _ = admit(manager, "r", [1, 2, 3, 4, 5])
    manager.free(first)
    other = first if same_object else EngineRequest("r", [1, 2, 9, 9, 5])
    other.num_computed_tokens = 0
    other.prompt = [1, 2, 9, 9, 8] if same_object else other.prompt
    assert manager.get_computed_blocks(other)[1] == 2


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 9], [1, 2, 9, 4, 5]])
def test_tokens_of_a_running_request_do_not_change(
    manager: KVCacheManager, tokens: list[int]
) -> None:
    request, table = admit(manager, "r", [1, 2, 3])
    manager.new_step_starts()
    before = manager.core.encode()
    request.prompt, request.num_computed_tokens = tokens, 2
    with pytest.raises(TokensChanged, match="free it first"):
        manager.allocate_slots(request, 1)
    assert manager.core.encode() == before
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(EngineRequest("other", [1, 2, 3]))[1] == 2
    assert manager.allocate_slots(request, len(tokens)) is not None
    assert len(table[0]) == 2
