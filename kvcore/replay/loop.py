# SPDX-License-Identifier: Apache-2.0
"""The replay: a continuous-batching loop over the real manager, in virtual time.

Rules: requests are read one by one as their time comes. Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcore.commands import Batch
from kvcore.replay.results import BackendName, Options, Result, Sample
from kvcore.replay.workload import Step, TraceRequest

Watch = Callable[[Sample], object]
Apply = Callable[[Batch, Step], object]


def replay(
    requests: Iterable[TraceRequest],
    options: Options,
    *,
    backend: BackendName | None = None,
    watch: Watch | None = None,
    apply: Apply | None = None,
) -> Result:
    """Run the requests through a manager; returns what came of it.

    requests: in the order of their arrival; a `TraceReader` gives the result its name and its count
    of skipped lines. watch: called with a sample after each step. apply: called with each step's
    batch before the next step. A KeyboardInterrupt ends the run, and the result has what was done.
    """
    raise NotImplementedError
