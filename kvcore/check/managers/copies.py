# SPDX-License-Identifier: Apache-2.0
"""Deep copies of managers that share immutable parts.

They are pickled and read again, which is faster than `copy.deepcopy` and keeps functions by
identity.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def copied(value: T, shared: Sequence[object]) -> T:
    """Copy a value deeply; shared parts are the same objects in both."""
    places = {id(each): place for place, each in enumerate(shared)}
    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = lambda each: places.get(id(each))  # type: ignore[method-assign] # hook
    pickler.dump(value)
    reader = pickle.Unpickler(io.BytesIO(written.getvalue()))
    reader.persistent_load = shared.__getitem__  # type: ignore[method-assign] # its hook
    found: T = reader.load()
    return found
