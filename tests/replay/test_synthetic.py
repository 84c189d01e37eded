# SPDX-License-Identifier: Apache-2.0
"""Generated traces: valid, repeatable, and with the sharing that their kind promises."""

from __future__ import annotations

import io
from itertools import islice, pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.replay.errors import InvalidReplayOption
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.synthetic import KINDS, OUTPUT_MAX, PROMPT_MAX, generate, to_lines
from kvcore.replay.trace_facts import Counting
from kvcore.replay.workload import TraceRequest
from kvcore.types.errors import InvalidCount

NAMES = st.sampled_from(sorted(KINDS))
SEEDS = st.integers(0, 2**70)


@settings(max_examples=40)
@given(NAMES, SEEDS, st.integers(1, 120), st.sampled_from([None, 0.01, 50.0]))
def test_our_own_reader_reads_what_was_made(
    kind: str, seed: int, num_requests: int, rate: float | None
) -> None:
    made = list(generate(kind, num_requests, seed, sessions_per_second=rate))
    assert len(made) == num_requests
    assert list(TraceReader(io.BytesIO(b"".join(to_lines(made))))) == made
    for request in made:
        assert request.prompt_len <= PROMPT_MAX
        assert 1 <= request.output_len <= OUTPUT_MAX


@settings(max_examples=20)
@given(NAMES, SEEDS, st.integers(1, 60))
def test_the_same_seed_gives_the_same_bytes(kind: str, seed: int, num_requests: int) -> None:
    first, second = (list(to_lines(generate(kind, num_requests, seed))) for _ in range(2))
    assert first == second
    assert list(to_lines(generate(kind, num_requests, seed + 1))) != first
    assert list(to_lines(islice(generate(kind, num_requests + 9, seed), num_requests))) == first


@settings(max_examples=20)
@given(NAMES, SEEDS)
def test_an_id_has_one_prefix_and_one_length(kind: str, seed: int) -> None:
    """Equal ids mean equal prefixes, as in Mooncake's own traces."""
    before: dict[int, tuple[int | None, int]] = {}
    for request in generate(kind, 150, seed):
        ids = list(request.hash_ids)
        for place, each in enumerate(ids):
            num_tokens = min(512, request.prompt_len - 512 * place)
            reported = (ids[place - 1] if place else None, num_tokens)
            assert before.setdefault(each, reported) == reported


def made(kind: str) -> list[TraceRequest]:
    return list(generate(kind, 2000, 11))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_lengths_and_times_are_spread_as_in_life(kind: str) -> None:
    """Means are above medians, and arrivals are neither together nor at equal distances."""
    requests = made(kind)
    for lengths in (
        [each.prompt_len for each in requests],
        [each.output_len for each in requests],
    ):
        assert sum(lengths) / len(lengths) > median(lengths)
        assert max(lengths) > 3 * median(lengths)
    times = [each.arrival for each in requests]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= 0
    assert max(gaps) > 4 * median(gaps) > 0


def repeat_rate(requests: list[TraceRequest]) -> float:
    """Return the share of the ids whose prefix came before."""
    counting = Counting(512)
    counting.read(requests)
    facts = counting.facts("made", 0)
    return facts.repeated_ids / facts.num_ids


def test_shared_prompts_are_found_up_to_the_system_prompt() -> None:
    requests = made("shared")
    firsts = {each.hash_ids[0] for each in requests if len(each.hash_ids) > 6}
    assert len(firsts) <= 8
    assert 0.4 < repeat_rate(requests) < 0.9


def test_a_conversation_grows_by_its_own_prompt() -> None:
    """Some prompt begins with another one, up to all its full chunks."""
    requests = made("turns")
    full = {tuple(each.hash_ids[: each.prompt_len // 512]) for each in requests}
    longer = [each for each in requests if len(each.hash_ids) > 8]
    grown = sum(
        any(tuple(each.hash_ids[:end]) in full for end in range(5, len(each.hash_ids) - 1))
        for each in longer
    )
    assert grown > len(longer) / 2


def test_agents_branch() -> None:
    """Three prompts or more continue one long prefix in different ways."""
    following: dict[tuple[int, ...], set[int]] = {}
    for each in made("agents"):
        ids = tuple(each.hash_ids)
        if len(ids) > 22:
            following.setdefault(ids[:20], set()).add(ids[20])
    assert following
    assert max(len(each) for each in following.values()) >= 2
    assert repeat_rate(made("agents")) > 0.8


def test_documents_are_asked_about_again() -> None:
    requests = made("documents")
    requested: dict[int, int] = {}
    for each in requests:
        requested[each.hash_ids[0]] = requested.get(each.hash_ids[0], 0) + 1
    assert max(requested.values()) > 50
    assert len(requested) > 100
    assert repeat_rate(requests) > 0.6


def test_what_is_asked_wrongly_is_refused() -> None:
    with pytest.raises(
        InvalidReplayOption, match="kind='chat': must be one of shared, turns"
    ) as raised:
        generate("chat", 1, 0)
    assert raised.value.fields["value"] == "chat"
    with pytest.raises(InvalidCount, match="num_requests is 0"):
        generate("turns", 0, 0)
    with pytest.raises(InvalidCount, match="seed is -1"):
        generate("turns", 1, -1)
    with pytest.raises(InvalidCount, match="seed is 'x'"):
        generate("turns", 1, "x")  # type: ignore[arg-type]  # what is tested
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidReplayOption, match="sessions_per_second"):
            generate("turns", 1, 0, sessions_per_second=rate)
