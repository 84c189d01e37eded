# SPDX-License-Identifier: Apache-2.0
"""kvcore in place of the cache manager of transformers' continuous batching.

    with kvcore_transformers.installed() as statistics:
        model.generate_batch(prompts)

transformers keeps the tensor, the scheduler and the forward pass; kvcore decides about the blocks.
Caches that are made while it is installed are kvcore's until they are dropped, also those that a
persistent manager keeps after `uninstall`. Decisions of transformers 5.23.0 that end or block a
generation are replaced too: of its scheduler (`schedulers`) and of its offloading (`offloading`).
"""

from kvcore_transformers.install import install, installed, uninstall, weights_changed
from kvcore_transformers.pinned import NotServed
from kvcore_transformers.statistics import Statistics

__all__ = ["NotServed", "Statistics", "install", "installed", "uninstall", "weights_changed"]
