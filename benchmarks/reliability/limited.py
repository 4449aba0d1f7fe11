"""Inputs of aorta, and a call in a forked process within limits of memory and CPU time: what came of it."""

import io
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aorta.cli import main as aorta_command

MOST_BYTES = 1_000_000_000
"""Address space that a call may take beyond the forking process's."""
MOST_CPU_S = 5
LIMIT_S = 120
"""Limit by the clock, for calls that wait for ever and so use no CPU."""
RAISED = 98


QUICK = ("--no-page", "--no-perfetto", "--no-parquet")


@dataclass(frozen=True)
class Ended:
    status: int
    """Exit status; negative: the signal that ended it; RAISED: an exception came out of it."""
    text: str
    errors: str
    cpu_s: float
    peak_mb: float
    """Peak of resident memory; includes what the forking process had."""

    @property
    def verdict(self) -> str:
        """number, warning, one line, or FAILED: a traceback, Python's own warning, a limit,
        an escape, another exit status."""
        is_over = self.cpu_s > MOST_CPU_S or self.peak_mb * 1e6 > MOST_BYTES
        printed = self.text + self.errors
        if is_over or "\x1b" in printed or any(word in printed for word in ("Traceback", "Warning: ")):
            return "FAILED"
        if self.status not in (0, 1, 2, 3):
            return "FAILED"
        if self.status == 2:
            return "one line" if len(self.error_lines) == 1 else "FAILED"
        words = ("warning:", "note:", "not judged")
        return "warning" if any(word in printed for word in words) else "number"

    @property
    def error_lines(self) -> list[str]:
        """Lines of the error without click's hints."""
        lines = self.errors.strip().splitlines()
        return [line for line in lines if line and not line.startswith(("Usage", "Try"))]

    @property
    def first_line(self) -> str:
        return (self.errors.strip().splitlines() or self.text.strip().splitlines() or [""])[0]


def ended(call: Callable[[], object]) -> Ended:
    """Forks, calls, and waits; modules that this process has imported cost the fork nothing."""
    with tempfile.NamedTemporaryFile(suffix=".printed") as file:
        path = Path(file.name)
        pid = os.fork()
        if pid == 0:
            _run(call, path)
        _, status, usage = os.wait4(pid, 0)
        text, _, errors = path.read_text(errors="replace").partition("\x1e")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ended(os.waitstatus_to_exitcode(status), text, errors, round(cpu_s, 3), usage.ru_maxrss / 1024)


def failed(end: Ended, folder: Path) -> str | None:
    """The fault of an ended report: no limit of a budget can be violated here, so 1 is one."""
    return "FAILED" if end.status == 1 or end.verdict == "FAILED" else None


@dataclass(frozen=True)
class Input:
    """One line of a table of inputs."""

    group: str
    name: str
    make: Callable[[Path], Callable[[], object]]
    """Writes into a folder and returns the call that reads it."""
    wrong: Callable[[Ended, Path], str | None] = failed
    """Says what is wrong with the end of that call in that folder."""


def aorta_report(path: Path, output: Path, *options: str) -> Callable[[], object]:
    """Ask for a report of this, without its slow outputs."""
    arguments = ["report", str(path), "-o", str(output), *QUICK, *options]
    return partial(aorta_command.main, arguments, prog_name="aorta")


def _run(call: Callable[[], object], out: Path) -> None:
    """Call in the child; never returns."""
    text, errors = io.StringIO(), io.StringIO()
    status: int | str | None = 99
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + MOST_BYTES, own + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S + 1, MOST_CPU_S + 1))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    with redirect_stdout(text), redirect_stderr(errors):
        try:
            call()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException as error:  # what a user would see as a traceback
            print(f"Traceback: {type(error).__name__}: {error} at {_place(error)}", file=errors)
            status = RAISED
    out.write_text(f"{text.getvalue()}\x1e{errors.getvalue()}", errors="replace")
    os._exit(status if isinstance(status, int) else 1)


def _place(error: BaseException) -> str:
    """The innermost line of this repository that it came from."""
    traceback = error.__traceback__
    place = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if "aorta" in Path(name).parts or not place:
            place = f"{Path(name).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
