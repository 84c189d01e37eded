# SPDX-License-Identifier: Apache-2.0
"""The first difference of a run of vLLM with kvcore in the shadow, and the rule that explains it.

Needs no vLLM.
"""

from __future__ import annotations

from typing import Any

import attrs

from benches.vllm.rules import LOOK_UPS, Watch, flat, rule_of


@attrs.define
class FirstDifference:
    """Finds the first result of a shadow's managers that differs, and the rule that explains it.

    rule: the rule for that result, empty if none explains it; None if nothing differs. After it the
    two place blocks differently, so later differences follow from it.
    """

    managers: Any
    watch: Watch
    rule: str | None = None

    def __attrs_post_init__(self) -> None:
        self.watch.watch_tokens(self.managers.kvcore.compat)
        self._replace("part", self._part)
        self._replace("_same_blocks", self._same_blocks)

    @property
    def is_unexplained(self) -> bool:
        """Whether a result differs and no rule explains it, so that the command fails."""
        return self.rule == ""

    def _replace(self, name: str, around: Any) -> None:
        call = getattr(self.managers, name)
        setattr(self.managers, name, lambda *args: around(*args) or call(*args))

    def _part(self, name: str, _: str, own: Any, theirs: Any) -> None:
        if name in LOOK_UPS and isinstance(theirs, tuple):
            self._same_blocks(own[0], theirs[0])
        self.rule = self.rule or ""

    def _same_blocks(self, own: Any, _: Any) -> None:
        # The result of an allocation may omit blocks that a connector fills.
        name, request_id, ours = self.watch.calls[-1]
        is_look_up = name in LOOK_UPS
        own = flat(self.managers.own.get_blocks(request_id) if own and not is_look_up else own)
        if self.rule is None and own != ours:
            self.rule = ""
            if own is not None and ours is not None:
                self.rule = rule_of(self.watch.lost, own, ours, is_look_up=is_look_up)
