# SPDX-License-Identifier: Apache-2.0
"""Errors between ranks."""

from __future__ import annotations

from kvcore_runtime.errors import KvcoreRuntimeError


class BadStep(KvcoreRuntimeError):
    """A message that is not a step, or a step that cannot be written as a message."""

    message = "the message is not a step: {reason}"


class UnevenShard(KvcoreRuntimeError):
    """A model that cannot be split evenly."""

    message = "{what} {size} cannot be split evenly over {world} ranks"


class NotLed(KvcoreRuntimeError):
    """An engine whose steps the other ranks cannot follow."""

    message = "the engine cannot lead other ranks: {reason}"


class StepFailed(KvcoreRuntimeError):
    """A batch that another rank could not apply, so no rank has computed its step."""

    message = "batch {number} could not be applied on every rank: {reason}"


class RankLost(KvcoreRuntimeError):
    """A rank that ended, or did not answer in time; the others cannot go on."""

    message = "a rank was lost at batch {number}: {reason}"
