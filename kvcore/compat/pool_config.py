# SPDX-License-Identifier: Apache-2.0
"""Configurations for pools that may be too small for one request of full length.

`Config` refuses such a pool, since that request could never run. vLLM accepts it, and so do engines
written for vLLM: their longest requests are refused when they arrive.
"""

from __future__ import annotations

import warnings
from typing import Any

from kvcore.types.config import Config
from kvcore.types.errors import InvalidConfig


def make_config(num_blocks: int, *sizes: int, max_model_len: int, **options: Any) -> Config:
    """Make a `Config`, without a limit of length if the pool cannot hold a request of
    max_model_len.

    Then a RuntimeWarning gives the numbers, a request that needs more than the pool is refused as
    one that never fits, and the engine must clip its lookahead at max_model_len itself. Raises
    InvalidConfig for other errors, and GroupsDoNotFit.
    """
    options.setdefault("max_num_batched_tokens", max_model_len)
    try:
        return Config(num_blocks, *sizes, max_model_len=max_model_len, **options)
    except InvalidConfig as error:
        config = Config(num_blocks, *sizes, **options)  # raises if there was another reason
        warnings.warn(f"requests of full length will not fit: {error}", RuntimeWarning, 2)
        return config
