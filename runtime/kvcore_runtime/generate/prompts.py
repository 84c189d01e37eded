# SPDX-License-Identifier: Apache-2.0
"""Prompts files: one JSON object per line, each a conversation to hold or a question to answer.

Fields, all but the first two optional:
    id           names the prompt, once in a file; without / and #, which name turns and samples
    turns        what the user says, turn by turn; each turn waits for the answer to the one before
    system       the system prompt
    n            samples of the answer (with one turn only)
    max_tokens, temperature, top_k, top_p, seed, stop
                 as in `sampling.Sampling`; what is left out comes from the command line

A file is read and checked completely before anything runs. Blank lines are skipped; any error is
refused with file, line and one sentence. A byte order mark at the start of a file is skipped.
"""

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.model.chat import Message
from kvcore_runtime.model.sampling import Sampling

NUM_SAMPLES_MAX = 64
INTEGER_MAX = 2**63 - 1
SAMPLING_FIELDS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int,),
}
FIELDS = ("id", "turns", "system", "n", *SAMPLING_FIELDS, "stop")


class PromptsError(KvcoreRuntimeError):
    """A prompts file cannot be used."""

    def __init__(self, *, path: Path, line: int | None, reason: str) -> None:
        place = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {reason}", path=path, line=line, reason=reason)


@attrs.frozen(kw_only=True)
class Prompt:
    """One line of a prompts file."""

    prompt_id: str
    turns: tuple[str, ...]
    system: str | None = None
    num_samples: int = 1
    sampling: Sampling = attrs.field(factory=Sampling)

    def messages(self, answers: list[str]) -> list[Message]:
        """Return the conversation up to the turn after these answers, with the user's next message
        last.
        """
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for turn, answer in zip(self.turns, answers, strict=False):
            said.append({"role": "user", "content": turn})
            said.append({"role": "assistant", "content": answer})
        said.append({"role": "user", "content": self.turns[len(answers)]})
        return said


def read_prompts(path: Path, defaults: Sampling) -> list[Prompt]:
    """Read the prompts of a file, in order, at least one.

    defaults: the sampling for fields that a line omits. Raises PromptsError.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise PromptsError(path=path, line=None, reason=error.strerror or str(error)) from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, defaults)
            _require(prompt.prompt_id not in prompts, f"id {prompt.prompt_id!r} is used twice")
        except (_Wrong, KvcoreRuntimeError) as error:
            raise PromptsError(path=path, line=number, reason=str(error)) from None
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise PromptsError(path=path, line=None, reason="there are no prompts in it")
    return list(prompts.values())


class _Wrong(Exception):
    """An error in a line; becomes a PromptsError with file and line."""


def _parse(line: bytes, defaults: Sampling) -> Prompt:
    fields = _fields(line)
    unknown = [name for name in fields if name not in FIELDS]
    _require(
        not unknown,
        f"unknown field {', '.join(map(repr, unknown))}; the fields are {', '.join(FIELDS)}",
    )
    for name in ("id", "turns"):
        _require(name in fields, f"the field {name!r} is missing")
    turns = _texts(fields, "turns")
    _require(len(turns) > 0, "'turns' is empty")
    for position, turn in enumerate(turns, start=1):
        _require(bool(turn.strip()), f"turn {position} is empty")
    num_samples = _number(fields, "n", (int,), 1)
    _require(
        1 <= num_samples <= NUM_SAMPLES_MAX,
        f"'n' is {num_samples}, expected 1 to {NUM_SAMPLES_MAX}",
    )
    _require(
        num_samples == 1 or len(turns) == 1,
        f"'n' is {num_samples} with {len(turns)} turns: several samples go with one turn only",
    )
    prompt_id = _text(fields, "id")
    _require(
        not set("/#") & set(prompt_id), f"'id' is {prompt_id!r}, it may hold no '/' and no '#'"
    )
    return Prompt(
        prompt_id=prompt_id,
        turns=turns,
        system=_text(fields, "system") if "system" in fields else None,
        num_samples=num_samples,
        sampling=_sampling(fields, defaults),
    )


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError:  # the interpreter's limit on the digits of an integer
        raise _Wrong("not a prompt: a number has too many digits") from None
    except RecursionError:
        raise _Wrong("not a prompt: nested too deeply") from None
    _require(isinstance(fields, dict), "not a JSON object")
    return dict(fields)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Wrong(f"the field {twice!r} is given twice")
    return fields


def _sampling(fields: Mapping[str, Any], defaults: Sampling) -> Sampling:
    changes = {
        name: _number(fields, name, kinds, None)
        for name, kinds in SAMPLING_FIELDS.items()
        if name in fields
    }
    if "stop" in fields:
        changes["stop"] = _texts(fields, "stop")
    return attrs.evolve(defaults, **changes)


def _number(fields: Mapping[str, Any], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = fields.get(name, default)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    kind = "a number" if float in kinds else "an integer"
    _require(good, f"{name!r} is {value!r}, expected {kind}")
    _require(
        not isinstance(value, int) or abs(value) <= INTEGER_MAX,
        f"{name!r} is an integer of more than 64 bits",
    )
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    good = isinstance(value, str) and bool(value.strip())
    _require(good, f"{name!r} is {value!r}, expected text that is not empty")
    return _whole(name, value)


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields[name]
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    _require(good, f"{name!r} is {value!r}, expected a list of texts")
    return tuple(_whole(name, item) for item in value)


def _whole(name: str, text: str) -> str:
    """Return the text if it can be encoded: JSON can contain halves of surrogate pairs, UTF-8
    cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Wrong(f"{name!r} holds half a character at place {error.start + 1}") from None
    return text


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _Wrong(reason)
