# SPDX-License-Identifier: Apache-2.0
"""Prompts files: what a line means, and one clear sentence for each thing wrong with one."""

from pathlib import Path

import pytest
from kvcore_runtime.generate.prompts import FIELDS, NUM_SAMPLES_MAX, PromptsError, read_prompts
from kvcore_runtime.model.sampling import Sampling

DEFAULTS = Sampling(max_tokens=5, temperature=0.25)
GOOD = b'{"id": "a", "turns": ["Hello?"]}'


def write(folder: Path, *lines: bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def test_a_line_says_what_to_ask_and_how(tmp_path: Path) -> None:
    line = (
        b'{"id": "b", "system": "Be brief.", "turns": ["One?", "Two?"], "max_tokens": 7, '
        b'"temperature": 0, "top_k": 3, "top_p": 0.5, "seed": 9, "stop": ["."]}'
    )
    first, second = read_prompts(write(tmp_path, GOOD, b"  ", line, b""), DEFAULTS)
    assert (first.prompt_id, first.turns, first.num_samples) == ("a", ("Hello?",), 1)
    assert first.sampling == DEFAULTS
    assert second.sampling == Sampling(
        max_tokens=7, temperature=0, top_k=3, top_p=0.5, seed=9, stop=(".",)
    )
    assert first.messages([]) == [{"role": "user", "content": "Hello?"}]
    assert second.messages(["1!"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1!"},
        {"role": "user", "content": "Two?"},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello", "not JSON: Expecting value at column 1"),
        (b'{"id": "b", "turns": ["x"]', "not JSON: Expecting ',' delimiter at column 27"),
        (b'{"id": "\xff"}', "not UTF-8 at byte 9"),
        (b"[" * 100_000, "not a prompt: nested too deeply"),
        (b'["b"]', "not a JSON object"),
        (
            b'{"id": "b", "turns": ["x"], "seed": ' + b"9" * 5000 + b"}",
            "not a prompt: a number has too many digits",
        ),
        (
            b'{"id": "b", "turns": ["x"], "temperature": 1' + b"0" * 400 + b"}",
            "'temperature' is an integer of more than 64 bits",
        ),
        (
            b'{"id": "b", "turns": ["x"], "top_k": 9223372036854775808}',
            "'top_k' is an integer of more than 64 bits",
        ),
        (
            b'{"id": "b", "turns": ["x"], "temprature": 1}',
            f"unknown field 'temprature'; the fields are {', '.join(FIELDS)}",
        ),
        (b'{"id": "b", "id": "c", "turns": ["x"]}', "the field 'id' is given twice"),
        (b'{"turns": ["x"]}', "the field 'id' is missing"),
        (b'{"id": "b"}', "the field 'turns' is missing"),
        (b'{"id": "a", "turns": ["x"]}', "id 'a' is used twice"),
        (b'{"id": " ", "turns": ["x"]}', "'id' is ' ', expected text that is not empty"),
        (b'{"id": 3, "turns": ["x"]}', "'id' is 3, expected text that is not empty"),
        (b'{"id": "b/1", "turns": ["x"]}', "'id' is 'b/1', it may hold no '/' and no '#'"),
        (b'{"id": "b", "turns": []}', "'turns' is empty"),
        (b'{"id": "b", "turns": ["x", " \\n"]}', "turn 2 is empty"),
        (b'{"id": "b", "turns": "x"}', "'turns' is 'x', expected a list of texts"),
        (b'{"id": "b", "turns": [1]}', "'turns' is [1], expected a list of texts"),
        (
            b'{"id": "b", "turns": ["x"], "system": ""}',
            "'system' is '', expected text that is not empty",
        ),
        (
            b'{"id": "b", "turns": ["ab\\ud800"]}',
            "'turns' holds half a character at place 3",
        ),
        (
            b'{"id": "b", "turns": ["x"], "n": 0}',
            f"'n' is 0, expected 1 to {NUM_SAMPLES_MAX}",
        ),
        (b'{"id": "b", "turns": ["x"], "n": true}', "'n' is True, expected an integer"),
        (
            b'{"id": "b", "turns": ["x", "y"], "n": 2}',
            "'n' is 2 with 2 turns: several samples go with one turn only",
        ),
        (b'{"id": "b", "turns": ["x"], "seed": 1.5}', "'seed' is 1.5, expected an integer"),
        (b'{"id": "b", "turns": ["x"], "top_p": "1"}', "'top_p' is '1', expected a number"),
        (b'{"id": "b", "turns": ["x"], "top_p": 0}', "top_p is 0, expected above 0, at most 1"),
        (
            b'{"id": "b", "turns": ["x"], "temperature": NaN}',
            "temperature is nan, expected 0 or more",
        ),
        (
            b'{"id": "b", "turns": ["x"], "max_tokens": 0}',
            "max_tokens is 0, expected 1 or more",
        ),
        (
            b'{"id": "b", "turns": ["x"], "stop": [""]}',
            "stop is ('',), expected strings that are not empty",
        ),
    ],
)
def test_a_broken_line_is_named_with_its_place(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path, GOOD, b"", line, GOOD)
    with pytest.raises(PromptsError) as caught:
        read_prompts(path, DEFAULTS)
    assert str(caught.value) == f"{path}, line 3: {reason}"


def test_a_byte_order_mark_is_skipped_at_the_start_only(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (prompt,) = read_prompts(write(tmp_path, mark + GOOD), DEFAULTS)
    assert prompt.prompt_id == "a"
    path = write(tmp_path, GOOD, mark + GOOD)
    with pytest.raises(PromptsError, match=r"line 2: not JSON: "):
        read_prompts(path, DEFAULTS)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, b"", b"  \t")
    with pytest.raises(PromptsError) as caught:
        read_prompts(path, DEFAULTS)
    assert str(caught.value) == f"{path}: there are no prompts in it"


@pytest.mark.parametrize(
    ("name", "reason"), [("absent", "No such file or directory"), ("", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    path = tmp_path / name
    with pytest.raises(PromptsError) as caught:
        read_prompts(path, DEFAULTS)
    assert str(caught.value) == f"{path}: {reason}"
