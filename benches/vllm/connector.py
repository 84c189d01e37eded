# SPDX-License-Identifier: Apache-2.0
"""A connector whose store has a part of some prompts, and whose loads fail now and then.

Loads come with the step that asks for them, or steps later; a failed one leaves one block unwritten
or all from a block on. The blocks of some requests that are over are sent for a few steps. All of
it follows from the seed and the request, so both sides see the same as long as they do the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

NAME = "Loads"
MAX_STEPS = 4
"""Steps that a transfer takes, at most."""


@attrs.define
class StepLoads(KVConnectorMetadata):  # type: ignore[misc] # vLLM has no types here
    """The loads that a step began, and the blocks that it was to load and did not."""

    begun: list[tuple[str, list[int]]]
    invalid: set[int]


@attrs.define
class Transfer:
    """A load or a send under way. steps: until it is over. invalid: blocks that stay unwritten."""

    name: str
    steps: int
    is_load: bool
    invalid: set[int]


class Loads(KVConnectorBase_V1):  # type: ignore[misc] # vLLM has no types here
    """The scheduler's half of the connector; there is no other."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._seed = self._kv_transfer_config.kv_connector_extra_config["seed"]
        self._size = vllm_config.cache_config.block_size
        # The steps in flight go on from what a failed load left out, so none fails in its step.
        self._late_only = vllm_config.scheduler_config.async_scheduling
        self._asked: Counter[str] = Counter()
        self._found: dict[str, tuple[int, bool]] = {}
        self._under_way: list[Transfer] = []
        self._just_over: list[Transfer] = []
        self._step = StepLoads([], set())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens of the store behind the hit, and whether they come later."""
        dice = self._dice(request.request_id, "look-up")
        is_late = dice.random() < 0.5
        # One that comes at once leaves a token to compute.
        most = (request.num_tokens - num_computed_tokens - (not is_late)) // self._size
        num_blocks = dice.randrange(most + 1) if dice.random() < 0.5 else 0
        self._found[request.request_id] = (num_computed_tokens, is_late)
        return num_blocks * self._size, is_late and num_blocks > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load into the blocks behind the hit."""
        if not num_external_tokens:
            return
        name = request.request_id
        start, is_late = self._found[name]
        dice = self._dice(name, "load")
        first, end = start // self._size, (start + num_external_tokens) // self._size
        loaded = blocks.get_block_ids()[0][first:end]
        self._step.begun.append((name, loaded))
        invalid: set[int] = set()
        if dice.random() < 0.1 and (is_late or not self._late_only):
            place = dice.randrange(len(loaded))
            invalid = set(loaded[place:] if dice.random() < 0.5 else loaded[place : place + 1])
        if is_late:
            steps = dice.randrange(1, MAX_STEPS)
            self._under_way.append(Transfer(name, steps, is_load=True, invalid=invalid))
        else:
            self._step.invalid |= invalid

    def build_connector_meta(self, scheduler_output: Any) -> StepLoads:
        """What the step began, which is over with its schedule."""
        del scheduler_output
        step, self._step = self._step, StepLoads([], set())
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether blocks are sent before they are given back."""
        del block_ids
        name = request.request_id
        dice = self._dice(name, "end")
        loads = any(name == each.name for each in (*self._under_way, *self._just_over))
        if loads or dice.random() < 0.7:  # a load that is told of gives the blocks back
            return False, None
        steps = dice.randrange(1, MAX_STEPS)
        self._under_way.append(Transfer(name, steps, is_load=False, invalid=set()))
        return True, None

    def take_output(self, step: StepLoads) -> KVConnectorOutput:
        """What a worker says of the transfers with the output of this step."""
        for each in self._under_way:
            each.steps -= 1
        over = self._just_over = [each for each in self._under_way if each.steps <= 0]
        self._under_way = [each for each in self._under_way if each.steps > 0]
        return KVConnectorOutput(
            finished_recving={each.name for each in over if each.is_load},
            finished_sending={each.name for each in over if not each.is_load},
            invalid_block_ids=step.invalid.union(*(each.invalid for each in over)),
        )

    def start_load_kv(self, *args: Any, **options: Any) -> None:
        """Of the worker's half."""

    def wait_for_layer_load(self, *args: Any, **options: Any) -> None:
        """Of the worker's half."""

    def save_kv_layer(self, *args: Any, **options: Any) -> None:
        """Of the worker's half."""

    def wait_for_save(self) -> None:
        """Of the worker's half."""

    def take_events(self) -> Iterable[Any]:
        """None."""
        return ()

    def _dice(self, name: str, what: str) -> random.Random:
        """The same for the same question, asked the same number of times."""
        self._asked[f"{what} {name}"] += 1
        return random.Random(f"{self._seed}/{what}/{name}/{self._asked[f'{what} {name}']}")
