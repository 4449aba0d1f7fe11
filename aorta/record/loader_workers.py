"""Samples what the workers of a DataLoader do, each in its own process.

In the process that trains, `_worker_loop` of torch.utils.data is replaced, and waits for a worker's batch are
marked in a page of memory that the workers share. A worker starts a thread that looks a few times a second
whether it fetches, and where; it appends sums to the rank's file, once the recorder has written into the page
which one that is: the workers of a first epoch start before. Whatever fails here is silent, and the worker
goes on without: nothing of the program depends on it.
"""

import functools
import inspect
import json
import mmap
import os
import random
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from aorta.files import regular_descriptor
from aorta.record.prompt_lock import waits_soon
from aorta.record.stack_tree import Known, StackTree, frames_of
from aorta.record.thread_state import ThreadState
from aorta.records.seal import encoded, sealed
from aorta.records.stacks import DOING
from aorta.records.workers import (
    AWAITED,
    EVALUATES,
    NOT_AWAITED,
    WORKER_STATES,
    WorkerChunk,
    WorkerSample,
)

PERIOD_S = 0.09
FIRST_PERIOD_S, NUM_FIRST = 0.03, 40
"""Workers of short epochs have few samples: the first ones come faster."""
CPU_SHARE, FIRST_CPU_S = 0.002, 0.01
"""Part of a core that sampling may take, and what the first samples may take beside it."""
MANY = 15_000
"""Samples after which they come more rarely the longer the worker lives."""
FEW_THREADS = 4
"""The worker's, the one that samples, and two by which multiprocessing hands batches over: with others in it
the lock is left as it is."""
LONGEST_S = 1.0
"""Time that one sample may stand for."""
FIRST_FLUSH_S, FLUSH_S, FIRST_PART, FLUSH_PART = 1.0, 5.0, 0.2, 0.02
"""Time to the first line, and between others: of a short life the first part up to FLUSH_S, of a long one the
second. A worker whose iterator lives until the program ends is killed, and loses what came since a line."""
ENDS_WITHIN_S = 0.5
MOST_BYTES = 16 << 20
"""Of the file of a rank."""
MOST_KEPT = 2000
"""Stacks that wait until it is known where to write."""
NUM_LOOKS = 2
"""Batches of a worker over which its random states are compared; of the first workers alone."""
FEEDER = "QueueFeederThread"
"""Name of the thread by which multiprocessing pickles and sends what was put into a queue."""
PAGE_BYTES = 8192
_LENGTH = struct.Struct("=I")
_HEAD = 8
"""Bytes of a page before the text: whether a batch is awaited, and at 4 the length of the text."""
_IN_LOOP = tuple(os.path.join("utils", "data", "_utils", name) for name in ("worker.py", "fetch.py"))
"""Files of torch that only call the program's data set and collate function."""
_SLEEPS = DOING.index("sleeps")
_STARTS, _FETCHES, _HANDS_OVER, _WAITS = range(len(WORKER_STATES))
_Key = tuple[int, int, int, int]
"""State, whether awaited, what the thread did, node."""
_page: "Page | None" = None


class Page:
    """Memory that a process shares with the workers that it starts."""

    def __init__(self) -> None:
        self.pid, self._file = os.getpid(), -1
        with suppress(OSError, AttributeError):  # no Linux: for forked workers alone
            self._file = os.memfd_create("aorta", os.MFD_CLOEXEC)
            os.write(self._file, bytes(PAGE_BYTES))
        self._map = mmap.mmap(self._file, PAGE_BYTES)

    @property
    def path(self) -> str:
        """Where a new process finds it; '' where it cannot."""
        return f"/proc/{self.pid}/fd/{self._file}" if self._file >= 0 else ""

    def tell(self, path: Path, run_id: str | None) -> None:
        """Have workers append to this file."""
        text = json.dumps([str(path), run_id]).encode()
        if len(text) <= PAGE_BYTES - _HEAD:
            self._map[4:_HEAD] = _LENGTH.pack(0)
            self._map[_HEAD : _HEAD + len(text)] = text
            self._map[4:_HEAD] = _LENGTH.pack(len(text))

    def awaits(self, how: int) -> None:
        self._map[0] = how

    @property
    def shared(self) -> mmap.mmap:
        return self._map


def page() -> Page:
    """This process's own: a forked one has its parent's until it asks."""
    global _page
    if _page is None or _page.pid != os.getpid():
        _page = Page()
    return _page


def replacements() -> list[tuple[Any, str, Any]]:
    """What is to be put in place of torch's: owner, name and function; none where that is done already."""
    from torch.utils.data import dataloader
    from torch.utils.data._utils import worker

    page()
    if isinstance(worker._worker_loop, SampledLoop):
        return []
    iterator = dataloader._MultiProcessingDataLoaderIter
    return [
        (worker, "_worker_loop", SampledLoop(worker._worker_loop)),
        (iterator, "_next_data", _marked(iterator._next_data)),
    ]


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any) -> Any:
        shared = _page
        if shared is None or shared.pid != os.getpid():
            return original(self)
        shared.awaits(AWAITED if torch.is_grad_enabled() else EVALUATES)
        try:
            return original(self)
        finally:
            shared.awaits(NOT_AWAITED)

    return call


class SampledLoop:
    """Stands for `_worker_loop`: runs it in the worker beside a thread that samples."""

    def __init__(self, original: Callable[..., Any] | None, page_path: str = "") -> None:
        self._original, self._page_path = original, page_path
        functools.update_wrapper(self, original if original is not None else _torchs())
        del self.__wrapped__  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        """For a new process, which has torch's own function under its name."""
        is_torchs = getattr(self._original, "__module__", None) == "torch.utils.data._utils.worker"
        return SampledLoop, (None if is_torchs else self._original, page().path)

    def __call__(self, *args: Any, **named: Any) -> Any:
        original, sampler = self._original or _torchs(), None
        with suppress(Exception):
            args, sampler = self._sampled(original, args)
        try:
            return original(*args, **named)
        finally:
            if sampler is not None:
                with suppress(Exception, KeyboardInterrupt):
                    sampler.stop()

    def _sampled(
        self, original: Any, args: tuple[Any, ...]
    ) -> "tuple[tuple[Any, ...], WorkerSampler | None]":
        shared = self._shared()
        if shared is None:
            return args, None
        names = [*inspect.signature(original).parameters]
        told = dict(zip(names, args, strict=False))
        sampler = WorkerSampler(shared, told)
        place = names.index("index_queue")
        sampler.start()
        return (*args[:place], _Indices(args[place], sampler), *args[place + 1 :]), sampler

    def _shared(self) -> mmap.mmap | None:
        if self._page_path:
            with open(regular_descriptor(self._page_path, os.O_RDONLY), "rb") as file:
                return mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)
        # A page of another process than the parent is of other loaders.
        return None if _page is None or _page.pid != os.getppid() else _page.shared


def _torchs() -> Any:
    from torch.utils.data._utils import worker

    loop = worker._worker_loop
    return loop._original if isinstance(loop, SampledLoop) else loop


class _Indices:
    """The queue of what a worker is asked for: between two calls of get it makes a batch."""

    def __init__(self, queue: Any, sampler: "WorkerSampler") -> None:
        self._queue, self._sampler = queue, sampler

    def get(self, *args: Any, **named: Any) -> Any:
        self._sampler.made()
        task = self._queue.get(*args, **named)
        self._sampler.asked(task)
        return task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class WorkerSampler:
    """Samples the main thread of a worker from `start` to `stop`."""

    def __init__(self, shared: mmap.mmap, told: dict[str, Any]) -> None:
        self._shared = shared
        self._worker, self._num_workers = int(told["worker_id"]), int(told["num_workers"])
        self._dataset = type(told["dataset"]).__name__
        self._iterator = zlib.crc32(repr(told.get("base_seed")).encode())
        self._state = _STARTS
        self._num_batches = 0
        self._states: list[Any] | None = None
        """Random states as a batch was asked for; None while nobody compares."""
        self._num_looks, self._draws = 0, False
        self._tree = StackTree()
        self._sums: dict[_Key, tuple[int, int]] = {}
        self._thread_id, self._number = threading.get_ident(), threading.get_native_id()
        self._stopping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._random = random.Random()  # of its own: the program's numbers stay the same
        self._num_samples = self._num_lines = 0
        self._began_s = time.monotonic()

    # -- on the worker's own thread ----------------------------------------------------------------

    def start(self) -> None:
        self._stopping.acquire()
        self._thread = threading.Thread(target=self._run, name="aorta-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and write what there is; a disk that hangs is not waited for."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.release()
            thread.join(ENDS_WITHIN_S)

    def made(self) -> None:
        """The worker has made what it was asked for, if anything."""
        if self._states is not None:
            before, self._states = self._states, None
            with suppress(Exception):
                self._draws |= before != _random_states()
                self._num_looks += 1
        self._state = _WAITS

    def asked(self, task: Any) -> None:
        if isinstance(task, tuple):
            self._num_batches += 1
            if self._num_looks < NUM_LOOKS > self._worker:
                with suppress(Exception):
                    self._states = _random_states()
        if task is not None:  # it ends
            self._state = _FETCHES

    # -- on the sampling thread --------------------------------------------------------------------

    def _run(self) -> None:
        last_s = flushed_s = self._began_s
        thread = ThreadState(self._number)
        try:
            goes_on = True
            while goes_on:
                wait_s = self._period_s() * self._random.uniform(0.5, 1.5)
                if self._stopping.acquire(timeout=wait_s) or self._stops_soon():
                    break
                now_s = time.monotonic()
                self._sample(min(now_s - last_s, LONGEST_S), thread)
                last_s = now_s
                elapsed_s = now_s - self._began_s
                every_s = max(FIRST_FLUSH_S, min(FIRST_PART * elapsed_s, FLUSH_S), FLUSH_PART * elapsed_s)
                if now_s - flushed_s >= every_s:
                    flushed_s = now_s
                    goes_on = self._flush()
            if goes_on:
                self._flush()
        except Exception:
            self._sums.clear()
        finally:
            thread.close()

    def _stops_soon(self) -> bool:
        return threading.active_count() <= FEW_THREADS and waits_soon(self._stopping, self._random)

    def _period_s(self) -> float:
        elapsed_s, cpu_s = time.monotonic() - self._began_s, time.thread_time()
        first_s = FIRST_PERIOD_S if self._num_samples < NUM_FIRST else PERIOD_S
        period_s = max(first_s, elapsed_s / MANY)
        if cpu_s > FIRST_CPU_S + CPU_SHARE * elapsed_s:
            period_s = max(period_s, 2 * cpu_s / max(self._num_samples, 1) / CPU_SHARE)
        return period_s

    def _sample(self, weight_s: float, thread: ThreadState) -> None:
        state, awaited = self._state, self._shared[0]
        frames = self._frames(state)
        if state == _WAITS and frames:
            state = _HANDS_OVER
        doing = thread.doing() if state in (_STARTS, _FETCHES) else _SLEEPS
        key = (state, awaited, doing, self._tree.add_whole(frames))
        us, num = self._sums.get(key, (0, 0))
        self._sums[key] = us + int(1e6 * weight_s), num + 1
        self._num_samples += 1

    def _frames(self, state: int) -> list[tuple[Known, int]]:
        """Of the worker, what the loop calls; of one that waits, of its feeder, unless that waits as well."""
        thread: int | None = self._thread_id
        if state == _WAITS:
            known = [*threading._active.items()]  # type: ignore[attr-defined]
            thread = next((ident for ident, one in known if one.name == FEEDER), None)
        frames = [] if thread is None else frames_of(thread, self._tree)
        if state == _WAITS and frames and frames[0][0].name.endswith(".wait"):
            return []
        found: list[tuple[Known, int]] = []
        for one, line in frames:
            if one.code is _GET:  # it waits by now
                return []
            if one.code is _LOOP:
                break
            if not one.path.endswith(_IN_LOOP):
                found.append((one, line))
        return found

    def _flush(self) -> bool:
        """Append a line with what came since the last one; False where that is no longer possible."""
        (length,) = _LENGTH.unpack(self._shared[4:_HEAD])
        if not length:
            if len(self._sums) > MOST_KEPT:
                self._sums.clear()
                self._tree.restart()
            return True
        if not self._sums:
            return True
        path, run_id = json.loads(self._shared[_HEAD : _HEAD + length])
        sums, self._sums = self._sums, {}
        frames, nodes = self._tree.taken()
        self._tree.restart()
        num_batches, self._num_batches = self._num_batches, 0
        chunk = WorkerChunk(
            run_id=run_id,
            iterator=self._iterator,
            worker=self._worker,
            num_workers=self._num_workers,
            dataset=self._dataset,
            frames=frames,
            nodes=nodes,
            samples=[WorkerSample(*key, us, num) for key, (us, num) in sums.items()],
            num_batches=num_batches,
            draws=self._draws if self._num_looks else None,
            cpu_s=round(time.thread_time(), 6),
            elapsed_s=round(time.monotonic() - self._began_s, 6),
        )
        line = sealed(encoded(chunk), self._num_lines)
        descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        with open(descriptor, "ab", buffering=0) as file:
            if os.fstat(descriptor).st_size > MOST_BYTES:
                return False
            file.write(line)
        self._num_lines += 1
        return True


_LOOP: CodeType = SampledLoop.__call__.__code__
_GET: CodeType = _Indices.get.__code__


def _random_states() -> list[Any]:
    """Of all generators that a data set draws from unless it has its own. Reading them changes none."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()
    return [
        random.getstate(),
        torch.get_rng_state().numpy().tobytes(),
        *(one if isinstance(one, (str, int, float)) else one.tobytes() for one in of_numpy),
    ]
