# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine: its refusals, and the one failure that must not happen."""

from kvcore_runtime.errors import KvcoreRuntimeError


class InvalidOption(KvcoreRuntimeError):
    """An option of the engine is out of range."""

    message = "{name} is {value!r}, expected {least} or more"


class NotWithStates(KvcoreRuntimeError):
    """An engine does not have this option for a model with recurrent states."""

    message = "a model with recurrent states has no {option}{unless}"


class NoSuchCore(KvcoreRuntimeError):
    """This process may not run on the core."""

    message = "core {core!r} is none that this process may run on"


class NeverFits(KvcoreRuntimeError):
    """Neither this pool nor this model can ever serve the request."""

    message = "request {request!r} needs {needed} {what}, there are {available}"


class RequestInProgress(KvcoreRuntimeError):
    """A request with this id is already unfinished."""

    message = "request {request!r} is on its way already"


class EngineStuck(KvcoreRuntimeError):
    """Nothing could be scheduled although requests are unfinished: a bug, or blocks are held by
    others.
    """

    message = (
        "nothing of {num_unfinished} sequences could be scheduled, {num_free_blocks} blocks are "
        "free"
    )


class NotExecuted(KvcoreRuntimeError):
    """A batch was not run, since an earlier one failed or was cancelled."""

    message = "batch {number} was not run: one before it failed or was taken back"


class ExecutorNotStarted(KvcoreRuntimeError):
    """The system gives no process to compute steps: the engine can try again, or do without."""

    message = (
        "the process that computes steps cannot be started: {reason}; "
        "max_in_flight=0 computes them in this one"
    )


class ExecutorDied(KvcoreRuntimeError):
    """The process that computes steps has died, so the engine cannot continue."""

    message = "the process that computes steps has ended, with exit code {exit_code}"


class ExecutorFailed(KvcoreRuntimeError):
    """An error in the process that computes steps could not be sent unchanged."""

    message = "the process that computes steps raised {error}"
