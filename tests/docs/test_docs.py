# SPDX-License-Identifier: Apache-2.0
"""The documents say what the code does: their programs run, their pictures and names are real."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore import KVCacheManager
from kvcore.check.profiles.registry import PROFILES
from kvcore.sizing import command
from kvcore.types import errors
from tests.conftest import Backend
from tests.test_rooms import ROOMS
from tools import draw_layout, draw_pool

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "docs" / "engines.md"
CHECKING = ROOT / "docs" / "checking.md"
GENERATIONS = ROOT / "docs" / "generations.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
ADAPTER = ROOT / "docs" / "engines" / "write-an-adapter.md"
POLICIES = ROOT / "docs" / "policies.md"
SANITIZER = ROOT / "docs" / "sanitizer.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("engines/*.md")])
HEADING = re.compile(r"^#+ +(.*)$")
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN_ELSEWHERE = {
    ROOT / "docs" / "from_vllm.md": "tests/compat/test_docs.py",
    ROOT / "docs" / "events.md": "tests/runtime/test_pages.py",
    ROOT / "docs/cluster/metrics.md": "tests/runtime/prometheus/test_page.py",
    ROOT / "docs/cluster/ranks.md": "tests/runtime/test_pages.py",
    ROOT / "docs/cluster/apart.md": "tests/runtime/test_pages.py",
    ROOT / "docs/cluster/far-tiers.md": "tests/runtime/test_pages.py",
}
"""Pages whose programs another file runs: one with its own engine, one that needs the runtime."""
WITH_PROGRAMS = [
    page
    for page in PAGES
    if FENCED.search(page.read_text(encoding="utf-8")) and page not in RUN_ELSEWHERE
]


def programs(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the Python blocks of a page, those under one heading as one program, with its
    heading.

    Lines keep their numbers, so that a failure names the line of the page.
    """
    heading, kind = "", None
    program: list[str] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), "# end"]:
        if line.startswith("```"):
            kind = None if kind is not None else line[3:]
        elif kind is None and (found := HEADING.match(line)):
            if any(each.strip() for each in program):
                yield heading, "\n".join(program)
            heading, program = found[1], [""] * len(program)
        program.append(line if kind == "python" and not line.startswith("```") else "")


README_FIRST = FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
TUTORIAL_WHOLE = "\n".join(FENCED.findall(TUTORIAL.read_text(encoding="utf-8")))

PROGRAMS = [
    pytest.param(page, source, id=f"{page.name}-{heading}")
    for page in WITH_PROGRAMS
    for heading, source in programs(page)
]


@pytest.mark.parametrize(("page", "source"), PROGRAMS)
def test_programs_of_a_page_run(
    page: Path, source: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    monkeypatch.syspath_prepend(str(ROOT / "engines" / "nano_vllm"))
    program = compile(source, page.name, "exec", dont_inherit=True)
    exec(program, {"__name__": "__page__"})


@pytest.mark.parametrize("source", [README_FIRST, TUTORIAL_WHOLE], ids=["README", "tutorial"])
def test_a_program_prints_the_comments_that_follow_its_prints(
    source: str,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    exec(compile(source, "page", "exec"), {"__name__": "__page__"})
    said = re.findall(r"^# (.*)$", source, re.MULTILINE)
    assert len(said) >= 3
    assert capsys.readouterr().out.splitlines() == said


def test_the_sanitizer_prints_the_finding_of_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = SANITIZER.read_text(encoding="utf-8")
    source, shown = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )[0]
    exec(compile(source, SANITIZER.name, "exec"), {"__name__": "__page__"})
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_run(page: Path) -> None:
    blocks = FENCED.findall(page.read_text(encoding="utf-8"))
    assert blocks
    run = "\n".join(source for _, source in programs(page))
    for block in blocks:
        assert block in run


def test_a_program_that_fails_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n```python\nx = 1\n```\n\n# Two\n\n```python\ny = 2\n```\n")
    sources = dict(programs(page))
    assert sources["One"].splitlines()[3] == "x = 1"
    assert [line for line in sources["Two"].splitlines() if line] == ["y = 2"]
    assert sources["Two"].splitlines()[9] == "y = 2"


def test_the_picture_of_the_pool_is_what_a_manager_answers() -> None:
    picture = draw_pool.PICTURE.read_text(encoding="utf-8")
    assert picture == draw_pool.to_svg(draw_pool.play()), "stale: run python -m tools.draw_pool"


def test_the_picture_is_what_a_manager_answers() -> None:
    scenes = draw_layout.play()
    assert draw_layout.PICTURE.read_text(encoding="utf-8") == draw_layout.to_svg(scenes), (
        "stale picture: run python -m tools.draw_layout"
    )
    assert f"```text\n{draw_layout.to_text(scenes)}```" in ENGINES.read_text(encoding="utf-8")


def test_the_engine_page_tells_of_every_error() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KvcoreError)
    }
    page = ENGINES.read_text(encoding="utf-8")
    table = page.partition("## Errors")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == len(set(named))
    assert set(named) == kinds - {"KvcoreError"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    tops = "kvcore|rust|runtime|engines|benches|tests|tools|docs|examples"
    for path in re.findall(rf"`((?:{tops})/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.MULTILINE):
        assert set(target) - {""} <= targets, f"{page.name} names make {target}"


@pytest.mark.parametrize("package", ["kvcore", "runtime/kvcore_runtime"])
def test_the_architecture_names_every_room(package: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert len(rooms) > 4
    assert rooms - set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == set()


def test_the_architecture_has_the_rooms_in_the_order_of_their_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| room | holds | what belongs there |")[2].partition("\n\n")[0]
    rooms = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert rooms == [room for room in ROOMS if (ROOT / "kvcore" / room).is_dir()]


def test_the_size_command_of_the_readme_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"^\.venv/bin/kvcore size (.*)$", text, re.MULTILINE)
    assert command.main(words.split()) == command.FITS
    assert "requests of 32,768 tokens" in capsys.readouterr().out


def test_the_table_of_worlds_has_every_named_world_with_its_counts() -> None:
    row = r"^\| `([\w-]+)` \| (.+) \| ([\d,]+) \| ([\d,]+) \|$"
    rows = re.findall(row, CHECKING.read_text(encoding="utf-8"), re.MULTILINE)
    reported = {name: (what, count(states), count(edges)) for name, what, states, edges in rows}
    assert reported == {
        name: (each.sentence, each.num_states, each.num_edges) for name, each in PROFILES.items()
    }


def count(text: str) -> int:
    """Return a number as the pages write it."""
    return int(text.replace(",", ""))


def of_the_site(name: str) -> list[str]:
    """Return the words in a constant of the site, read as text: the site needs other packages."""
    code = ast.parse((ROOT / "tools" / "site" / "pages.py").read_text(encoding="utf-8"))
    assigned = (each for each in code.body if isinstance(each, ast.Assign))
    (value,) = (each.value for each in assigned if ast.unparse(each.targets[0]) == name)
    if isinstance(value, ast.Dict):
        value = ast.Tuple(value.values)
    texts = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
    return [word for text in texts for word in str(text).split()]


def test_the_site_has_every_method_of_the_manager() -> None:
    """Inherited methods are included."""
    public = [name for name in dir(KVCacheManager) if not name.startswith("_")]
    assert sorted(of_the_site("METHODS")) == sorted(public)
