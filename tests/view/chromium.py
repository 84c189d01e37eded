# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over two pipes by its own protocol, without a network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
DARK = [{"name": "prefers-color-scheme", "value": "dark"}]


class Page:
    """One page. errors: what its script raised."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.errors: list[str] = []
        self._out, self._in = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        self._left, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Network.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )

    def call(self, method: str, **params: Any) -> Any:
        """Call the protocol, and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                details = answer["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", details).get("description", ""))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path, where: str = "", *, width: int = 1280, dark: bool = False) -> None:
        """Open a file, and wait until it is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=DARK if dark else [])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.as_uri()}{where}")
        self.run(
            "new Promise((done) => { const look = () => document.readyState === 'complete' "
            "&& !document.getElementById('loading') ? done() : setTimeout(look, 20); look(); })"
        )

    def run(self, script: str) -> Any:
        """Return the awaited value of an expression."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def click(self, x: float, y: float) -> None:
        """Click a place of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def shoot(self, path: Path) -> None:
        """Write a picture of the window."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self._out.write(json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        self._out.close()
        self._in.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._in.fileno(), 1 << 20)
            assert data, "Chromium ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Yield a page in a browser of its own; skip the test if there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    ours, theirs = os.pipe(), os.pipe()

    def connect() -> None:  # the browser reads file 3 and writes file 4
        ends = os.dup(ours[0]), os.dup(theirs[1])
        high = [os.dup2(end, 60 + place) for place, end in enumerate(ends)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-pipe",
        "--disable-background-networking",
    ]
    process = subprocess.Popen(
        [program, *options],
        preexec_fn=connect,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        page = Page(ours[1], theirs[0])
        yield page
        page.close()
        process.wait(20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
