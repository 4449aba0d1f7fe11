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
        self._log = Log()
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
        name = signal_name(number)
        before, after = self._num_kills, oom_kills()
        is_oom = number == signal.SIGKILL and before is not None and after is not None and after > before
        why = f"{name}: the kernel's out-of-memory killer" if is_oom else None
        text = self._log.last_words(self._rank) if is_of_native_code(name) else None
        return Ending(kind="killed", why=why, signal=name, text=text, unix_ns=now_ns, told_by="the kernel")

    def _wait(self) -> None:
        """Read the exit code as soon as there is one: the parent may take it away a moment later."""
        try:
            descriptor = os.pidfd_open(self._pid)
        except OSError:
            return
        end = select.poll()  # select.select takes no number from 1024 on
        end.register(descriptor, select.POLLIN)
        end.poll()
        ended_ns = time.time_ns()
        state, code = _fields(self._pid, _STATE, _EXIT_CODE)
        if self._is_told and state == "Z" and code is not None:
            self._ended_ns, self._code = ended_ns, int(code)
        os.close(descriptor)


class Log:
    """Standard error, which this process shares with those that it watches, where it is a file."""

    def __init__(self) -> None:
        self._start = self._size() or 0

    def _size(self) -> int | None:
        try:
            status = os.fstat(2)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def last_words(self, rank: int) -> str | None:
        """What native code has written since; None where it wrote nothing or the log is no file."""
        end = self._size()
        if end is None:
            return None
        try:
            with open("/proc/self/fd/2", "rb") as file:
                file.seek(max(self._start, end - _TAIL_BYTES))
                data = file.read(_TAIL_BYTES)
        except OSError:
            return None
        return last_words(data.decode(errors="replace"), rank)

    def goes_on(self) -> None:
        """Leave out what was written until now."""
        self._start = self._size() or 0


def is_of_native_code(signal_name: str | None) -> bool:
    """Return True for a signal that a process brings upon itself, as native code does where it gives up."""
    return signal_name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP")


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


def ending_of_status(
    code: int, told_by: str, unix_ns: int, why: str | None = None, text: str | None = None
) -> Ending:
    """The ending by an exit code as subprocess gives it: negative for a signal."""
    if code < 0:
        name = signal_name(-code)
        return Ending(kind="killed", signal=name, why=why, text=text, unix_ns=unix_ns, told_by=told_by)
    return Ending(kind="crashed", exit_status=code, why=why, unix_ns=unix_ns, told_by=told_by)


def signal_name(number: int) -> str:
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
