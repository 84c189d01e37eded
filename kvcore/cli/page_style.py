# SPDX-License-Identifier: Apache-2.0
"""The colours and the style of all pages, for light and dark screens."""

from __future__ import annotations

COLOURS = {
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#6a737d", "#9aa4af"),
    "grid": ("#e3e6ea", "#30363d"),
    "blue": ("#0b6bb5", "#6cb6ff"),
    "orange": ("#c4570b", "#f0a35e"),
    "green": ("#1a7f4b", "#6fd39b"),
    "red": ("#b4233a", "#ff8a98"),
    "page": ("#ffffff", "#0f1317"),
    "card": ("#f6f7f9", "#191f26"),
}
"""Each colour on a light and a dark page."""
LIGHT, DARK = ({name: pair[page] for name, pair in COLOURS.items()} for page in (0, 1))
CSS = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
@media print { :root { LIGHT } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.2rem 4rem; background: var(--c-page);
  color: var(--c-ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; }
.faint, th, dt { color: var(--c-faint); }
.warn { color: var(--c-red); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem;
  margin: 1.4rem 0; }
dl div { background: var(--c-card); border: 1px solid var(--c-grid); border-radius: .5rem;
  padding: .6rem .8rem; }
dt { font-size: .85rem; }
dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
""".strip()


def css() -> str:
    """Return the common style of all pages."""
    light, dark = (
        " ".join(f"--c-{name}: {colour};" for name, colour in colours.items())
        for colours in (LIGHT, DARK)
    )
    return CSS.replace("LIGHT", light).replace("DARK", dark)
