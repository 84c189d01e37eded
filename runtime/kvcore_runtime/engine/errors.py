# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine: its refusals, and the one failure that must not happen."""

from kvcore_runtime.errors import KvcoreRuntimeError


class InvalidOption(KvcoreRuntimeError):
    """An option of the engine outside its range."""

    message = "{name} is {value!r}, expected {least} or more"


class NoSuchCore(KvcoreRuntimeError):
    """A core that this process may not run on."""

    message = "core {core!r} is none that this process may run on"


class NeverFits(KvcoreRuntimeError):
    """A request that no pool of this size, or no such model, can ever serve."""

    message = "request {request!r} needs {needed} {what}, there are {available}"


class RequestInProgress(KvcoreRuntimeError):
    """A request of this id is on its way already."""

    message = "request {request!r} is on its way already"


class EngineStuck(KvcoreRuntimeError):
    """Nothing could be scheduled although some are unfinished: a bug, or blocks held by others."""

    message = (
        "nothing of {num_unfinished} sequences could be scheduled, {num_free_blocks} blocks are "
        "free"
    )


class NotExecuted(KvcoreRuntimeError):
    """A batch was not run, since one before it failed or was taken back."""

    message = "batch {number} was not run: one before it failed or was taken back"


class ExecutorNotStarted(KvcoreRuntimeError):
    """The system gives no process to compute steps: the engine can try again, or do without."""

    message = (
        "the process that computes steps cannot be started: {reason}; "
        "max_in_flight=0 computes them in this one"
    )


class ExecutorDied(KvcoreRuntimeError):
    """The process that computes steps is gone: the engine cannot go on."""

    message = "the process that computes steps has ended, with exit code {exit_code}"


class ExecutorFailed(KvcoreRuntimeError):
    """An error in the process that computes steps, of a kind that cannot be sent as it is."""

    message = "the process that computes steps raised {error}"
