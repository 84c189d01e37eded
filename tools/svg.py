# SPDX-License-Identifier: Apache-2.0
"""Build the pictures of docs/ as SVG text: rectangles and text, in a light and a dark form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

Fill = tuple[str, str, str]
"""A class, and its colours on a light and on a dark background."""


def picture(width: int, height: int, label: str, style: Iterable[str], body: Iterable[str]) -> str:
    """Return a complete picture. style: lines of CSS."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    said = f'role="img" aria-label="{escape(label)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {said}>'
    return "\n".join([head, "<style>", *style, "</style>", *body, "</svg>"]) + "\n"


def style(light: Iterable[str], dark: str, fills: Iterable[Fill]) -> Iterator[str]:
    """Yield lines of CSS. dark: the rules for a dark background, which follow the light ones."""
    fills = tuple(fills)
    yield from light
    yield from (f".{name} {{ fill: {colour}; }}" for name, colour, _ in fills)
    yield "@media (prefers-color-scheme: dark) {"
    yield dark
    yield from (f".{name} {{ fill: {colour}; }}" for name, _, colour in fills)
    yield "}"


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a filled rectangle."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:g}" y="{y:g}">{escape(words)}</text>'
