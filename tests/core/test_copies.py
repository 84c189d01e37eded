# SPDX-License-Identifier: Apache-2.0
"""Copies of a manager, by `copy`, `deepcopy` and `pickle`, have a state of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.errors import DamagedState
from tests.conftest import Backend
from tests.helpers.stories import add, make, serve


def through_pickle(manager: Any) -> Any:
    """Return the value after pickling and unpickling."""
    return pickle.loads(pickle.dumps(manager))


COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])


class Named(KVCacheManager):
    """A subclass with an attribute, another constructor, and a method in place of the twin's."""

    def __init__(self, name: str, backend: Backend) -> None:
        super().__init__(Config(9, 2, hash_seed=b"seed"), backend)
        self.names = [name]

    def free(self, request_id: str) -> None:
        """Free a request, and note it."""
        self.names.append(request_id)
        super().free(request_id)


@COPIES
def test_a_copy_goes_on_alone(copied: Callable[[Any], Any], backend: Backend) -> None:
    manager = make(backend, 8, num_host_blocks=3, max_in_flight=1, enable_events=True)
    serve(manager, "a", [0, 1, 2])
    add(manager, "b", [0, 1, 5])
    before = manager.encode()
    other = copied(manager)
    assert (other.encode(), other.config, other.backend) == (before, manager.config, backend)
    other.free("a")
    assert manager.encode() == before
    after = other.encode()
    manager.add_request(Request("c", [7]))
    manager.take_batch()
    assert other.encode() == after
    other.check()


@COPIES
def test_a_copy_of_a_subclass_has_its_attributes(
    copied: Callable[[Any], Any], backend: Backend
) -> None:
    manager = Named("first", backend)
    manager.add_request(Request("a", [0, 1, 2]))
    other = copied(manager)
    assert type(other) is Named
    assert other.names == ["first"]
    other.free("a")
    assert other.names[-1] == "a"
    assert other.encode() == manager.encode()


def test_a_pickled_manager_is_judged_as_other_bytes_are(backend: Backend) -> None:
    manager = make(backend)
    data = manager.encode()
    with pytest.raises(DamagedState, match="not those of a state"):
        pickle.loads(pickle.dumps(manager).replace(data, b"x" + data[1:]))
