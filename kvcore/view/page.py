# SPDX-License-Identifier: Apache-2.0
"""Renders a record as one page: its events as columns, and a script that draws the pool.

The page uses no network address. Text from the record (ids, paths) is escaped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kvcore.cli.page_style import css
from kvcore.record.calls import NAMES
from kvcore.replay.report_text import counted
from kvcore.view.columns import FIRST_CALL, KINDS
from kvcore.view.recording import Viewed

SCRIPTS = ("events.js", "words.js", "drawing.js", "page.js")
BODY = """
<p id="loading">Reading the record</p>
<noscript><p class="warn">This page is drawn by a script.</p></noscript>
<main id="main" hidden>
<div id="controls">
<canvas id="strip" role="img" aria-label="Use of the pool over all steps: blocks with owners, and \
cached ones; evictions below, refusals above"></canvas>
<input type="range" id="slider" min="0" value="0" aria-label="Step"/>
</div>
<div class="row">
<button type="button" id="back" aria-label="Previous step">&#8592;</button>
<button type="button" id="play">Play</button>
<button type="button" id="on" aria-label="Next step">&#8594;</button>
<label>Step <input type="number" id="number" min="0" value="0"/></label>
<span class="faint">of <span id="last"></span></span>
<label>Speed <select id="rate"><option value="2">2/s</option><option value="10" selected="">10/s\
</option><option value="100">100/s</option><option value="1000">1000/s</option></select></label>
<form id="find"><label>Find <input type="search" id="search" placeholder="request, or block 12" \
autocomplete="off"/></label><button>Go</button></form>
<span id="missing" class="warn" role="status"></span>
</div>
<section aria-label="The pool">
<h2>The pool after this step</h2>
<dl>
<div><dt>used</dt><dd id="used"></dd></div>
<div><dt>free, cached</dt><dd id="cached"></dd></div>
<div><dt>free</dt><dd id="free"></dd></div>
<div><dt>evicted now</dt><dd id="evicted"></dd></div>
</dl>
<p id="waits" class="faint"></p>
<div><canvas id="grid" tabindex="0" role="application" aria-label="Blocks of the pool; arrow keys \
choose one" aria-describedby="tip"></canvas></div>
<p id="tip" aria-live="polite"></p>
<ul id="legend">
<li><i></i>one owner, in its colour</li>
<li><i class="many"></i>shared, in its writer&#8217;s colour</li>
<li><i class="pale"></i>free, cached, in its writer&#8217;s colour</li>
<li><i class="held"></i>held by a pin or an operation</li>
<li><i class="none"></i>free</li>
</ul>
<div id="hosted"><h2>Host tier</h2><div><canvas id="host" role="img" aria-label="Blocks of the \
host tier, in the colours of the requests that are swapped out"></canvas></div></div>
</section>
<div>
<section aria-labelledby="did">
<h2 id="did"></h2>
<ol id="events"></ol>
</section>
<section id="detail" aria-labelledby="what" hidden>
<div class="head"><h2 id="what" tabindex="-1"></h2><button type="button" id="close">Close</button>
</div>
<p id="facts"></p>
<div id="table"></div>
<div id="life"></div>
</section>
</div>
</main>
"""


def to_html(name: str, viewed: Viewed, lines: Sequence[str]) -> Iterator[str]:
    """Yield the parts of the page. lines: notes on the record for the reader."""
    config, history = viewed.config, viewed.history
    sizes = " + ".join(f"{each.kind} of {each.block_size} tokens" for each in config.groups)
    setting = f"{counted(config.num_blocks, 'block')}, {sizes}, {config.eviction}"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    yield f"<title>{escape(name)}</title>\n"
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"\n<style>\n{css()}\n{_file('page.css')}</style>\n</head>\n<body>\n"
    yield f'<h1>{escape(name)}</h1>\n<p class="faint">{escape(setting)}.</p>\n'
    yield f'<p class="faint">{escape("; ".join(lines))}.</p>\n'
    yield BODY
    yield f'<script type="application/json" id="meta">{_json(_meta(viewed))}</script>\n'
    for section in history.events.sections():
        data = base64.b64encode(section).decode()
        yield f'<script type="text/plain" class="events">{data}</script>\n'
    yield from (f"<script>\n{_file(each)}</script>\n" for each in SCRIPTS)
    yield "</body>\n</html>\n"


def _meta(viewed: Viewed) -> dict[str, Any]:
    """Return what the script needs besides the events."""
    config, history = viewed.config, viewed.history
    return {
        "kinds": KINDS,
        "first_call": FIRST_CALL,
        "calls": {FIRST_CALL + opcode: name for opcode, name in NAMES.items()},
        "outcomes": history.outcomes,
        "requests": history.names,
        "lists": history.lists,
        "num_blocks": config.num_blocks,
        "num_host_blocks": config.num_host_blocks,
        "first_block": history.first_block,
        "groups": [each.kind for each in config.groups],
    }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("kvcore.view").joinpath(name).read_text(encoding="utf-8")
