# SPDX-License-Identifier: Apache-2.0
"""Configurations of every kind, drawn by chance."""

from __future__ import annotations

from random import Random

from kvcore import Config, Group, KvcoreError

DRAWS_MAX = 200
KINDS = ("full_attention",) * 4 + ("sliding_window",) * 3 + ("chunked_local",) * 2 + ("mla",)
NUM_GROUPS = (1, 1, 1, 2, 2, 3)
SIZES = (1, 2, 2, 4, 4)


def draw_config(rng: Random) -> Config:
    """Return a configuration that works: many draws do not, since their pool is too small."""
    for _ in range(DRAWS_MAX):
        try:
            return _draw(rng)
        except KvcoreError:
            continue
    raise RuntimeError(f"{DRAWS_MAX} draws gave no configuration that works")


def _draw(rng: Random) -> Config:
    eagle = rng.random() < 0.15
    groups = [_draw_group(rng, eagle) for _ in range(rng.choice(NUM_GROUPS))]
    caching = rng.random() < 0.95
    if rng.random() < 0.08:
        caching = False
        groups.append(Group(rng.choice(SIZES), kind="cross_attention"))
    windowed = any(group.window is not None for group in groups)
    return Config(
        num_blocks=len(groups) * rng.randint(4, 16),
        groups=tuple(groups),
        num_host_blocks=rng.choice((0, rng.randint(3, 20))),
        max_model_len=rng.choice((None, None, rng.randint(8, 30))),
        max_num_batched_tokens=rng.choice((None, None, rng.randint(3, 12))),
        enable_caching=caching,
        null_block=windowed or rng.random() < 0.85,
        eviction=rng.choice(("lru", "lru", "uncached_first")),
        duplicates=rng.choice(("keep", "keep", "merge")),
        num_preallocate_tokens=rng.choice((0, 0, 0, rng.randint(1, 6))),
        watermark_blocks=rng.choice((0, 0, 0, rng.randint(1, 3))),
        use_eagle=eagle,
        enable_events=rng.random() < 0.95,
        record_new_blocks=rng.random() < 0.3,
        hashing=rng.choice(("sha256", "sha256", "sha256_cbor", "xxh3", "siphash")),
        hash_seed=b"oracle",
        max_in_flight=rng.choice((0, 0, 0, 1, 2, 3)),
        publish=rng.choice(("scheduled", "scheduled", "completed")),
        hide_salts=Random(repr(groups)).random() < 0.3,  # apart, so that all other draws stay
    )


def _draw_group(rng: Random, eagle: bool) -> Group:
    kind, size = rng.choice(KINDS), rng.choice(SIZES)
    windowed = kind in ("sliding_window", "chunked_local")
    return Group(
        size,
        kind=kind,  # type: ignore[arg-type] # one of KINDS
        window=rng.randint(1, 9) if windowed else None,
        eagle=eagle and rng.random() < 0.5,
        zero_new_blocks=rng.random() < 0.25,
    )
