# SPDX-License-Identifier: Apache-2.0
"""Misuse that is possible only with an engine's own request objects and automatic batches.

All other misuse raises the types of `kvcore.types.errors`.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class NotOneGroup(KvcoreError):
    """A call for a single group was made on blocks of several groups."""

    message = "these are blocks of {num_groups} groups: ask for those of all groups"


class TokensChanged(KvcoreError):
    """Tokens of a request that holds blocks were removed or replaced."""

    message = (
        "request {request!r} holds blocks for {num_known} tokens that are not its first "
        "{num_known} any more: free it first"
    )


class BehindWindow(KvcoreError):
    """Computing again would read blocks that a window gave back."""

    message = (
        "request {request!r} would compute from token {requested} again, and group {group_id} "
        "keeps nothing before token {first}: free it first"
    )


class CommandsNotKept(KvcoreError):
    """Batches are kept only with `keep_commands=True`."""

    message = "commands are dropped with each step: make the manager with keep_commands=True"


class UnreadCommands(KvcoreError):
    """Too many batches wait for `take_commands`."""

    message = "{num_batches} batches wait to be read: call take_commands in every step"


class NoSlotLeft(KvcoreError):
    """A slot in a request's last block was promised, but the block was pinned or forked since."""

    message = (
        "request {request!r} was told of a slot in its last block, which was pinned or forked "
        "through the core before, and no block is free to copy it to"
    )
