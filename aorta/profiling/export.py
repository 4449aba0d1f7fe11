"""Writes a trace so that a crash of the exporter costs the trace and not the run.

Kineto writes a trace from its own memory, in the process that was profiled. On ROCm that has crashed. A
forked child holds the same memory, so it can write instead and crash alone. It may not use the device, and
on CUDA the exporter asks for the device's properties, which a child cannot have; there the process itself
writes.
"""

import faulthandler
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aorta.config import ProfilingConfig
from aorta.device.backend import accelerator

log = logging.getLogger(__name__)

_POLL_S = 0.005


def is_rocm() -> bool:
    return accelerator().kind == "hip" and accelerator().is_available()


def writes_chrome(settings: ProfilingConfig, rank: int = 0) -> bool:
    """Whether Chrome traces are written; says so where the default leaves them out."""
    if settings.chrome_trace is not None:
        return settings.chrome_trace
    if is_rocm():
        if settings.enabled and rank == 0:
            log.warning(
                "no Chrome trace: on ROCm its export has crashed runs; profiling.chrome_trace=true writes it"
            )
        return False
    return True


def export_trace(write: Callable[[str], object], path: Path, settings: ProfilingConfig) -> None:
    """write(path), here or in a child; OSError or RuntimeError where no trace came of it."""
    if settings.export == "child" or (settings.export == "auto" and is_rocm()):
        in_child(lambda: write(str(path)), settings.export_timeout_s, path)
    else:
        write(str(path))
    if not path.exists():  # a write that fails in Kineto is not raised
        raise OSError(f"the profiler could not write {path}")


def in_child(write: Callable[[], object], timeout_s: float, path: Path) -> None:
    """Run write in a forked child and wait for it; OSError where it did not end well, and no path then.

    The child has the one thread that called. A lock that another thread held at this moment stays locked
    in it, hence the time limit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in a process that forks
        pid = os.fork()
    if pid == 0:
        _child(write)
    fault = _wait(pid, timeout_s)
    if fault is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise OSError(f"the process that wrote {path} {fault}")


def _child(write: Callable[[], object]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)  # a signal to this process is none to the run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.disable()  # its account of a crash would read like one of the run
        write()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is flushed or closed twice


def _wait(pid: int, timeout_s: float) -> str | None:
    """What went wrong, None if nothing."""
    end_s = time.monotonic() + timeout_s
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            break
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"did not end within {timeout_s:g} s (profiling.export_timeout_s)"
        time.sleep(_POLL_S)
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"ended with status {code}"
