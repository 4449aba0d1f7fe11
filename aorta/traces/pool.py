"""One function over the ranks of a source: here, in processes, or on a dask cluster."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from aorta.errors import TraceError
from aorta.traces.sources import Source

T = TypeVar("T")


def map_ranks(
    function: Callable[[Source, int], T], source: Source, *, jobs: int = 1, dask: str | None = None
) -> Iterator[T]:
    """function(source, rank) of every rank, in order of ranks; a few results are held at a time.

    function and what it returns travel between processes: a module's function, or a functools.partial of
    one. jobs: processes on this machine. dask: address of a scheduler, whose workers must see the
    source's paths.
    """
    ranks = source.ranks
    if dask is not None:
        yield from _on_cluster(function, source, ranks, dask)
    elif jobs <= 1 or len(ranks) == 1:
        for rank in ranks:
            yield function(source, rank)
    else:
        yield from _in_processes(function, source, ranks, min(jobs, len(ranks)))


def _in_processes(
    function: Callable[[Source, int], T], source: Source, ranks: list[int], jobs: int
) -> Iterator[T]:
    # Not fork: the caller may hold threads and a GPU.
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting = iter(ranks)
        running: deque[Future[T]] = deque()
        for rank in islice(waiting, 2 * jobs):
            running.append(executor.submit(function, source.only(rank), rank))
        while running:
            result = running.popleft().result()
            for rank in islice(waiting, 1):
                running.append(executor.submit(function, source.only(rank), rank))
            yield result
    except BrokenProcessPool as error:
        raise TraceError(
            f"a process that read {source.path} was ended, for want of memory as a rule; try fewer --jobs"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _on_cluster(
    function: Callable[[Source, int], T], source: Source, ranks: list[int], address: str
) -> Iterator[T]:
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise TraceError("--dask needs dask.distributed: pip install 'aorta[dask]'") from error
    try:
        client: Any = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise TraceError(f"no dask scheduler answers at {address}: {' '.join(str(error).split())}") from error
    with client:
        waiting = iter(ranks)
        ahead = 2 * max(1, sum(client.nthreads().values()))
        running: deque[Any] = deque()
        for rank in islice(waiting, ahead):
            running.append(client.submit(function, source.only(rank), rank, pure=False))
        while running:
            result: T = running.popleft().result()
            for rank in islice(waiting, 1):
                running.append(client.submit(function, source.only(rank), rank, pure=False))
            yield result
