# SPDX-License-Identifier: Apache-2.0
"""Print tables of the side-by-side benches, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(
    heads: Sequence[str], table: Iterable[Sequence[str]], *, markdown: bool = False
) -> None:
    """Print rows as columns; only the first is aligned to the left."""
    lines = [heads, *table]
    if markdown:
        lines.insert(1, ["---", *["---:"] * (len(heads) - 1)])
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())
