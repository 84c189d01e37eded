# SPDX-License-Identifier: Apache-2.0
"""Parts of self-contained HTML pages: the head with its style, tables, paragraphs. Texts are
escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvcore.cli.page_style import css

CSS = """
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--c-grid); text-align: right;
  font-weight: normal; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.figures td:last-child { text-align: left; white-space: normal; width: 75%; }
svg { display: block; width: 100%; height: auto; }
""".strip()


def head(title: str) -> str:
    """Return the start of a page, with its style and its headline."""
    title = escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{title}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"\n<style>\n{css()}\n{CSS}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    )


def end() -> str:
    """Return the end of a page."""
    return "</body>\n</html>\n"


def to_rows(rows: Sequence[Sequence[str]], *, head: bool = True, words: bool = False) -> str:
    """Format rows as a table. head: the first row is its head. words: the last column is text."""
    opened = '<table class="figures">' if words else "<table>"
    lines = [f'<div class="wide">{opened}']
    for place, row in enumerate(rows):
        kind = "th" if head and place == 0 else "td"
        cells = "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table></div>\n"])


def paragraph(text: str, kind: str = "") -> str:
    """Format a paragraph."""
    opened = f'<p class="{kind}">' if kind else "<p>"
    return f"{opened}{escape(text)}</p>\n"
