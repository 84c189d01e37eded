# SPDX-License-Identifier: Apache-2.0
"""A connector whose store has parts of some prompts, and some of whose loads fail.

Loads finish with the step that requests them, or steps later; a failed load leaves one block
unwritten, or all blocks from one on. The blocks of some finished requests are sent for a few steps.
Everything follows from the seed and the request, so both sides see the same as long as they act the
same.
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
"""The largest number of steps that a transfer takes."""


@attrs.define
class StepLoads(KVConnectorMetadata):  # type: ignore[misc] # vLLM has no types here
    """The loads that a step began, and the blocks that it failed to load."""

    begun: list[tuple[str, list[int]]]
    invalid: set[int]


@attrs.define
class Transfer:
    """A running load or send. steps: steps until it ends. invalid: blocks that stay unwritten."""

    name: str
    steps: int
    is_load: bool
    invalid: set[int]


class Loads(KVConnectorBase_V1):  # type: ignore[misc] # vLLM has no types here
    """The scheduler's half of the connector; there is no worker's half."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._seed = self._kv_transfer_config.kv_connector_extra_config["seed"]
        self._size = vllm_config.cache_config.block_size
        # Steps in flight continue from what a failed load left out, so none fails in its own step.
        self._late_only = vllm_config.scheduler_config.async_scheduling
        self._requested: Counter[str] = Counter()
        self._found: dict[str, tuple[int, bool]] = {}
        self._under_way: list[Transfer] = []
        self._just_over: list[Transfer] = []
        self._step = StepLoads([], set())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of stored tokens after the hit, and whether they arrive later."""
        dice = self._dice(request.request_id, "look-up")
        is_late = dice.random() < 0.5
        # A load within the step leaves a token to compute.
        most = (request.num_tokens - num_computed_tokens - (not is_late)) // self._size
        num_blocks = dice.randrange(most + 1) if dice.random() < 0.5 else 0
        self._found[request.request_id] = (num_computed_tokens, is_late)
        return num_blocks * self._size, is_late and num_blocks > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load into the blocks after the hit."""
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
        """Return the loads that the step began, and forget them."""
        del scheduler_output
        step, self._step = self._step, StepLoads([], set())
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Return whether blocks are sent before they are freed."""
        del block_ids
        name = request.request_id
        dice = self._dice(name, "end")
        loads = any(name == each.name for each in (*self._under_way, *self._just_over))
        if loads or dice.random() < 0.7:  # the report of a load frees the blocks
            return False, None
        steps = dice.randrange(1, MAX_STEPS)
        self._under_way.append(Transfer(name, steps, is_load=False, invalid=set()))
        return True, None

    def take_output(self, step: StepLoads) -> KVConnectorOutput:
        """Return a worker's report on the transfers with the output of this step."""
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
        """Do nothing: it belongs to the worker's half."""

    def wait_for_layer_load(self, *args: Any, **options: Any) -> None:
        """Do nothing: it belongs to the worker's half."""

    def save_kv_layer(self, *args: Any, **options: Any) -> None:
        """Do nothing: it belongs to the worker's half."""

    def wait_for_save(self) -> None:
        """Do nothing: it belongs to the worker's half."""

    def take_events(self) -> Iterable[Any]:
        """Return no events."""
        return ()

    def _dice(self, name: str, what: str) -> random.Random:
        """Return a generator whose draws depend on the seed, the question and its repetition."""
        self._requested[f"{what} {name}"] += 1
        return random.Random(f"{self._seed}/{what}/{name}/{self._requested[f'{what} {name}']}")
