"""Threads that launch work get cores of their own, so that step times of a busy host can be compared."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

_CPUS = Path("/sys/devices/system/cpu")
_LAUNCHING = "pt_autograd"
"""Name that torch gives the threads of its autograd engine."""


def pin_threads() -> None:
    """Give one of this rank's cores to this thread, one to the autograd engine, the rest to all else.

    A core is all its hardware threads, of which a launching thread uses the first and leaves the others idle.
    New threads inherit their maker's core, so call this again once the last is made. Does nothing where the
    share is under four cores.
    """
    share = _share_of(_cores(_seen), _local("RANK"), _local("WORLD_SIZE"))
    if len(share) < 4:
        return
    main, engine, *rest = share
    others = set().union(*rest)
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        with suppress(OSError):  # it has ended
            launching = (task / "comm").read_text().startswith(_LAUNCHING)
            os.sched_setaffinity(thread, {min(engine)} if launching else others)
    os.sched_setaffinity(0, {min(main)})
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            child.cpu_affinity(list(others))


_seen: frozenset[int] = frozenset(os.sched_getaffinity(0))
"""CPUs of this process before anything was pinned."""


def _local(name: str) -> int:
    return int(os.environ.get(f"LOCAL_{name}", "0" if name == "RANK" else "1"))


def _cores(cpus: frozenset[int] | set[int]) -> list[frozenset[int]]:
    """The cores among these CPUs, each as its hardware threads, in order."""
    return sorted({_siblings(cpu) & cpus for cpu in cpus}, key=min)


def _siblings(cpu: int) -> frozenset[int]:
    try:
        listed = (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset((cpu,))
    siblings: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        siblings.update(range(int(first), int(last or first) + 1))
    return frozenset(siblings)


def _share_of(cores: list[frozenset[int]], rank: int, num_ranks: int) -> list[frozenset[int]]:
    size = len(cores) // num_ranks
    return cores[rank * size : (rank + 1) * size]
