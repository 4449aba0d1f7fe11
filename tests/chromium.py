"""Drives Debian's Chromium over a pipe of the DevTools protocol; the standard library is enough."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)
START = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
ABSENT = "Chromium is not installed (Debian: apt-get install chromium)"


def executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class BrowserError(Exception):
    pass


@contextmanager
def browser(profile: Path) -> Iterator["Browser"]:
    """A browser with a new profile; it and what it started are ended on the way out."""
    found = executable()
    if found is None:
        raise BrowserError(ABSENT)
    ours, theirs = os.pipe(), os.pipe()
    # Above 4, so that neither descriptor is in the way of the 3 and 4 that the protocol prescribes.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (ours[0], theirs[1]))
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(reads), str(writes), found, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(reads, writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for fd in (ours[0], theirs[1], reads, writes):
        os.close(fd)
    try:
        yield Browser(theirs[0], ours[1])
    finally:
        os.close(ours[1])
        os.close(theirs[0])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


class Browser:
    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, timeout_s: float = 20, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._next(deadline)
            if answer is None:
                raise BrowserError(f"no answer to {method} within {timeout_s} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._reads], [], [], left_s)[0]:
                return None
            data = os.read(self._reads, 1 << 20)
            if not data:
                raise BrowserError("the browser ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def open(
        self, url: str, *, width: int = 1180, height: int = 800, dark: bool = False, scale: float = 1
    ) -> "Page":
        """A new tab that shows url and has loaded it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.show(url, width=width, height=height, dark=dark, scale=scale)
        return page


class Page:
    def __init__(self, owner: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = owner, session, target

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def show(
        self, url: str, *, width: int = 1180, height: int = 800, dark: bool = False, scale: float = 1
    ) -> None:
        """Loads url anew, as a new tab would, with nothing left of what this one showed or was told before.

        The tab keeps its process, which has compiled the page's scripts: a third of the CPU of a new tab.
        """
        events = self._browser.events
        events[:] = [event for event in events if event.get("sessionId") != self._session]
        self.call("Emulation.setScriptExecutionDisabled", value=False)
        self.size(width, height, scale)
        theme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        self.hover(0, 0)
        self.go(url)

    def go(self, url: str) -> None:
        self.js("window.isLeft = true")
        if error := self.call("Page.navigate", url=url).get("errorText"):
            raise BrowserError(f"{url}: {error}")
        self.wait("!window.isLeft && document.readyState === 'complete'")

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            detail = answer["exceptionDetails"]
            raise BrowserError(detail.get("exception", {}).get("description") or detail["text"])
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 15) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {timeout_s} s: {expression}")
            time.sleep(0.02)

    def centre(self, selector: str) -> tuple[float, float]:
        """Of an element that is scrolled into view."""
        x, y = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        return x, y

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int = 0) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, clip: tuple[float, float, float, float] | None = None) -> None:
        """Of what is visible, or of x, y, width, height of the document."""
        options: dict[str, Any] = {"format": "png"}
        if clip is not None:
            options["clip"] = dict(zip(("x", "y", "width", "height"), clip, strict=True), scale=1)
            options["captureBeyondViewport"] = True
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def complaints(self) -> list[str]:
        """What the console shows: errors, warnings, exceptions, refusals of the page's policy."""
        found = []
        for event in self._mine():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                detail = params["exceptionDetails"]
                found.append(detail.get("exception", {}).get("description") or detail["text"])
            elif event["method"] == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(" ".join(str(arg.get("value", "")) for arg in params["args"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        asked = (e["params"] for e in self._mine() if e["method"] == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in asked]

    def _mine(self) -> list[dict[str, Any]]:
        self.js("0")  # collects what has happened until now
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
