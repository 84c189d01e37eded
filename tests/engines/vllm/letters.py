# SPDX-License-Identifier: Apache-2.0
"""An executor for vLLM's EngineCore, whose model reads its context out of the cache's blocks.

Tokens are characters. Keys and values of a token are the token itself, in the slot that the block
table names; the next one is a letter that depends on all slots before. So a wrong block is a wrong
answer.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from zlib import crc32

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

from tests.engines.vllm.engine import BLOCK_SIZE, FULL


def next_letter(context: str) -> str:
    """Return the letter that the model samples after a text."""
    return chr(ord("a") + crc32(context.encode()) % 26)


def answer(prompt: str, count: int) -> str:
    """Return the model's whole answer."""
    text = prompt
    for _ in range(count):
        text += next_letter(text)
    return text[len(prompt) :]


class Letters(Executor):  # type: ignore[misc] # vLLM has no types here
    """The one worker and its cache. fails: the number of the step that raises, if any."""

    fails: int | None = None

    def _init_executor(self) -> None:
        self.cells: dict[tuple[int, int], str] = {}
        self.tables: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.num_steps = 0
        self._outputs: list[ModelRunnerOutput] = []

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the specs of one layer."""
        return [{"layer": FULL}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the usual layout."""
        return [["NHD"]]

    def determine_available_memory(self) -> list[int]:
        """Return enough memory; the configuration says how many blocks there are."""
        return [1 << 20]

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        """Return no results: no other call is made to the workers."""
        del method
        return []

    def check_health(self) -> None:
        """Do nothing: the executor is healthy."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Write the slots of a step, and then read whole contexts."""
        del non_block
        self.num_steps += 1
        done: Future[Any] = Future()
        if self.num_steps == self.fails:
            raise RuntimeError("the model failed")
        starts = self._take_in(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        for name, start in starts.items():
            for place in range(start, start + scheduled[name]):
                self.cells[self._slot(name, place)] = self.texts[name][place]
        said = [self._say(name, starts[name] + scheduled[name]) for name in scheduled]
        self._outputs.append(
            ModelRunnerOutput(
                req_ids=list(scheduled),
                req_id_to_index={name: place for place, name in enumerate(scheduled)},
                sampled_token_ids=said,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
        )
        done.set_result(None if scheduled else self._outputs.pop())
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the output of the step that was executed last."""
        del grammar_output
        done: Future[Any] = Future()
        done.set_result(self._outputs.pop())
        return done if non_block else done.result()

    def _take_in(self, scheduled: Any) -> dict[str, int]:
        """Follow the tables; returns where each request begins to compute."""
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            self.texts[new.req_id] = "".join(map(chr, new.prompt_token_ids))
            self.tables[new.req_id] = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            grown = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                self.tables[name] = list(grown[0])
            elif grown:
                self.tables[name] += grown[0]
            starts[name] = cached.num_computed_tokens[place]
        return starts

    def _slot(self, name: str, place: int) -> tuple[int, int]:
        return self.tables[name][place // BLOCK_SIZE], place % BLOCK_SIZE

    def _say(self, name: str, end: int) -> list[int]:
        """Return the next letter, unless a prompt is not computed to its end."""
        if end < len(self.texts[name]):
            return []
        letter = next_letter("".join(self.cells[self._slot(name, each)] for each in range(end)))
        self.texts[name] += letter
        return [ord(letter)]
