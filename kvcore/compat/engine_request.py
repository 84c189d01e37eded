# SPDX-License-Identifier: Apache-2.0
"""Reads an engine's own request object.

Any object with the attributes of vLLM's `Request` will do; nothing is written to it. Three
attributes and the tokens are required. The rest is optional: block_hashes, spec_token_ids,
skip_reading_prefix_cache, lora_request, mm_features, cache_salt, prompt_embeds, and `is_finished()`
or status.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.types.arguments import read_count, read_int
from kvcore.types.engine_counts import RequestCounts
from kvcore.types.errors import CountMismatch, InvalidExtraKey, WrongArgument
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds
from kvcore.types.tokens import MAX_TOKEN
from kvcore.types.values import Request


class EngineRequest(Protocol):
    """A request object of an engine.

    num_tokens: prompt and accepted tokens. num_computed_tokens: maintained by the engine, which
    raises it when a step is scheduled, and lowers it for rejected drafts and failed loads. The
    tokens themselves are `all_token_ids`, or `prompt_token_ids` and `output_token_ids`.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...


def see(request: EngineRequest) -> RequestCounts:
    """Read id and counts. Raises WrongArgument if it is not a request, InvalidCount."""
    try:
        name, tokens, computed = request.request_id, request.num_tokens, request.num_computed_tokens
    except AttributeError:
        expected = "an object with request_id, num_tokens and num_computed_tokens"
        raise WrongArgument(name="request", expected=expected, value=request) from None
    if type(tokens) is type(computed) is int and tokens >= 0 <= computed:  # the usual case
        return RequestCounts(name, tokens, computed)
    return RequestCounts(
        name, read_count("num_tokens", tokens), read_count("num_computed_tokens", computed)
    )


def read_tokens(request: EngineRequest, first: int, end: int) -> Any:
    """Return the tokens at positions [first, end), as the engine's own type of sequence.

    Raises WrongArgument if the object has none, CountMismatch if it has fewer.
    """
    every = getattr(request, "all_token_ids", None)
    if every is not None:
        tokens, given = every[first:end], len(every)
    else:
        prompt = getattr(request, "prompt_token_ids", None)
        if prompt is None:
            expected = "an object with all_token_ids, or with prompt_token_ids"
            raise WrongArgument(name="request", expected=expected, value=request)
        output = getattr(request, "output_token_ids", None)
        split = len(prompt)
        tokens, given = list(prompt[first:end]), split + len(output or ())
        if end > split and output is not None:
            tokens += output[max(0, first - split) : end - split]
    if len(tokens) != end - first:
        raise CountMismatch(
            request=request.request_id,
            given=given,
            name="tokens",
            expected=end,
        )
    return tokens


def read_drafts(request: EngineRequest, count: int) -> list[int]:
    """Return the draft tokens; none unless the engine knows `count` ids."""
    given = [read_int(token) for token in (getattr(request, "spec_token_ids", None) or ())[:count]]
    known = len(given) == count and all(0 <= token <= MAX_TOKEN for token in given)
    return given if known else []


def read_hashes(request: EngineRequest) -> Sequence[bytes] | None:
    """Return the engine's own hashes of full blocks; None if it leaves hashing to kvcore."""
    hashes: Sequence[bytes] | None = getattr(request, "block_hashes", None)
    return hashes


def skips_reading(request: EngineRequest) -> bool:
    """Return whether the request declines hits."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def is_finished(request: EngineRequest) -> bool:
    """Return whether the request has finished, by `is_finished()` or by a status named
    FINISHED_something.
    """
    method = getattr(request, "is_finished", None)
    if callable(method):
        over: bool = method()
        return over
    status = getattr(request, "status", "")
    return str(getattr(status, "name", status)).upper().startswith("FINISHED")


def uncached_request(
    request: EngineRequest, seen: RequestCounts, *, own_hashes: bool, keep_tokens: bool
) -> tuple[Request, int]:
    """Return the request for kvcore if nothing is cached, and its tokens."""
    brings = own_hashes and read_hashes(request) is not None
    reads = keep_tokens or not brings
    tokens = read_tokens(request, 0, seen.num_tokens) if reads else bytes(seen.num_tokens)
    return Request(seen.name, tokens, block_hashes=[] if brings else None), seen.num_tokens


def cached_request(
    request: EngineRequest,
    seen: RequestCounts,
    hash_block_size: int,
    *,
    own_hashes: bool,
    keep_tokens: bool,
    has_events: bool,
) -> tuple[Request, int]:
    """Return the request for kvcore with the parts of its keys, and its tokens; of a prompt given
    as embeddings, only the prompt.

    Own hashes replace the keys; then the other parts are only for events. keep_tokens: False passes
    only the number of tokens that are not needed.
    """
    hashes = read_hashes(request) if own_hashes else None
    if hashes is not None and not has_events:
        own = list(hashes[: seen.num_tokens // hash_block_size])
        skips = skips_reading(request)
        num_tokens = seen.num_tokens
        tokens = read_tokens(request, 0, num_tokens) if keep_tokens else bytes(num_tokens)
        made = Request(seen.name, tokens, block_hashes=own, skip_reading_prefix_cache=skips)
        return made, num_tokens
    embeds = _read_embeds(getattr(request, "prompt_embeds", None))
    num_tokens = seen.num_tokens
    if embeds is not None:
        num_tokens = min(num_tokens, len(embeds.data) // embeds.bytes_per_token)
    made = Request(
        seen.name,
        read_tokens(request, 0, num_tokens),
        lora=_read_lora(getattr(request, "lora_request", None)),
        media=[_read_media(each) for each in getattr(request, "mm_features", None) or ()],
        cache_salt=getattr(request, "cache_salt", None),
        prompt_embeds=embeds,
        block_hashes=None if hashes is None else list(hashes[: num_tokens // hash_block_size]),
        skip_reading_prefix_cache=skips_reading(request),
    )
    return made, num_tokens


def _read_lora(lora: Any) -> LoRA | None:
    if lora is None or isinstance(lora, LoRA):
        return lora
    name: Any = getattr(lora, "lora_name", None) or getattr(lora, "name", None)
    path: Any = getattr(lora, "lora_path", None) or getattr(lora, "path", None)
    return LoRA(name, path or "")


def _read_media(item: Any) -> MediaItem:
    place = getattr(item, "mm_position", item)
    return MediaItem(item.identifier, place.offset, place.length)


def _read_embeds(embeds: Any) -> PromptEmbeds | None:
    """Read embeddings of shape [prompt tokens, hidden size] from a tensor, an array or a buffer."""
    if embeds is None or isinstance(embeds, PromptEmbeds):
        return embeds
    try:
        if hasattr(embeds, "numpy"):
            # A tensor's module is already loaded; numpy has no bfloat16, but can hold its bytes.
            torch = sys.modules[type(embeds).__module__.partition(".")[0]]
            rows = memoryview(embeds.detach().contiguous().view(torch.uint8).numpy())
        else:
            rows = memoryview(embeds)
        return PromptEmbeds(rows, rows.nbytes // len(rows))
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise InvalidExtraKey(
            name="prompt_embeds",
            expected=f"a tensor on the CPU or an array of [tokens, hidden size] ({error})",
            value=type(embeds),
        ) from None
