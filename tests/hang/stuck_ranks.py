"""Ranks that hang where Python does not help. Module-level: ranks import them by name."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore

from aorta.config.structs import HangConfig
from aorta.hang import meeting, watchdog
from aorta.hang.watchdog import Watchdog

TIMEOUT_S = 0.5
HANG = HangConfig(timeout_s=TIMEOUT_S, action="abort")
FOREVER_S = 300


class SilentStore:
    """Takes a question and never answers, as a store does whose machine is gone."""

    def add(self, key: str, amount: int) -> int:
        threading.Event().wait()
        return 0

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False


def without_the_lock(output_dir: str) -> None:
    """In a C call, as a kernel launch waits for a full queue; deaf to SIGTERM, and the store is silent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meeting.ANSWER_S, watchdog.OTHERS_S = 0.5, 0.5
    with Watchdog(HANG, output_dir, 0, 2, store=SilentStore()) as hang:
        hang.beat(3)
        ctypes.CDLL(None).sleep(FOREVER_S)


def with_the_lock(output_dir: str) -> None:
    """In a C call that keeps the interpreter lock: no thread of Python runs any more."""
    watchdog.INTERPRETER_STUCK_S = 0.5
    _stderr_to(Path(output_dir) / "stderr.txt")
    with Watchdog(HANG, output_dir, 0, 1) as hang:
        hang.beat(3)
        ctypes.PyDLL(None).sleep(FOREVER_S)


def in_the_flight_recorder(output_dir: str) -> None:
    """The watchdog itself is stuck, with the lock, when its report is written."""
    name = "_dump_nccl_trace" if hasattr(c10d, "_dump_nccl_trace") else "_dump_fr_trace"
    setattr(c10d, name, lambda: ctypes.PyDLL(None).sleep(FOREVER_S))
    watchdog.REPORT_S = 1.0
    _stderr_to(Path(output_dir) / "stderr.txt")
    with Watchdog(HANG, output_dir, 0, 1) as hang:
        hang.beat(3)
        ctypes.CDLL(None).sleep(FOREVER_S)


def main_thread_in_the_store(output_dir: str) -> None:
    """One rank waits in the store that its watchdog asks, for a key that never comes; the other sleeps."""
    rank = dist.get_rank()
    port = Path(output_dir) / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        beside = port.with_suffix(".tmp")
        beside.write_text(str(store.port))
        beside.replace(port)
    else:
        while not port.exists():
            threading.Event().wait(0.05)
        store = TCPStore("127.0.0.1", int(port.read_text()), wait_for_workers=False)
    hang = HangConfig(timeout_s=TIMEOUT_S if rank == 0 else 30.0, action="abort")
    with Watchdog(hang, output_dir, rank, 2, store=store) as dog:
        dog.beat(3)
        if rank == 0:
            ctypes.CDLL(None).sleep(FOREVER_S)
        store.get("never")


def _stderr_to(path: Path) -> None:
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
