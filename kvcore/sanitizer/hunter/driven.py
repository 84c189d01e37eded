# SPDX-License-Identifier: Apache-2.0
"""What the engines of several adapters have in common.

This file works without kvcore, so that a written test can include what it uses of it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any, ClassVar


class Driven:
    """An engine that has no batch in flight between two steps, and holds nothing that must be
    closed.
    """

    @property
    def in_flight(self) -> bool:
        """Return whether a batch is in flight."""
        return False

    def step(self) -> None:
        """Run one turn of the engine's loop."""
        raise NotImplementedError

    def finish_batches(self) -> None:
        """Make steps until no batch is in flight."""
        while self.in_flight:
            self.step()

    def close(self) -> None:
        """Do nothing."""


class Silent:
    """A stand-in for an object that is only called for effects, on a GPU or a thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def without_pins(torch: Any) -> None:
    """Let torch pin no memory, which needs a GPU."""
    torch.Tensor.pin_memory = lambda tensor: tensor
    for name in ("empty", "tensor"):
        setattr(torch, name, partial(_pageable, getattr(torch, name)))


def _pageable(make: Any, *args: Any, pin_memory: bool = False, **named: Any) -> Any:
    del pin_memory
    return make(*args, **named)


class Absent(type):
    """The type of stand-ins for classes and functions that an engine imports and a hunt does not
    use. Each name in one is another.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, found := Absent(name, (AnyFields,), {}))
        return found

    def __iter__(cls) -> Any:
        return iter(())


class AnyFields(metaclass=Absent):
    """An object with the fields that it is given."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __call__(self, *args: Any, **_: Any) -> Any:
        """Decorate a function with nothing."""
        return args[0] if args else None


class AbsentModule(types.ModuleType):
    """A module whose names are stand-ins, but for the known ones."""

    known: ClassVar[dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, found := self.known.get(name) or Absent(name, (AnyFields,), {}))
        return found


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for some modules of an engine that is in the folder root.

    absent: those and all below them, but for those that begin like one that is present. packages:
    those alone, whose own files are not run. known: names in modules that an engine computes with.
    """

    def __init__(
        self, root: Path, absent: Any, known: dict[str, Any], packages: Any = (), present: Any = ()
    ) -> None:
        self.root, self.packages, self.present = root, packages, tuple(present)
        self.absent = tuple(f"{name}." for name in absent)
        self.module = type("Module", (AbsentModule,), {"known": known})
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(self.present):
            return importlib.machinery.PathFinder.find_spec(name, path, target)
        if name in self.packages or f"{name}.".startswith(self.absent):
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(self.root.joinpath(*name.split(".")))]
            return spec
        return None

    def create_module(self, spec: Any) -> Any:
        return self.module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module is empty."""
