# SPDX-License-Identifier: Apache-2.0
"""An engine's statements about the owners of its blocks, and the suspicions that follow.

They are optional and prove nothing: only contents do.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.sanitizer.findings import Finding


class Owners:
    """Tracks released blocks, and reports each suspicion once per cause."""

    def __init__(self, engine: str) -> None:
        self.suspicions: list[Finding] = []
        self._engine = engine
        self._released: set[tuple[int, int]] = set()
        self._causes: set[tuple[object, ...]] = set()

    def allocate(self, block: int, pool: int = 0) -> None:
        """Report that the engine handed out a block."""
        self._released.discard((pool, block))

    def release(self, block: int, pool: int = 0) -> None:
        """Report that a block's last owner gave it back."""
        if (pool, block) in self._released:
            self._suspect("double-free", None, None, (pool, block))
        self._released.add((pool, block))

    def _suspect_use(self, request: str, step: int, pool: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            if (pool, block) in self._released:
                self._suspect("use-after-free", request, step, (pool, block))

    def _suspect(
        self, name: str, request: str | None, step: int | None, place: tuple[int, int]
    ) -> None:
        detail = f"block {place[1]} of pool {place[0]}"
        finding = Finding(
            name=name,
            certain=False,
            step=step,
            request=request,
            block=place[1],
            detail=detail,
            engine=self._engine,
        )
        self._log_once(finding, (name, place))

    def _log_once(self, finding: Finding, cause: tuple[object, ...]) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            self.suspicions.append(finding)
