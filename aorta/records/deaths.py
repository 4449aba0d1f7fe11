"""What the kernel tells of a process that has ended without a word: its signal or status, and who killed it.

Asked by another process of the same user between its end and the moment its parent collects it.
"""

import os
import re
import select
import signal
import stat
import threading
import time
from pathlib import Path

from aorta.records.schema import Ending
from aorta.records.secrets import redacted

PATIENCE_S = 0.5
"""Limit of the wait for a process whose files are closed to be gone."""
_MOST_TEXT = 400
_TAIL_BYTES = 1 << 16
_STATE, _START_STACK, _EXIT_CODE = 0, 25, 49
"""Places in /proc/<pid>/stat behind the name of the command. Source: proc(5)."""
_GIVES_UP = re.compile(
    r"terminate called|what\(\):|Watchdog caught|NCCL WARN|ncclSystemError|Check failed|Fatal Python error"
    r"|CUDA error|Caught signal|\[E\d|enforce fail|Assertion|c10::Error|double free|corrupted|stack smashing"
)
"""Lines that native code writes before it ends a process: libstdc++, NCCL, torch's watchdog, gloo, glibc."""
_RANK = re.compile(r"\[rank(\d+)\]")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Bystander:
    """Watches one process from another and says how it ended."""

    def __init__(self, pid: int, rank: int) -> None:
        self._pid, self._rank = pid, rank
        self._is_told = _fields(pid, _START_STACK)[0] not in (
            None,
            "0",
        )  # else the kernel hides the exit code
        self._num_kills = oom_kills()
        self._log, self._log_start = _log_file()
        self._ended_ns = 0
        self._code: int | None = None
        self._watch = threading.Thread(target=self._wait, name="aorta-bystander", daemon=True)
        self._watch.start()

    def ending(self) -> Ending | None:
        """How the process has ended; None where the kernel does not tell, or it has not ended."""
        self._watch.join(PATIENCE_S)
        now_ns, code = self._ended_ns, self._code
        if code is None:
            return None
        number, status = code & 0x7F, code >> 8
        if number == 0:
            return Ending(kind="crashed", exit_status=status, unix_ns=now_ns, told_by="the kernel", why=None)
        name = _signal_name(number)
        before, after = self._num_kills, oom_kills()
        is_oom = number == signal.SIGKILL and before is not None and after is not None and after > before
        why = f"{name}: the kernel's out-of-memory killer" if is_oom else None
        text = self._last_words() if number not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else None
        return Ending(kind="killed", why=why, signal=name, text=text, unix_ns=now_ns, told_by="the kernel")

    def _wait(self) -> None:
        """Read the exit code as soon as there is one: the parent may take it away a moment later."""
        try:
            descriptor = os.pidfd_open(self._pid)
        except OSError:
            return
        select.select([descriptor], [], [])
        ended_ns = time.time_ns()
        state, code = _fields(self._pid, _STATE, _EXIT_CODE)
        if self._is_told and state == "Z" and code is not None:
            self._ended_ns, self._code = ended_ns, int(code)
        os.close(descriptor)

    def _last_words(self) -> str | None:
        """What native code wrote into the log that this process shares with it, where that is a file."""
        if self._log is None:
            return None
        try:
            end = os.fstat(self._log).st_size
            start = max(self._log_start, end - _TAIL_BYTES)
            with open(f"/proc/self/fd/{self._log}", "rb") as file:
                file.seek(start)
                data = file.read(_TAIL_BYTES)
        except OSError:
            return None
        return last_words(data.decode(errors="replace"), self._rank)


def last_words(log: str, rank: int) -> str | None:
    """The last lines by which native code says why it ends the process; lines of other ranks are left out."""
    chosen: list[str] = []
    for line in _ANSI.sub("", log).splitlines():
        named = _RANK.search(line)
        if _GIVES_UP.search(line) and (named is None or int(named[1]) == rank):
            chosen.append(line.strip())
    told = [line for line in chosen if "what():" in line or _RANK.search(line)] or chosen
    text = redacted(" | ".join(dict.fromkeys(told[-2:])))
    return text[:_MOST_TEXT] or None


def oom_kills() -> int | None:
    """Processes of this process's cgroup that the kernel has killed for memory; None where it counts none."""
    try:
        rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in rows:
        if "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        elif controllers == "":
            root, name = "/sys/fs/cgroup", "memory.events"
        else:
            continue
        for file in (f"{root}{path}/{name}", f"{root}/{name}"):
            try:
                counts = dict(line.split() for line in Path(file).read_text().splitlines())
                return int(counts["oom_kill"])
            except (OSError, KeyError, ValueError):
                continue
    return None


def ending_of_status(code: int, told_by: str, unix_ns: int, why: str | None = None) -> Ending:
    """The ending by an exit code as subprocess gives it: negative for a signal."""
    if code < 0:
        return Ending(kind="killed", signal=_signal_name(-code), why=why, unix_ns=unix_ns, told_by=told_by)
    return Ending(kind="crashed", exit_status=code, why=why, unix_ns=unix_ns, told_by=told_by)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fields(pid: int, *places: int) -> list[str | None]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        return [fields[place] for place in places]
    except (OSError, ValueError, IndexError):
        return [None] * len(places)


def _log_file() -> tuple[int | None, int]:
    """Standard error where it is a file, and its size."""
    try:
        status = os.fstat(2)
    except OSError:
        return None, 0
    return (2, status.st_size) if stat.S_ISREG(status.st_mode) else (None, 0)
