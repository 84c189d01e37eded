# SPDX-License-Identifier: Apache-2.0
"""The manager that is checked: in one language, or in both at once, with a list of its calls.

Why: both languages must give the same values, errors, batches, events and encoded states, and a
state of the one must go on in the other. The list of calls is a program that makes them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from kvcore import Config, KVCacheManager, KvcoreError, Refused
from tests.oracle.finding import Finding, demand

Language = Literal["python", "rust"]
PROGRAM = """from array import array
from kvcore import *
{config}
managers = [KVCacheManager(config, backend=each) for each in ("python", "rust")]
def call(name, *args, **options):
    for manager in managers:
        try:
            value = getattr(manager, name)(*args, **options)
            print(name, list(value) if name == "take_batch" else value)
        except KvcoreError as error:
            print(name, repr(error))
{calls}
"""


class Manager:
    """A manager in each of these languages; each call goes to all and must come out equal."""

    def __init__(self, config: Config, languages: tuple[Language, ...]) -> None:
        self.config = config
        self.num_calls = 0
        self.reached: Counter[str] = Counter()
        self._managers = [KVCacheManager(config, backend=each) for each in languages]
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call. Raises its KvcoreError, or a Finding for anything else."""
        self.num_calls += 1
        self._calls.append((name, args, options))
        outcomes = [_outcome(each, name, args, options) for each in self._managers]
        first = outcomes[0]
        self.reached[name] += 1
        if isinstance(first, KvcoreError | Refused):
            self.reached[type(first).__name__] += 1
        if len(outcomes) > 1:
            if not _same(*outcomes):
                raise Finding(f"{name} differs: {outcomes[0]!r} and {outcomes[1]!r}")
            self.encode()
        if isinstance(first, KvcoreError):
            raise first
        return first

    def ask(self, name: str, *args: Any) -> Any:
        """Make a query that is not counted and does not appear in the list of calls."""
        first, *others = [_outcome(each, name, args, {}) for each in self._managers]
        for other in others:
            if other != first:
                shown = "states" if name == "encode" else f"{first!r} and {other!r}"
                raise Finding(f"{name} differs: {shown}")
        if isinstance(first, KvcoreError):
            raise Finding(f"{name}{args!r}: {first!r}")
        return first

    def facts(self, names: Sequence[str], request_id: str) -> tuple[Any, ...]:
        """Return the answers to these queries about a request, in one call."""
        try:
            said = [
                tuple([getattr(each, name)(request_id) for name in names])
                for each in self._managers
            ]
        except Exception as error:
            raise Finding(f"one of {names} of {request_id!r} fails with {error!r}") from error
        for other in said[1:]:
            if other != said[0]:
                raise Finding(f"{names} of {request_id!r} differ: {said[0]!r} and {other!r}")
        return said[0]

    def encode(self) -> bytes:
        """Return the encoded state."""
        state: bytes = self.ask("encode")
        return state

    def clone(self, data: bytes) -> KVCacheManager:
        """Return a manager of its own in this state, in the first language."""
        clone = KVCacheManager(self.config, backend=self._managers[0].backend)
        restored = _outcome(clone, "restore", (data,), {})
        demand(restored is None, f"an encoded state is not restored: {restored!r}")
        return clone

    def restore(self, languages: tuple[Language, ...]) -> None:
        """Go on with the encoded states, in these languages."""
        states = [each.encode() for each in self._managers]
        self._managers = [KVCacheManager(self.config, backend=each) for each in languages]
        for manager, data in zip(self._managers, states, strict=True):
            restored = _outcome(manager, "restore", (data,), {})
            demand(restored is None, f"an encoded state is not restored: {restored!r}")
            demand(manager.encode() == data, "a restored state is encoded in another way")

    def program(self) -> str:
        """Return the calls as a program."""
        config = repr(self.config).replace(
            "Config(", f"Config(hash_seed={self.config.hash_seed!r}, "
        )
        lines = [f"config = {config}"]
        for name, args, options in self._calls:
            given = [repr(name), *map(_text, args), *(f"{k}={v!r}" for k, v in options.items())]
            lines.append(f"call({', '.join(given)})")
        return PROGRAM.format(calls="\n".join(lines[1:]), config=lines[0])


def _outcome(manager: KVCacheManager, name: str, args: tuple[Any, ...], options: Any) -> Any:
    """Return the value or KvcoreError of a call. Raises a Finding for any other failure."""
    try:
        value = getattr(manager, name)
        return value(*args, **options) if callable(value) else value
    except KvcoreError as error:
        return error
    except Exception as error:
        given = args if name != "restore" else "(data)"
        raise Finding(f"{name}{given} {options!r} fails with {error!r}") from error


def _text(value: Any) -> str:
    """Return an argument as a program has it; a repr of embeddings leaves out their bytes."""
    text, embeds = repr(value), getattr(value, "prompt_embeds", None)
    return text if embeds is None else text.replace("Embeds(", f"Embeds(data={embeds.data!r}, ")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, KvcoreError) or isinstance(other, KvcoreError):
        return type(one) is type(other) and str(one) == str(other) and one.fields == other.fields
    return bool(one == other)
