"""Work in several processes, in a thread of its own, and without garbage collection.

parallel_map: one function over many items, in new processes here or on a Dask cluster; items and results
travel. forked: calls in copies of this process, which share its memory; nothing travels. in_thread: work that
may wait for ever. asking_thread: the same, which the end of Python waits for. no_garbage_collection: for work
that makes many objects.
"""

import atexit
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

from aorta.errors import AortaError, to_install

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Call = Callable[[], object]
MUCH_BYTES = 16 << 20
"""Reading less takes about as long as starting processes."""
SCHEDULER_TIMEOUT_S = 20
"""Longest wait for a Dask scheduler: on a busy login node it takes seconds to answer."""
ENDS_WITHIN_S = 1.0
"""Limit of the wait for asking threads as Python ends."""
python_ends = threading.Event()
"""Set as Python ends, for asking threads to return."""
_not_collecting: dict[object, int] = {}
"""Who has turned garbage collection off and will turn it on again, with the thread."""


def parallel_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int = 1,
    dask: str | None = None,
    error: type[AortaError] = AortaError,
) -> Iterator[Result]:
    """Results of function(item), in the order of items; at most 2 x jobs are computed ahead of the reader.

    function, items and results travel between processes: a module's function, or a functools.partial of
    one. jobs: processes on this machine. dask: address of a scheduler, whose workers must see the same
    files. Raises `error` where dask is missing or does not answer, or a process was killed.
    """
    if dask is not None:
        yield from _on_cluster(function, items, dask, error)
    elif jobs <= 1 or len(items) <= 1:
        yield from map(function, items)
    else:
        yield from _in_processes(function, items, min(jobs, len(items)), error)


def _in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, error: type[AortaError]
) -> Iterator[Result]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Not fork: the caller may hold threads and a GPU.
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from _results(lambda item: executor.submit(function, item), items, 2 * jobs)
    except BrokenProcessPool as cause:
        raise error(
            f"a process of --jobs {jobs} was killed, for want of memory as a rule; try fewer --jobs"
        ) from cause
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _on_cluster(
    function: Callable[[Item], Result], items: Sequence[Item], address: str, error: type[AortaError]
) -> Iterator[Result]:
    try:
        from dask.distributed import Client
    except ImportError as cause:
        raise error(f"--dask needs dask.distributed: {to_install('dask')}") from cause
    start_client: Any = Client  # it has no types
    try:
        client = start_client(address, timeout=SCHEDULER_TIMEOUT_S)
    except Exception as cause:  # whatever it makes of what another server says
        raise error(f"no dask scheduler answers at {address}: {' '.join(str(cause).split())}") from cause
    with client:
        ahead = 2 * max(1, sum(client.nthreads().values()))
        yield from _results(lambda item: client.submit(function, item, pure=False), items, ahead)


def _results(submit: Callable[[Item], Any], items: Sequence[Item], ahead: int) -> Iterator[Any]:
    """Results in order, with at most `ahead` of them under way: a run of 1024 ranks must fit in memory."""
    waiting = iter(items)
    running = deque(submit(item) for item in islice(waiting, ahead))
    while running:
        result = running.popleft().result()
        running.extend(submit(item) for item in islice(waiting, 1))
        yield result


def forked(calls: Sequence[Call], jobs: int) -> Iterator[int]:
    """Makes the calls in copies of this process, at most `jobs` at a time; yields the place of each when
    it is done.

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
    """Run a call in its copy; print nothing of an error, which the caller's own process raises again."""
    try:
        call()
    except BaseException:
        sys.exit(1)


def usual_jobs(files: Iterable[str | os.PathLike[str]]) -> int:
    """One process per core that this one may use; 1 where there is less to read than starting them takes."""
    size = 0
    for file in files:
        with suppress(OSError):
            size += os.stat(file).st_size
        if size >= MUCH_BYTES:
            return usable_cores()
    return 1


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread for the work. The end of the process does not wait for it, and its errors are logged."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # a vendor's library may raise anything
            log.info("%s: %r", name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class _AskingThread(threading.Thread):
    pass


def asking_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread for work that waits in a C++ library, as for answers of the job's store.

    One that comes back from there while Python ends is ended on the spot, which aborts the process
    ("terminate called without an active exception"): the end waits for it, ENDS_WITHIN_S at most.
    """
    thread = _AskingThread(target=work, name=name, daemon=True)
    thread.start()
    return thread


@atexit.register
def _join_asking_threads() -> None:
    python_ends.set()
    end_s = time.monotonic() + ENDS_WITHIN_S
    for thread in threading.enumerate():
        if isinstance(thread, _AskingThread):
            thread.join(max(end_s - time.monotonic(), 0.0))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context without garbage collection.

    For work that makes 1e5 objects without cycles, because looking at them takes longer than making them; for
    timed work, in which the pause would be the collector's; and for walks over frames of other threads.
    """
    who = object()
    if gc.isenabled() or _not_collecting:
        _not_collecting[who] = threading.get_ident()
        gc.disable()
    try:
        yield
    finally:
        if _not_collecting.pop(who, None) is not None and not _not_collecting:
            gc.enable()


def _collect_in_child() -> None:
    """A fork copies the calling thread alone: what the others have turned off would stay off."""
    others = [who for who, thread in _not_collecting.items() if thread != threading.get_ident()]
    for who in others:
        del _not_collecting[who]
    if others and not _not_collecting:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)
