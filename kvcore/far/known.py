# SPDX-License-Identifier: Apache-2.0
"""Names that a far tier is believed to have, so that no page is stored twice."""

from __future__ import annotations

from collections import OrderedDict


class KnownNames:
    """Remembers names that were stored or found here, the newest `num_names_max` of them."""

    def __init__(self, num_names_max: int) -> None:
        self._num_names_max = num_names_max
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Note that the tier has a name."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._num_names_max:
            self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        """Forget a name."""
        self._names.pop(name, None)
