"""The driver's own records of kernels, copies and sets, collected by native/kernel_records*.c.

`KernelRecords.open` turns them on and proves them with a known kernel; the recorder puts marks on streams and
takes records. Where they cannot be had, KernelRecordsUnavailable says why in one line.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from aorta.device.native.build import NativeError, library_path, load_library, load_path
from aorta.errors import AortaError
from aorta.steps.notes import RECORD_DTYPE, KernelChunk, What

CAPACITY = 1 << 19
"""Records that the ring holds (20 MB): some hundred steps of a thousand kernels, read 20 times a second."""
BUFFER_BYTES = 1 << 20
"""Size of each buffer lent to the driver."""

MOST_TAKEN = 1 << 16
"""Records that one `take` gives at most."""
FLUSH_EVERY_NS = 500_000_000
"""Interval at which the driver is asked for buffers that are not full; launches may wait meanwhile."""
NUM_MARKS = 1 << 28
"""Numbers of marks, which wrap around."""
CUPTI_MAJORS = (12, 13)
"""CUPTI versions whose records have the layout in kernel_records.c: checked against the headers of 12.1,
12.4, 12.6, 12.8 and 13.0."""
ROCPROFILER_MAJORS = (0, 1)
"""rocprofiler-sdk versions whose records are known: 0.4 (ROCm 6.2) to 1.x (ROCm 7)."""
TOOLS = "ROCP_TOOL_LIBRARIES"
"""Libraries that rocprofiler-sdk registers while HIP initialises, the only time at which it takes any."""

_TEST_CYCLES = 200_000
_TEST_KERNEL = "spin_kernel"
_TEST_WAIT_NS = 300_000_000
"""How long the self-test waits for records of what has ended."""
_LEAST_SLOWER_US = 0.3
"""By which CUPTI made a launch of a burst slower on the host where it took least."""
_NUM_LAUNCHES, _NUM_BURSTS = 50, 15
"""Launches in a row, far fewer than a queue holds; the quickest burst of so many tells how long one takes."""
_CLOCK_ERROR_NS = 100_000
"""How far the known kernel may lie outside the host's bracket: the driver interpolates between clocks."""


class KernelRecordsUnavailable(AortaError):
    """Raised when kernel records cannot be had; the message is one line and says why."""


class _Taken(ctypes.Structure):
    _fields_ = (
        ("num_taken", ctypes.c_uint64),
        ("num_lost", ctypes.c_uint64),
        ("lost_start", ctypes.c_int64),
        ("lost_end", ctypes.c_int64),
        ("num_dropped", ctypes.c_uint64),
        ("settled", ctypes.c_uint32),
        ("num_names", ctypes.c_uint32),
        ("num_no_time", ctypes.c_uint64),
    )


class KernelRecords:
    """Kernel records of this process: one ring per process, used by one object at a time."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._pid = os.getpid()
        self._mark = library.aorta_kernels_mark
        self._mark.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
        self._passed = library.aorta_kernels_passed
        self._passed.restype = ctypes.c_uint32
        library.aorta_kernels_name.restype = ctypes.c_char_p
        self._buffer = np.zeros(MOST_TAKEN, RECORD_DTYPE)
        self._state = _Taken()
        self._last_mark = 0
        self._came_mark = 0
        """The newest mark whose record has been taken."""
        self._has_buffers = False
        """False: the driver's buffers are not ours to ask for, but another client's."""
        self._reading = threading.Lock()
        """Held while records are read, and while the buffers are given up: a chunk is whole or not there."""
        self._flushed_ns = 0
        self._num_names = 0
        """Names that have been taken."""
        self.is_on = False
        self.version: int = library.aorta_kernels_version()
        """Of the tracer, as it counts."""
        self.launch_us: float | None = None
        """By how much the tracer, once it was on, makes each launch slower until the process ends; 0: it was
        on before; None: not measured, or lost in how much launches vary."""

    @classmethod
    def open(cls, device: torch.device) -> "KernelRecords":
        """Records of a device, on and proved. Synchronises the device. Raises KernelRecordsUnavailable."""
        library = _cupti_library() if torch.version.hip is None else _rocprofiler_library()
        records = cls(library, device)
        if library.aorta_kernels_prepare_marks():
            raise KernelRecordsUnavailable(_error_of(library))
        before_us = _launches_us(device)
        records.start()
        try:
            records._prove()
            if torch.version.hip is None:  # rocprofiler-sdk is in the process since HIP was initialised
                records.stop()
                records.launch_us = slower_by_us(before_us, _launches_us(device))
                records.start()
        except BaseException:
            records.stop()
            raise
        return records

    def start(self) -> None:
        """Record what is launched from now on. Costs 0.2 ms. Raises KernelRecordsUnavailable."""
        if not self._has_buffers and self._library.aorta_kernels_claim():
            raise KernelRecordsUnavailable(_error_of(self._library))
        self._has_buffers = True
        if self._library.aorta_kernels_start():
            raise KernelRecordsUnavailable(_error_of(self._library))
        self.is_on = True

    def stop(self) -> None:
        """Record nothing of what is launched from now on; what was launched before still arrives."""
        self.is_on = False
        if os.getpid() == self._pid:  # a forked child has no driver to ask
            self._library.aorta_kernels_stop()

    def yield_buffers(self) -> None:
        """Stop, and take all buffers back from the driver, so that another client can have it.

        Waits for the device: a record that is not complete would be lost.
        """
        if not self._has_buffers:
            return
        with self._reading:
            self.synchronize()
            self.stop()
            self.flush(forced=True)
            self._has_buffers = False

    def synchronize(self) -> None:
        """Wait for the device."""
        with contextlib.suppress(RuntimeError):  # a device in an error state has nothing to wait for
            torch.cuda.synchronize(self._device)

    def mark(self, stream: int) -> int:
        """Put a mark on a stream (the driver's handle); its number, 0 where the driver refuses."""
        number = self._last_mark % (NUM_MARKS - 1) + 1
        if self._mark(stream, number):
            return 0
        self._last_mark = number
        return number

    def has_passed(self, number: int) -> bool:
        """Return True once the device has reached a mark. Reads a word of host memory."""
        passed: int = self._passed()
        return (passed - number) % NUM_MARKS < NUM_MARKS // 2

    def has_every_mark(self) -> bool:
        """Return True when the records of all marks have been taken.

        A mark that has passed may still lack its record: where no buffer is out, the driver may have
        records for which it has not asked for one.
        """
        return self._last_mark == self._came_mark

    def flush(self, forced: bool = False) -> None:
        self._library.aorta_kernels_flush(1 if forced else 0)

    def poll(self, closing: bool = False, forced: bool = False) -> list[KernelChunk]:
        """Return what has come since the last poll. Does not wait for the device.

        closing: ask the driver for buffers that are not full, too, now and not at the interval. forced: ask
        for all, also those whose kernels have not ended.
        """
        chunks = []
        while True:
            with self._reading:
                before_ns = time.monotonic_ns()
                # Between recorded steps nothing comes, once all of the last ones is here.
                is_due = before_ns - self._flushed_ns >= FLUSH_EVERY_NS
                is_due = is_due and (self.is_on or not self.has_every_mark())
                flushes = self._has_buffers and (forced or closing or is_due)
                if flushes:
                    self.flush(forced)
                    self._flushed_ns = before_ns
                num_lent = self._library.aorta_kernels_num_lent()  # asked first: may only be too many
                chunk = self.take()
            has_rest = chunk.settled == 0 and len(chunk.records) > 0
            if flushes and not has_rest and (forced or num_lent == 0 and self.has_every_mark()):
                chunk = msgspec.structs.replace(chunk, complete_ns=before_ns)
            chunks.append(chunk)
            if not has_rest:
                return chunks

    def take(self) -> KernelChunk:
        """The oldest records that have not been taken, at most MOST_TAKEN of them."""
        state = self._state
        self._library.aorta_kernels_take(
            ctypes.c_void_p(self._buffer.ctypes.data), ctypes.c_uint64(MOST_TAKEN), ctypes.byref(state)
        )
        rows = self._buffer[: state.num_taken]
        marks = rows["name"][rows["what"] == What.MARK]
        if len(marks):  # rocprofiler-sdk tells of ends in any order
            newer = (marks.astype(np.int64) - self._came_mark) % NUM_MARKS
            newest = int(newer[newer < NUM_MARKS // 2].max(initial=0))
            self._came_mark = (self._came_mark + newest) % NUM_MARKS
        names = [
            self._library.aorta_kernels_name(ctypes.c_uint32(index)).decode("utf-8", "replace")
            for index in range(self._num_names, state.num_names)
        ]
        self._num_names = state.num_names
        return KernelChunk(
            records=rows.tobytes(),
            names=names,
            settled=state.settled,
            complete_ns=0,
            num_lost=state.num_lost,
            lost_ns=(state.lost_start, state.lost_end),
            num_dropped=state.num_dropped,
            num_no_time=state.num_no_time,
        )

    def discard(self) -> None:
        """Forget what has been recorded so far, but the names."""
        while len(self.take().records) == MOST_TAKEN * RECORD_DTYPE.itemsize:
            pass
        self._num_names = 0

    def _prove(self) -> None:
        """Launch a known kernel between two marks and find the three where and when they must be."""
        stream = torch.cuda.current_stream(self._device)
        torch.cuda._sleep(1)  # the first launch loads the kernel
        torch.cuda.synchronize(self._device)
        self.flush()
        self.discard()
        before_ns = time.monotonic_ns()
        first = self.mark(stream.cuda_stream)
        torch.cuda._sleep(_TEST_CYCLES)
        last = self.mark(stream.cuda_stream)
        torch.cuda.synchronize(self._device)
        after_ns = time.monotonic_ns()
        rows, names = np.zeros(0, RECORD_DTYPE), list[str]()
        while True:  # rocprofiler-sdk has a record when a thread of its own has seen that the kernel ended
            self.flush()
            chunk = self.take()
            names += chunk.names
            rows = np.concatenate([rows, np.frombuffer(chunk.records, RECORD_DTYPE)])
            all_came = {What.KERNEL, What.MARK} <= set(rows["what"]) and np.sum(rows["what"] == What.MARK) > 1
            if all_came or time.monotonic_ns() - after_ns > _TEST_WAIT_NS:
                break
            time.sleep(_TEST_WAIT_NS / 50e9)
        self._num_names = 0
        reason = why_not_proved(rows, names, (first, last), (before_ns, after_ns))
        if reason is None and not self.has_passed(last):
            reason = "the device's progress does not reach the host"
        if reason is not None:
            raise KernelRecordsUnavailable(f"self-test: {reason}")


def _launches_us(device: torch.device) -> list[float]:
    """How long a launch takes that has nothing to wait for, in each of some bursts."""
    bursts = []
    for _ in range(_NUM_BURSTS):
        torch.cuda.synchronize(device)
        began_ns = time.perf_counter_ns()
        for _ in range(_NUM_LAUNCHES):
            torch.cuda._sleep(1)
        bursts.append((time.perf_counter_ns() - began_ns) / 1e3 / _NUM_LAUNCHES)
    torch.cuda.synchronize(device)
    return bursts


def slower_by_us(before_us: list[float], after_us: list[float]) -> float | None:
    """By how much launches became slower; 0 where by less than CUPTI takes anywhere; None where unknown.

    Each side's quickest burst tells, and may be wrong by what its quickest quarter differs by.
    """
    before, after = sorted(before_us), sorted(after_us)
    slower = after[0] - before[0]
    error = max(each[len(each) // 4] - each[0] for each in (before, after))
    if slower > error:
        return slower
    return 0.0 if abs(slower) + error < _LEAST_SLOWER_US else None


def why_not_proved(
    rows: "np.ndarray[tuple[int], np.dtype[np.void]]",
    names: list[str],
    marks: tuple[int, int],
    bracket_ns: tuple[int, int],
) -> str | None:
    """Why the self-test's records are wrong; None where they are right."""
    if len(rows) == 0:
        return "no record arrived: another profiler has the driver's records (nsys, ncu, another client)"
    by_number = {int(row["name"]): row for row in rows[rows["what"] == What.MARK]}
    if not all(number in by_number for number in marks):
        return "the marks have no records"
    since = by_number[marks[0]]["correlation"]  # what was launched before may come late
    kernels = [
        row
        for row in rows[(rows["what"] == What.KERNEL) & (rows["correlation"] >= since)]
        if row["name"] < len(names) and _TEST_KERNEL in names[row["name"]]
    ]
    if len(kernels) != 1:
        return f"the known kernel has {len(kernels)} records, or another name"
    start, kernel, end = by_number[marks[0]], kernels[0], by_number[marks[1]]
    if not start["stream"] == kernel["stream"] == end["stream"]:
        return "the known kernel has another stream than the marks beside it"
    if not start["correlation"] < kernel["correlation"] < end["correlation"]:
        return "calls are not numbered in the order of their launches"
    if not start["end"] <= kernel["start"] < kernel["end"] <= end["start"]:
        return "the known kernel does not lie between its marks"
    low_ns, high_ns = bracket_ns[0] - _CLOCK_ERROR_NS, bracket_ns[1] + _CLOCK_ERROR_NS
    if not low_ns <= kernel["start"] < kernel["end"] <= high_ns:
        return "the records' clock is not the host's monotonic clock"
    return None


# -- opening the libraries --------------------------------------------------------------------------


def _cupti_library() -> ctypes.CDLL:
    """kernel_records.c over the CUPTI that torch uses. Raises KernelRecordsUnavailable."""
    library = _native_library("kernel_records")
    _open(library, "CUPTI", str(cupti_path()), "libcuda.so.1")
    version: int = library.aorta_kernels_version()
    if major_of(version) not in CUPTI_MAJORS:
        raise KernelRecordsUnavailable(
            f"CUPTI's version {version} is not one whose records are known (12.x, 13.x)"
        )
    return library


def _rocprofiler_library() -> ctypes.CDLL:
    """kernel_records_rocm.c, the tool of the process's rocprofiler-sdk. Raises KernelRecordsUnavailable."""
    named = os.environ.get(TOOLS) if is_tool_named(os.environ) else None
    library = _native_library("kernel_records_rocm", named)
    _open(library, "rocprofiler-sdk", rocprofiler_path(), _loaded_path("libamdhip64.so"))
    version: int = library.aorta_kernels_version()
    if version // 10_000 not in ROCPROFILER_MAJORS:
        raise KernelRecordsUnavailable(
            f"rocprofiler-sdk's version {version} is not one whose records are known (0.4 to 1.x)"
        )
    return library


def name_tool(environ: MutableMapping[str, str]) -> None:
    """Name the tool of kernel_records_rocm.c in an environment, for programs that initialise HIP under it.

    Raises KernelRecordsUnavailable where it cannot be built or another tool is named, which keeps its place.
    """
    try:
        path = str(library_path("kernel_records_rocm"))
    except NativeError as error:
        raise KernelRecordsUnavailable(str(error)) from None
    if environ.get(TOOLS, path) != path:
        raise KernelRecordsUnavailable(f"{TOOLS} names another tool, {environ[TOOLS]}")
    environ[TOOLS] = path


def is_tool_named(environ: Mapping[str, str]) -> bool:
    """Return True where HIP, initialised under an environment, registers the tool."""
    return Path(environ.get(TOOLS, "")).name.startswith("kernel_records_rocm-")


def _native_library(name: str, path: str | None = None) -> ctypes.CDLL:
    try:
        library = load_library(name) if path is None else load_path(Path(path))
    except NativeError as error:
        raise KernelRecordsUnavailable(str(error)) from None
    sizes = library.aorta_kernels_record_bytes(), library.aorta_kernels_taken_bytes()
    if sizes != (RECORD_DTYPE.itemsize, ctypes.sizeof(_Taken)):
        raise KernelRecordsUnavailable("the library was built from another version of its source")
    library.aorta_kernels_error.restype = ctypes.c_char_p
    library.aorta_kernels_version.restype = ctypes.c_uint32
    return library


def _open(library: ctypes.CDLL, tracer: str, tracer_path: str, runtime_path: str) -> None:
    failed = library.aorta_kernels_open(
        os.fsencode(tracer_path),
        os.fsencode(runtime_path),
        ctypes.c_uint64(CAPACITY),
        ctypes.c_size_t(BUFFER_BYTES),
    )
    if failed:
        raise KernelRecordsUnavailable(f"{tracer} cannot be used: {_error_of(library)}")


def _error_of(library: ctypes.CDLL) -> str:
    text: bytes = library.aorta_kernels_error()
    return " ".join(text.decode("utf-8", "replace").split()) or "no reason given"


def major_of(version: int) -> int | None:
    """CUDA's major version of a CUPTI API version; None where it is none that is known.

    Until 12.x they are counted (18 is 12.0, 28 is 12.9 and its updates), from 13.0 spelled (130001).
    """
    if 18 <= version <= 40:
        return 12
    return version // 10_000 if version >= 130_000 else None


def cupti_path() -> Path:
    """The libcupti that torch has loaded, else the one beside torch; KernelRecordsUnavailable without."""
    for line in mapped_files():
        if "/libcupti.so" in line:
            return Path(line)
    site = Path(torch.__file__).parents[1]
    candidates = sorted((site / "nvidia").glob("*/lib/libcupti.so.*"))
    if candidates:
        return candidates[-1]
    raise KernelRecordsUnavailable("CUPTI is not there: this torch has no libcupti")


def rocprofiler_path() -> str:
    """The librocprofiler-sdk that the process has loaded, else torch's own, else a name for the loader."""
    name = "librocprofiler-sdk.so"
    own = sorted((Path(torch.__file__).parent / "lib").glob(f"{name}*"))
    loaded = _loaded_path(name)
    return str(own[-1]) if own and loaded == name else loaded


def _loaded_path(name: str) -> str:
    """The file of a library that the process has loaded, else the name for the loader to find."""
    for path in mapped_files():
        if os.path.basename(path).startswith(name):
            return path
    return name


def mapped_files() -> list[str]:
    """Shared libraries that the process has loaded; opening one again gives the same copy."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if ".so" in line))
