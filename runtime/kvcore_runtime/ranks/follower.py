# SPDX-License-Identifier: Apache-2.0
"""Any rank except 0: it applies the steps of rank 0 to its share of the cache and computes them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvcore import Config
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarTier
from kvcore_runtime.attention.recurrence import Rule
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.engine.engine import EngineOptions
from kvcore_runtime.engine.forward import Begun, Forward, make_runtime
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.far.exchange import CLOSE_S
from kvcore_runtime.model.identity import identify
from kvcore_runtime.model.model import Llama
from kvcore_runtime.ranks.errors import BadStep
from kvcore_runtime.ranks.exchange import gather_weights
from kvcore_runtime.ranks.links import NO_TICKET, Links
from kvcore_runtime.ranks.pages import RankPages
from kvcore_runtime.ranks.step_wire import OrderKind, RankPass, RankStep, decode_step

_LOG = logging.getLogger("kvcore_runtime")


class _NoAttention:
    """Attention to nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        del layer, k, v
        return torch.zeros_like(q)

    def recur(self, layer: int, like: Tensor, rule: Rule) -> Tensor:
        """See `Attention`."""
        del layer, rule
        return torch.zeros_like(like)


class RankFollower:
    """A rank without manager or sequences.

    model: its shard. config, options: those of the leader's engine. tier, far: this rank's tier, if
    the leader's engine has a `RankExchange`, and the options of that. Raises what `Engine` raises,
    and InvalidTier.
    """

    def __init__(
        self,
        model: Llama,
        config: Config,
        options: EngineOptions | None,
        links: Links,
        *,
        tier: FarTier | None = None,
        far: FarOptions | None = None,
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
        self._model, self._links = model, links
        self._pages: RankPages | None = None
        if tier is not None:
            far = far or FarOptions()
            self._pages = RankPages(links.rank, links.world, tier, far.staging_pages, self.runtime)
            self._weights = far.weights or identify(model, config.groups)

    def run(self) -> None:
        """Follow the leader until it ends. Raises RankLost, BadStep, and any error of a pass."""
        try:
            with torch.inference_mode():
                while self._follow(decode_step(self._links.broadcast())):
                    pass
        finally:
            self._links.close()
            if self._pages is not None:
                self._pages.close(CLOSE_S)

    def _follow(self, step: RankStep) -> bool:
        """Apply and compute one step. Returns whether another one follows."""
        number = self._links.number = step.batch.number
        if step.ends:
            self._links.report(0)
            self._links.finish_report()
            return False
        status = number
        try:
            self._apply(step)
        except KvcoreRuntimeError as error:
            _LOG.warning("rank %d cannot apply batch %d: %s", self._links.rank, number, error)
            status = -self._links.rank
        ended = (NO_TICKET, 0) if self._pages is None else self._pages.take_ended()
        self._links.report(status, *ended)
        if status >= 0 and any(each.kind is OrderKind.JOIN for each in step.orders):
            gather_weights(self._links, self._weights)
        if step.computes is None:
            return True
        if status < 0:
            self._add_zeros(len(step.computes.tokens))
        else:
            self._forward.compute(self._begun(step.computes))
        return True

    def _apply(self, step: RankStep) -> None:
        """Carry out the orders of a step, and apply its batch. Raises what `Runtime.apply` raises,
        BadStep, and the error of a store or load, which copies from a slot and cannot fail.
        """
        if step.orders:
            if self._pages is None:
                raise BadStep(reason="it has orders for a far tier, and this rank has none")
            self._pages.follow(step.orders)
        if step.is_applied:
            return
        if step.skips:
            self.runtime.skip(step.batch.number)
        self.runtime.apply(step.batch)
        for each in self.runtime.take_finished():
            if each.error is not None:
                raise each.error

    def _add_zeros(self, num_tokens: int) -> None:
        """Take part in the sums of a pass that cannot be computed here, so that all others end."""
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=self._model.device)
        self._model.hidden(tokens, tokens, _NoAttention())

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
