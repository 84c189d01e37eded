# SPDX-License-Identifier: Apache-2.0
"""Put kvcore's cache and schedulers in place of transformers' own, and undo that.

transformers has no hook for this, so names are replaced: `replacements` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.compat.shadow_steps import read_every
from kvcore_transformers.pinned import NotServed, check_release
from kvcore_transformers.statistics import Statistics

SHADOW = "KVCORE_SHADOW"

_before: list[tuple[Any, str, Any, Any]] = []
"""What was replaced: its holder, its name, transformers' value, and ours."""


def install() -> Statistics:
    """Make every cache from now on kvcore's. Returns the statistics that these caches will fill in.

    If KVCORE_SHADOW is 1, they are transformers' own with kvcore's behind them (shadow.py). Raises
    NotServed for another release of transformers, or if kvcore is installed already.
    """
    if _before:
        raise NotServed("kvcore_transformers is installed: call uninstall() first")
    shadow = is_set(SHADOW)
    check_release()
    from kvcore_transformers.cache import KvcoreCache
    from kvcore_transformers.shadow import ShadowCache

    ShadowCache.every = read_every(NotServed) if shadow else 1
    KvcoreCache.of_installation = Statistics()
    for holder, name, ours in shadowing() if shadow else replacements():
        _before.append((holder, name, _get(holder, name), ours))
        _put(holder, name, ours)
    return KvcoreCache.of_installation


def uninstall() -> None:
    """Undo `install`. Raises NotServed if nothing is installed or a name was replaced since."""
    if not _before:
        raise NotServed("kvcore_transformers is not installed: there is nothing to undo")
    for holder, name, _, ours in _before:
        if _get(holder, name) is not ours:
            raise NotServed(f"{name} was replaced after install(): undo that first")
    while _before:
        holder, name, theirs, _ = _before.pop()
        _put(holder, name, theirs)


@contextmanager
def installed() -> Iterator[Statistics]:
    """Install within a `with` block, and uninstall at its end."""
    statistics = install()
    try:
        yield statistics
    finally:
        uninstall()


def is_set(variable: str) -> bool:
    """Return whether an environment variable is 1. Raises NotServed unless it is 0 or 1."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise NotServed(f"{variable}={value!r} is neither 0 nor 1")
    return value == "1"


def weights_changed(manager: Any) -> None:
    """Tell a running `ContinuousBatchingManager` that the model's weights have changed.

    An epoch begins with the next step: content from before is not hit any more, and running
    requests go on. Changes that torch counts are noticed at each `generate_batch`; those made
    through `.data` are not.
    """
    if manager.batch_processor is not None:
        manager.batch_processor.cache.is_outdated = True


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what kvcore replaces: the holder, the name, and the value while it is installed."""
    from transformers.generation.continuous_batching import cache, continuous_api, scheduler

    from kvcore_transformers.allocators import Full, Sliding
    from kvcore_transformers.cache import KvcoreCache
    from kvcore_transformers.offloading import Offload
    from kvcore_transformers.schedulers import Fifo, PrefillFirst

    return [
        (continuous_api, "PagedAttentionCache", KvcoreCache),
        (continuous_api, "OffloadingManager", Offload),
        (cache.ATTN_TYPE_TO_ALLOCATOR, "full_attention", Full),
        (cache.ATTN_TYPE_TO_ALLOCATOR, "sliding_attention", Sliding),
        (scheduler.SCHEDULER_MAPPING, "fifo", Fifo),
        (scheduler.SCHEDULER_MAPPING, "prefill_first", PrefillFirst),
        (continuous_api, "FIFOScheduler", Fifo),
        (continuous_api.ContinuousMixin, "init_continuous_batching", starting(KvcoreCache)),
        (continuous_api.ContinuousBatchingManager, "__init__", making(watch)),
        (continuous_api.ContinuousBatchingManager, "_create_batch_processor", adopting()),
    ]


def shadowing() -> list[tuple[Any, str, Any]]:
    """Return the replacements of shadow mode, in which transformers' own cache decides."""
    from transformers.generation.continuous_batching import continuous_api

    from kvcore_transformers.shadow import ShadowCache

    return [
        (continuous_api, "PagedAttentionCache", ShadowCache),
        (continuous_api.ContinuousMixin, "init_continuous_batching", starting(ShadowCache)),
        (continuous_api.ContinuousBatchingManager, "__init__", making(lambda _: None)),
    ]


def making(then: Callable[[Any], None]) -> Callable[..., None]:
    """Make the `__init__` of managers, whether a model or a user makes them."""
    from transformers.generation.continuous_batching import continuous_api

    native = continuous_api.ContinuousBatchingManager.__init__

    def initialize(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse a model whose layers are not served, before anything of it is changed."""
        check_layers(model.config.get_text_config())
        native(self, model, *args, **kwargs)
        then(self)

    return initialize


def starting(ours: Any) -> Callable[..., Any]:
    """Make a model's method that makes or finds a manager over a cache of ours."""
    from transformers.generation.continuous_batching import continuous_api

    native = continuous_api.ContinuousMixin.init_continuous_batching

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Make or find the manager, and refuse what is not served."""
        check_layers(self.config.get_text_config())
        manager = native(self, *args, **kwargs)
        reason = not_served(manager, ours)
        if reason is not None:
            if manager._original_attn_impl is not None:  # making the manager switched it
                self.set_attn_implementation(manager._original_attn_impl)
                manager._original_attn_impl = None
            raise NotServed(reason)
        return manager

    return init_continuous_batching


def adopting() -> Callable[..., Any]:
    """Make the method with which managers make their cache, for those made before `install`."""
    from transformers.generation.continuous_batching import continuous_api

    from kvcore_transformers.cache import KvcoreCache

    native = continuous_api.ContinuousBatchingManager._create_batch_processor

    def _create_batch_processor(self: Any) -> Any:
        """Watch a manager that is not watched yet, unless it has a cache that is not kvcore's."""
        if "_create_batch_processor" in vars(self):
            return native(self)
        check_layers(self.model.config.get_text_config())
        if self.batch_processor is not None:
            raise NotServed("the manager made its cache before install(): make a new manager")
        reason = not_served(self, KvcoreCache)
        if reason is not None:
            raise NotServed(reason)
        watch(self)
        return self._create_batch_processor()

    return _create_batch_processor


def watch(manager: Any) -> None:
    """Let a manager tell its cache of changed weights, and of a step that broke off.

    Two methods of this one manager are replaced, and stay so after `uninstall`, as its cache does.
    """
    kind = type(manager)

    def _create_batch_processor() -> Any:
        """Make or find a loop's processor, whose cache may be of other weights."""
        if not _before and manager.batch_processor is None:
            raise NotServed("kvcore_transformers was uninstalled before the manager made its cache")
        processor = kind._create_batch_processor(manager)
        weights = [(each.data_ptr(), each._version) for each in manager.model.parameters()]
        if getattr(manager, "kvcore_weights", weights) != weights:
            processor.cache.is_outdated = True
        manager.kvcore_weights = weights
        return processor

    def _handle_critical_error(error: Exception, processor: Any) -> None:
        """Fail all requests, and hit no earlier content: the step may not have written it."""
        if processor is not None:
            processor.cache.is_outdated = True
        kind._handle_critical_error(manager, error, processor)

    manager._create_batch_processor = _create_batch_processor
    manager._handle_critical_error = _handle_critical_error


def not_served(manager: Any, ours: Any) -> str | None:
    """Return why a manager's settings are not served, or None if they are."""
    processor = manager.batch_processor
    if processor is not None and not isinstance(processor.cache, ours):
        return (
            f"the model keeps a persistent manager that was made without {ours.called}: call"
            " model.destroy_cached_continuous_batching_manager() first"
        )
    if manager.distributed_helper.tp_size > 1:
        return f"tensor parallelism over {manager.distributed_helper.tp_size} devices is not served"
    return None


def check_layers(config: Any) -> None:
    """Refuse a model with layers that kvcore has no group for. Raises NotServed."""
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            served = "only full_attention and sliding_attention are served"
            raise NotServed(f"layer {number} is {kind}: {served}")


def _get(holder: Any, name: str) -> Any:
    """Return an item of a dictionary, or an attribute."""
    return holder[name] if isinstance(holder, dict) else vars(holder)[name]


def _put(holder: Any, name: str, value: Any) -> None:
    """Set an item of a dictionary, or an attribute."""
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
