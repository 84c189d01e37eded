# SPDX-License-Identifier: Apache-2.0
"""Any rank except 0: it applies the steps of rank 0 to its share of the cache and computes them."""

from __future__ import annotations

import logging

import torch

from kvcore import Config
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.engine.engine import EngineOptions
from kvcore_runtime.engine.forward import Begun, Forward, make_runtime
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.model.model import Llama
from kvcore_runtime.ranks.links import Links
from kvcore_runtime.ranks.step_wire import RankPass, RankStep, decode_step

_LOG = logging.getLogger("kvcore_runtime")


class RankFollower:
    """A rank without manager or sequences.

    model: its shard. config, options: those of the leader's engine. Raises what `Engine` raises.
    """

    def __init__(
        self, model: Llama, config: Config, options: EngineOptions | None, links: Links
    ) -> None:
        options = options or EngineOptions()
        self.runtime: Runtime
        self.runtime, groups = make_runtime(
            model,
            config,
            max_rows=config.max_rows(options.max_sequences),
            max_tokens=options.token_budget,
            guard=options.guard,
        )
        self._forward = Forward(model, self.runtime, groups)
        self._links = links

    def run(self) -> None:
        """Follow the leader until it ends. Raises RankLost, BadStep, and any error of a pass."""
        try:
            with torch.inference_mode():
                while self._follow(decode_step(self._links.broadcast())):
                    pass
        finally:
            self._links.close()

    def _follow(self, step: RankStep) -> bool:
        """Apply and compute one step. Returns whether another one follows."""
        number = self._links.number = step.batch.number
        if step.ends:
            self._links.agree(0)
            return False
        status = number
        try:
            if step.skips:
                self.runtime.skip(number)
            self.runtime.apply(step.batch)
        except KvcoreRuntimeError as error:
            _LOG.warning("rank %d cannot apply batch %d: %s", self._links.rank, number, error)
            status = -self._links.rank
        least, *_ = self._links.agree(status, 0, 0, 0)
        if step.computes is not None and least >= 0:
            self._forward.compute(self._begun(step.computes))
        return True

    def _begun(self, computes: RankPass) -> Begun:
        """Set up a pass. Only rank 0 needs logits."""
        return self._forward.begin(
            self._forward.prepare_rows(
                computes.rows.tolist(),
                computes.starts.tolist(),
                computes.ends.tolist(),
                tokens=computes.tokens.tolist(),
            )
        )
