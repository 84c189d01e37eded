# SPDX-License-Identifier: Apache-2.0
"""A configuration for a pool that may be too small for one request of full length.

`Config` refuses such a pool, since that request could never run. vLLM takes it, and so do engines
that were written for it: their longest requests are refused when they come.
"""

from __future__ import annotations

import warnings
from typing import Any

from kvcore.types.config import Config
from kvcore.types.errors import InvalidConfig


def make_config(num_blocks: int, *sizes: int, max_model_len: int, **options: Any) -> Config:
    """A `Config`, without a limit of length if the pool cannot hold a request of max_model_len.

    That is a RuntimeWarning, with the numbers. A request of which more is scheduled than the pool
    holds is refused as one that never fits. The engine then clips its lookahead at max_model_len
    itself. Raises InvalidConfig for all else, and GroupsDoNotFit.
    """
    options.setdefault("max_num_batched_tokens", max_model_len)
    try:
        return Config(num_blocks, *sizes, max_model_len=max_model_len, **options)
    except InvalidConfig as error:
        config = Config(num_blocks, *sizes, **options)  # raises if the reason was another
        warnings.warn(f"requests of full length will not fit: {error}", RuntimeWarning, 2)
        return config
