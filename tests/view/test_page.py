# SPDX-License-Identifier: Apache-2.0
"""The page of a record in a browser: what it shows, by slider, keys, search and link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

import pytest

from kvcore import Request
from kvcore.replay.results import Options
from kvcore.trace.calls import Call
from kvcore.view import columns
from kvcore.view.command import main
from kvcore.view.history import History
from kvcore.view.recording import watch
from tests.conftest import Backend, need_twin
from tests.record.records import CONFIG, record, story
from tests.view.chromium import Page, browser
from tests.view.pools import Pool, read
from tests.view.records import record_replay

MOVE = """((step) => { const slider = document.getElementById("slider"), original = apply;
let count = 0;
apply = (pool, at) => (count++, original(pool, at));
const changes = new MutationObserver(() => {}), start = performance.now();
changes.observe(document.body, { childList: true, subtree: true });
slider.value = step; slider.dispatchEvent(new Event("input"));
document.body.getBoundingClientRect();
const ms = performance.now() - start;
const nodes = changes.takeRecords().flatMap((each) => [...each.addedNodes]).length;
changes.disconnect();
apply = original; return [count, nodes, ms];
})"""
"""Moves the slider, draws the step, lays the page out; returns the number of events that the page
applies, the number of nodes that it adds, and the milliseconds that it takes."""
POOL = """((pool) => [[...pool.used], [...pool.cached], [...pool.owners]])(poolAt(%d))"""
MOVE_EVENTS_MAX = 1 << 15
"""Those behind a keyframe, which are 1 << 14, and those of one step."""
OTHER_NODES_MAX = 16
"""Nodes that a step adds beside its rows: of its title and of the figures."""
BYTES_MAX = 40_000_000


def text_of(page: Page, element: str) -> str:
    """Return the text of an element."""
    text: str = page.run(f"document.getElementById('{element}').innerText")
    return text


def check_pool(page: Page, history: History, steps: set[int]) -> None:
    """Assert that the page has the pool of these steps."""
    pool, step, size = Pool(), 0, 600
    for event in read(history.events.sections()):
        pool.follow(event)
        if event[0] != columns.BATCH:
            continue
        if step in steps:
            used, cached, owners = page.run(POOL % step)
            assert {block for block in range(size) if used[block]} == pool.used
            assert {block for block in range(size) if cached[block]} == pool.cached
            assert {block: each.total() for block, each in pool.owners.items() if each} == {
                block: count for block, count in enumerate(owners) if count
            }
        step += 1


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Yield a page in a browser."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a record of a full pool."""
    folder = tmp_path_factory.mktemp("replayed")
    record_replay(folder / "record", 20, Options(num_blocks=600, max_running=16), 1500)
    assert main([str(folder / "record"), "--html", str(folder / "page.html")]) == 0
    return folder


def test_every_step_is_that_of_the_record(page: Page, replayed: Path) -> None:
    history = watch(replayed / "record", "python", None, None).history
    page.open(replayed / "page.html")
    steps = Random(1).sample(range(history.num_steps), 20)
    assert max(page.run(f"{MOVE}({step})")[0] for step in steps) > 0
    check_pool(page, history, set(steps))
    assert text_of(page, "last") == f"{history.num_steps - 1:,}"
    assert page.errors == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_it_fits_each_screen(page: Page, replayed: Path, width: int, dark: bool) -> None:
    page.open(replayed / "page.html", "#step=900&block=40", width=width, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    shown = page.run("getComputedStyle(document.body).backgroundColor")
    assert shown == ("rgb(15, 19, 23)" if dark else "rgb(255, 255, 255)")
    colours = "new Set(new Uint32Array(grid.image.data.buffer)).size"
    assert page.run(colours) > 4
    overlaps = """(() => { const boxes = [...document.querySelectorAll(
      ".row > *, dl div, #legend li, h1, h2, #detail p")].filter((each) => each.offsetWidth)
      .map((each) => [each.textContent, each.getBoundingClientRect()]);
      return boxes.flatMap(([name, a], at) => boxes.slice(at + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 &&
        b.top < a.bottom - 1)
        .map(([other]) => `${name} / ${other}`)); })()"""
    assert page.run(overlaps) == []
    unnamed = """[...document.querySelectorAll("input, select, button, canvas")].filter((each) =>
      !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.id)"""
    assert page.run(unnamed) == []
    assert page.errors == []


def test_links_keys_and_search_lead_to_steps_requests_and_blocks(
    page: Page, tmp_path: Path, backend: Backend
) -> None:
    refused = [
        Call("add_request", (Request("long", list(range(40))),)),
        Call("allocate_slots", ("long", 40)),
        Call("take_batch"),
    ]
    record(tmp_path / "record", CONFIG, [*story(), *refused], backend)
    assert main([str(tmp_path / "record"), "--html", str(tmp_path / "page.html")]) == 0
    page.open(tmp_path / "page.html", "#step=8")
    assert "allocate_slots long: 40 tokens refused never: needs" in text_of(page, "events")
    page.open(tmp_path / "page.html", "#step=3&request=b")
    assert text_of(page, "what") == "Request b"
    assert "add_request b: 6 tokens" in text_of(page, "life")
    assert "allocate_slots b: 40 tokens TooManyTokens" in text_of(page, "events")
    page.run("document.activeElement.blur()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("location.hash") == "#step=5&request=b"
    assert "swap_out c" in text_of(page, "events")
    page.run("document.getElementById('search').value = 'block 1'")
    page.run("document.getElementById('find').requestSubmit()")
    assert text_of(page, "what") == "Block 1"
    life = text_of(page, "life")
    assert re.search(r"1\ta takes block 1\n", life)
    page.run("document.getElementById('search').value = '<b>'")
    page.run("document.getElementById('find').requestSubmit()")
    assert text_of(page, "missing") == "No request or block “<b>”."
    x, y = page.run("((box) => [box.left, box.top])($('grid').getBoundingClientRect())")
    cell = page.run("grid.cell / grid.ratio")
    page.click(x + 2.5 * cell, y + cell / 2)
    assert text_of(page, "what") == "Block 2"
    page.run("document.getElementById('grid').focus()")
    page.press("ArrowRight")
    assert text_of(page, "what") == "Block 3"
    assert text_of(page, "tip").startswith("Block 3: ")
    page.run("play(true)")
    page.run(
        "new Promise((done) => { const look = () => timer ? setTimeout(look, 20) : done();"
        " look(); })"
    )
    assert page.run("step") == page.run("ends.length - 1")
    assert page.errors == []


@pytest.mark.slow
def test_a_slider_move_over_100_000_steps_takes_few_events_and_nodes(
    page: Page, tmp_path: Path
) -> None:
    need_twin()
    options = Options(num_blocks=16_384, max_running=32)
    record_replay(tmp_path / "record", 8_000, options, 100_000)
    file = tmp_path / "page.html"
    assert main([str(tmp_path / "record"), "--html", str(file)]) == 0
    assert file.stat().st_size <= BYTES_MAX
    page.open(file)
    assert page.run("ends.length - 1") == 100_000
    assert page.run("K.length") > 100 * MOVE_EVENTS_MAX
    steps = Random(1).choices(range(100_001), k=200)
    applied, nodes, ms = zip(*(page.run(f"{MOVE}({step})") for step in steps), strict=True)
    print(f"a slider move: median {median(ms):.1f} ms, at most {max(ms):.1f} ms of {len(ms)}")
    assert max(applied) <= MOVE_EVENTS_MAX
    assert max(nodes) <= page.run("ROWS_MAX") + OTHER_NODES_MAX
