# SPDX-License-Identifier: Apache-2.0
"""The checker: every state of a small world, over the production transitions.

    from kvcore import Config, Group
    from kvcore.check import World, check

    config = Config(4, groups=(Group(2),), null_block=False)
    report = check(World(config=config, num_requests=2, num_tokens=4, num_prompt=4))
    assert report.verdict == "complete"

docs/checking.md says what this proves and what not; `kvcore check` is the command.
"""

from kvcore.check.extend.as_pytest import pytest_text, trace_text
from kvcore.check.extend.source_of import NotWritable
from kvcore.check.properties.registry import PROPERTIES, Property
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.check.stories.story import render
from kvcore.check.world.model import Broken, CheckedCall, Edge, Model, Violation
from kvcore.check.world.world import BASIC_CALLS, Move, Symmetry, World

__all__ = [
    "BASIC_CALLS",
    "PROPERTIES",
    "Broken",
    "CheckedCall",
    "Edge",
    "Model",
    "Move",
    "NotWritable",
    "Property",
    "Report",
    "Symmetry",
    "Violation",
    "World",
    "check",
    "pytest_text",
    "render",
    "trace_text",
]
