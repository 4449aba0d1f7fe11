"""The process of --to prometheus=…: reads the lines of this machine's ranks and serves or writes metrics.

`aorta.sinks.prometheus` starts it beside the first rank of a machine and ends it by its standard input. It
uses nothing of the training processes but the files of their folder, so that a scrape costs them nothing.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from aorta.account.newest import Newest, newest
from aorta.files import write_whole
from aorta.records.newest import Follower
from aorta.records.run_identity import given_name
from aorta.records.state import RankState, read_states
from aorta.sinks.prometheus import Address, page_of, read_target
from aorta.why.causes.rank import late_rank

POLL_S = 1.0
"""Least time between two looks at the files; the text files are written as often."""
MOST_BUSY = 0.05
"""Part of a core that looking takes at most: with many ranks it looks less often."""
MOST_RANKS = 64
"""Ranks of a job up to which all are read, so that waits are known across machines; of larger jobs a machine
reads its own ranks alone."""
BINDS_WITHIN_S = 5.0
"""Limit of the tries to listen: after a restart the process before may still hold the port."""
LAST_NUMBERS_S = 3.0
"""Limit of the wait for the machine's other ranks, once the first one has ended."""
REQUEST_S = 5.0
"""Limit of one request."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Ranks:
    """The ranks of this machine, as their files show them."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder = folder
        self._job = _job(folder)
        self._own: dict[int, RankState] = {}
        self.pause_s = POLL_S
        """Time to the next look."""
        self._follower = Follower(
            folder, (lambda rank: True) if world_size <= MOST_RANKS else self._own.__contains__
        )

    def page(self) -> str:
        """The text of the metrics, now."""
        shown = self._look()
        return page_of(self._job, self._own.values(), self._follower.ranks, shown)

    def pages(self) -> dict[int, str]:
        """The same, a text for each rank."""
        shown = self._look()
        return {
            rank: page_of(self._job, [state], self._follower.ranks, shown)
            for rank, state in self._own.items()
        }

    def _look(self) -> Newest:
        before_s = time.process_time()
        self._own.clear()
        self._own.update(own_states(self._folder))
        self._follower.poll()
        shown = newest(self._follower.ranks.values(), late_rank)
        self.pause_s = max(POLL_S, (time.process_time() - before_s) / MOST_BUSY)
        return shown

    @property
    def have_ended(self) -> bool:
        """True once the lines of all of them are written."""
        states = own_states(self._folder).values()
        return all(state.lines is not None and state.lines.closed_unix_ns is not None for state in states)


def own_states(folder: Path) -> dict[int, RankState]:
    """The ranks on this machine, of the newest attempt that wrote into the folder."""
    states = read_states(folder)
    latest = max((state.process.attempt for state in states.values()), default=0)
    host = socket.gethostname()
    return {
        rank: state
        for rank, state in states.items()
        if state.process.host == host and state.process.attempt == latest
    }


def _job(folder: Path) -> str:
    """The run's name: the user's own, the launcher's, or that of its folder."""
    return given_name() or folder.resolve().name


class _Handler(BaseHTTPRequestHandler):
    """Answers /metrics with the newest text."""

    timeout = REQUEST_S
    server_version, sys_version = "aorta", ""
    server: "_Server"

    def do_GET(self) -> None:
        is_known = self.path.partition("?")[0] in ("/metrics", "/")
        body = self.server.text.encode() if is_known else b"metrics are at /metrics\n"
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Do nothing: standard error is the program's."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    text = ""

    def __init__(self, address: Address) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a reader that went away."""


def main() -> None:
    os.nice(10)  # cores are the training's
    # The training process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = json.loads(sys.argv[1])
    target, ranks = read_target(options["target"]), Ranks(Path(options["folder"]), options["world_size"])
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    try:
        if isinstance(target, Address):
            serve(target, ranks, ended)
        else:
            write(target, ranks, ended)
    except OSError as error:
        _say(f"--to prometheus={options['target']}: {_problem(error)}; training goes on without it")
    except Exception as error:
        _say(f"--to prometheus={options['target']} gets nothing more: {type(error).__name__}: {error}")


def _problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program has that port"
    return error.strerror or str(error)


def _wait_for_end(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    ended.set()


def _is_over(ended: threading.Event, parent: int, wait_s: float) -> bool:
    # A worker of a DataLoader may hold the pipe open when the training process was killed.
    return ended.wait(wait_s) or os.getppid() != parent


def serve(address: Address, ranks: Ranks, ended: threading.Event) -> None:
    """Answer until the end. Raises OSError where the address is taken and stays so."""
    parent = os.getppid()
    server = _bound(address, ended)
    if server is None:
        return
    server.text = ranks.page()
    with server:
        if address.port == 0:
            _say(f"metrics are at http://{Address(address.host, server.server_address[1])}/metrics")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while not _is_over(ended, parent, ranks.pause_s):
            server.text = ranks.page()
        server.shutdown()


def _bound(address: Address, ended: threading.Event) -> _Server | None:
    deadline_s = time.monotonic() + BINDS_WITHIN_S
    while not ended.is_set():
        try:
            return _Server(address)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            ended.wait(0.2)
    return None


def write(path: Path, ranks: Ranks, ended: threading.Event) -> None:
    """Write DIR/aorta_rank<n>.prom of each rank until the end, each whole. Raises OSError."""
    parent = os.getppid()
    path.parent.mkdir(parents=True, exist_ok=True)
    while not _is_over(ended, parent, ranks.pause_s):
        _write_files(path, ranks)
    deadline_s = time.monotonic() + LAST_NUMBERS_S
    while not ranks.have_ended and time.monotonic() < deadline_s:
        time.sleep(0.05)
    _write_files(path, ranks)


def _write_files(path: Path, ranks: Ranks) -> None:
    for rank, text in ranks.pages().items():
        name = f"{path.stem}_rank{rank}{path.suffix or '.prom'}"
        write_whole(path.with_name(name), text.encode(), durable=False)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"aorta: {line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
