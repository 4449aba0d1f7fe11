"""Calls that return nothing, each in a copy of this process, a few at a time."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Call = Callable[[], object]


def forked(calls: Sequence[Call], jobs: int) -> Iterator[int]:
    """Places of the calls, each when it is done; at most `jobs` are under way.

    A copy shares the memory of this process until either writes to it, so that nothing travels to it. The
    caller holds no thread that works and uses no GPU. A call that fails in its copy, or whose copy is killed,
    is made again here, alone: what it raises is raised here. A daemonic process, which may start no other,
    makes them all itself.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    may_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
    if jobs <= 1 or len(calls) <= 1 or not may_fork:
        for place, call in enumerate(calls):
            call()
            yield place
        return
    context = multiprocessing.get_context("fork")
    waiting = list(range(len(calls)))
    running: dict[Any, tuple[int, Any]] = {}
    failed: list[int] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place = waiting.pop(0)
                process = context.Process(target=_silent, args=(calls[place],), daemon=True)
                with warnings.catch_warnings():  # of threads: idle ones of numpy's and Arrow's pools
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                running[process.sentinel] = (place, process)
            for sentinel in wait(list(running)):
                place, process = running.pop(sentinel)
                process.join()
                if process.exitcode == 0:
                    yield place
                else:
                    failed.append(place)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    for place in sorted(failed):
        calls[place]()
        yield place


def _silent(call: Call) -> None:
    """What is raised is raised once more, by the caller's own process."""
    try:
        call()
    except BaseException:
        sys.exit(1)
