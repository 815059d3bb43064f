"""A headless Chromium for tests, driven over the DevTools protocol. It has an empty profile and no network to use."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-default-apps --no-first-run "
    "--no-default-browser-check --metrics-recording-only --hide-scrollbars --disable-features=IsolateSandboxedIframes "
    "--remote-debugging-pipe"
).split()


def find_chromium() -> str:
    """The browser; installed as Debian's package if it is missing and that is allowed, otherwise a loud skip."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    tried = subprocess.run(["sh", str(ROOT / "tools" / "get_chromium.sh")], capture_output=True, text=True, timeout=600)
    found = shutil.which("chromium")
    if found is None:
        reason = (tried.stderr or tried.stdout).strip().splitlines()[-1:] or ["no reason given"]
        pytest.skip(f"NO BROWSER TESTS: there is no Chromium and it could not be installed: {reason[0]}")
    return found


class Browser:
    """One browser process with one page; `events` keeps what it reported."""

    def __init__(self, executable: str, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser expects the protocol on descriptors 3 and 4, which a shell can give it.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            ["bash", "-c", command, executable, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        self._open()

    def _open(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            chunk = os.read(self._read, 1 << 20)
        except BlockingIOError:
            time.sleep(0.005)
            return
        if not chunk:
            raise RuntimeError(f"Chromium ended with code {self._process.wait(5)}.")
        *whole, self._buffer = (self._buffer + chunk).split(b"\0")
        yield from map(json.loads, whole)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        number, deadline = next(self._numbers), time.monotonic() + 120
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = None
        while answer is None:
            for message in self._messages():
                if message.get("id") == number:
                    answer = message
                elif "method" in message:
                    self.events.append(message)
            if time.monotonic() > deadline:
                raise TimeoutError(f"Chromium did not answer {method}.")
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str | Callable[[], Any], seconds: float = 30) -> Any:
        """Until a JavaScript expression, or a function, is true."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.evaluate(condition) if isinstance(condition, str) else condition()
            if found:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"in vain waited {seconds} s for: {condition}; faults: {self.faults}")
            time.sleep(0.02)

    def show(
        self,
        file: Path,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
        phone: bool = False,
        ready: str = "document.documentElement && document.documentElement.dataset.ready === 'yes'",
    ) -> None:
        """Load a file and wait until all charts are drawn, or whatever else `ready` says in JavaScript."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait(ready, seconds=30)

    def press(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def downloaded(self, name: str) -> bytes:
        """The bytes of a finished download."""
        file = self.downloads / name
        self.wait(lambda: file.exists() and file.stat().st_size)
        return file.read_bytes()

    def picture(self, file: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    @property
    def faults(self) -> list[str]:
        """Errors and warnings of the console, and exceptions nobody caught."""
        found = []
        for event in self.events:
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(details["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                found.append(str([item.get("value") for item in details["args"]]))
        return found

    @property
    def requests(self) -> list[str]:
        """Every address asked for, but the page itself and data inside it."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] + [
            address for address in asked if address.startswith("file:")
        ][1:]

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        os.close(self._write)


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    browser = Browser(find_chromium(), folder)
    try:
        yield browser
    finally:
        browser.close()
