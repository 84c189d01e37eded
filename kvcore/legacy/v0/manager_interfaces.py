# SPDX-License-Identifier: Apache-2.0
"""The registry of V0's managers of sequences, by their names in a configuration.

Source: S002-72.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvcore.legacy.v0.errors import WrongValue


class BlockSpaceManager:
    """Gives blocks to sequences."""

    _versions: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, version: str) -> None:
        """version: the name by which `get_block_space_manager_class` finds the class."""
        BlockSpaceManager._versions[version] = cls

    @staticmethod
    def get_block_space_manager_class(version: str) -> Any:
        """Return the manager class for "selfattn" or "placeholder". Raises WrongValue."""
        if version.lower() not in BlockSpaceManager._versions:
            raise WrongValue(reason=f"there are 'selfattn' and 'placeholder', not {version!r}")
        return BlockSpaceManager._versions[version.lower()]
