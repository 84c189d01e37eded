# SPDX-License-Identifier: Apache-2.0
"""Every error of the core under its public path, for example `kvcore.errors.UnknownRequest`."""

from kvcore.types.errors import *  # noqa: F403 - all of them are public
