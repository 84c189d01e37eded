# SPDX-License-Identifier: Apache-2.0
"""Write docs/facts.md: the numbered facts that headers cite, each with the files of its tests.

`make conformance` writes the page from `tests/conformance/facts.toml` and the marks of the tests; a
test checks that the page in the tree is up to date.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tools.conformance import (
    CONFLICTS,
    NUMBERS,
    ROOT,
    Facts,
    files_of_tests,
    marks,
    read_facts,
)

PAGE = ROOT / "docs" / "facts.md"
SOURCES = {
    "S000": "`KVCacheManager` of vLLM 0.21.0",
    "S001": "`kv_cache_utils` of V1 in vLLM 0.8.5",
    "S002": "`PrefixCachingBlockAllocator` of V0 in vLLM 0.8.5, and what stands around it",
    "S003": "`BlockSpaceManager` of vLLM 0.3.0",
    "S004": "the first manager of V1 with a prefix cache",
}
HEAD = """# The numbered facts

kvcore does what five managers of vLLM do. What each was seen to do is a numbered fact, and source
files cite the facts that they follow ("Source: S000-15"). X numbers are decisions for cases in
which two of the managers contradict each other; [decisions.md](decisions.md) has the reasons. Each
fact is followed by the files of its tests. `make conformance` runs these tests and writes this page
from `tests/conformance/facts.toml`.
"""


def facts_page(facts: Facts) -> str:
    """Return the page as Markdown."""
    files: dict[str, set[str]] = defaultdict(set)
    for number, place in marks(files_of_tests()):
        files[number].add(place.partition(":")[0])
    lines = [HEAD]
    for source, title in SOURCES.items():
        lines.append(f"## {source}: {title}\n")
        numbers = [each for each in NUMBERS if each.startswith(source)]
        lines += [_line(facts, number, sorted(files[number])) for number in numbers]
        lines.append("")
    lines.append("## X: what was decided if the sources differ\n")
    lines += [_line(facts, number, sorted(files[number])) for number in CONFLICTS]
    return "\n".join(lines) + "\n"


def _line(facts: Facts, number: str, files: list[str]) -> str:
    """Return a fact as a list item with an anchor and links to its tests."""
    words = facts.words.get(number) or facts.conflicts.get(number, "")
    links = ", ".join(f"[{Path(name).stem}](../{name})" for name in files)
    said = f" ({links})" if links else ""
    if number in facts.does_not_apply:
        said = f". Does not apply: {facts.does_not_apply[number]}"
    return f'- <a id="{number}"></a>**{number}** {words}{said}'


if __name__ == "__main__":
    PAGE.write_text(facts_page(read_facts()), encoding="utf-8")
