# SPDX-License-Identifier: Apache-2.0
"""Pages of the site that are made, not written, and links that lead out of docs/.

The start page is README.md. The reference comes from the docstrings and from the help texts of the
commands. A link to a file outside docs/ becomes the file's name: the site has no source tree.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
CALLS = (
    *("requests", "prefix_lookup", "allocate", "publish", "window", "free", "truncate", "rewind"),
    *("fork", "swap", "pins", "transfers", "batches", "cancel", "drain", "queries"),
)
VALUES = ("config", "groups", "values", "commands", "events", "extra_inputs")
MODULES = {
    "manager": ("The manager", ["kvcore.manager.KVCacheManager"]),
    "transitions": (
        "The transitions: arguments, order and errors of each call",
        [f"kvcore.transitions.{name}" for name in CALLS],
    ),
    "types": (
        "Values and commands",
        [f"kvcore.types.{name}" for name in VALUES],
    ),
    "errors": ("Errors", ["kvcore.types.errors"]),
}
COMMANDS = ("check", "simulate", "replay", "size", "trace")
NARROW = {**os.environ, "COLUMNS": "96"}


def on_files(files: Files, config: Any) -> Files:
    """Add the start page and the reference."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=_inside(readme)))
    for name, (title, modules) in MODULES.items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside docs/ instead of linking to them."""
    return OUTSIDE.sub(lambda match: f"{match[1]} (`{match[2]}`)", markdown)


def _inside(readme: str) -> str:
    """README's links, as they are from within docs/."""
    here = re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", readme)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w.]+\.(?:md|svg))([^)]+)\)", r"\1 (`\2`)", here)


def _commands() -> str:
    """The help text of each command, as it prints it."""
    parts = ["# The commands of kvcore\n"]
    for name in ("", *COMMANDS):
        words = [str(ROOT / ".venv" / "bin" / "kvcore"), *filter(None, [name]), "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=NARROW)
        parts.append(f"## kvcore {name}\n\n```text\n{done.stdout}```\n")
    return "\n".join(parts)
