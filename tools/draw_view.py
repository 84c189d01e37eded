# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/view.png: the page of `kvcore view` for a made-up replay, in a Chromium.

`python -m tools.draw_view` writes the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvcore.replay.results import Options
from kvcore.view.command import main as view
from tests.view.chromium import browser
from tests.view.records import record_replay

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "view.png"
WHERE = "#step=4700&request=29"


def main() -> int:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name, browser(Path(name)) as page:
        folder = Path(name, "turns")
        record_replay(folder, 60, Options(num_blocks=600, max_running=16), 8_000)
        view([str(folder), "--html", str(Path(name, "turns.html"))])
        page.open(Path(name, "turns.html"), WHERE)
        page.shoot(PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
