"""One function over many items: in this process, in several, or on a dask cluster."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from aorta.errors import AortaError

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL = "local"
"""In place of a scheduler's address: one on this machine."""
LOCAL_WORKERS = 2
SCHEDULER_TIMEOUT_S = 20
"""A dask scheduler on a busy login node takes seconds to answer."""


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    files; local or local:N starts one here, with LOCAL_WORKERS or N workers. Raises `error` where dask is
    missing or does not answer, or a process was killed.
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
        raise error("--dask needs dask.distributed: pip install 'aorta[dask]'") from cause
    start_client: Any = Client  # it has no types
    try:
        client = start_client(**_scheduler(address, error), timeout=SCHEDULER_TIMEOUT_S)
    except (OSError, ValueError) as cause:
        raise error(f"no dask scheduler answers at {address}: {' '.join(str(cause).split())}") from cause
    with client:
        ahead = 2 * max(1, sum(client.nthreads().values()))
        yield from _results(lambda item: client.submit(function, item, pure=False), items, ahead)


def _scheduler(address: str, error: type[AortaError]) -> dict[str, Any]:
    """Arguments of a client: of a cluster of its own, which ends with it, or of the one at the address."""
    kind, _, num_workers = address.partition(":")
    if kind != LOCAL:
        return {"address": address}
    if num_workers and not (num_workers.isdecimal() and int(num_workers) > 0):
        raise error(f"--dask {address}: local:N takes a number of workers from 1 on")
    # A worker is a process, which spills to its disk before it runs out of its share of memory.
    return {
        "n_workers": int(num_workers or LOCAL_WORKERS),
        "threads_per_worker": 1,
        "dashboard_address": None,
    }


def _results(submit: Callable[[Item], Any], items: Sequence[Item], ahead: int) -> Iterator[Any]:
    """Results in order, with at most `ahead` of them under way: a run of 1024 ranks must fit in memory."""
    waiting = iter(items)
    running = deque(submit(item) for item in islice(waiting, ahead))
    while running:
        result = running.popleft().result()
        running.extend(submit(item) for item in islice(waiting, 1))
        yield result
