"""The libraries of kernel records on stand-ins for CUPTI (driver.c) and rocprofiler-sdk (rocprofiler.c).

`Cupti` and `Rocm` say the same of both: what is launched, and what its record says when it is done. A process
makes one of them: a library has one ring per process.
"""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aorta.device.kernel_records import _Taken
from aorta.device.native.build import find_compiler, load_library
from aorta.steps.notes import RECORD_DTYPE

HERE = Path(__file__).parent
FILES = {"cupti": ("driver.c", "libdriver.so"), "rocm": ("rocprofiler.c", "librocprofiler-sdk.so")}
KERNEL, COPY, FILL, GRAPH = "kernel", "copy", "fill", "graph"


def build_stand_in(vendor: str, folder: Path) -> Path:
    """Path of the vendor's stand-in, compiled. Raises NativeError without a compiler."""
    source, name = FILES[vendor]
    command = [*find_compiler(), "-shared", "-fPIC", str(HERE / source), "-o", str(folder / name), "-ldl"]
    subprocess.run(command, check=True)
    return folder / name


class StandIn:
    """A source of kernel records, opened on its stand-in."""

    library_name = ""

    def __init__(self, path: str) -> None:
        self.path = self.runtime = path.encode()
        self.vendor = ctypes.CDLL(path)
        self.library = load_library(self.library_name)
        self.library.aorta_kernels_name.restype = ctypes.c_char_p
        self.library.aorta_kernels_error.restype = ctypes.c_char_p

    def open(self, capacity: int = 100) -> int:
        arguments = ctypes.c_uint64(capacity), ctypes.c_size_t(1 << 20)
        return int(self.library.aorta_kernels_open(self.path, self.runtime, *arguments))

    def opened(self, capacity: int = 100) -> None:
        assert self.open(capacity) == 0, self.error()
        assert self.library.aorta_kernels_prepare_marks() == 0
        self.restart()

    def restart(self) -> None:
        assert self.library.aorta_kernels_claim() == 0
        assert self.library.aorta_kernels_start() == 0

    def error(self) -> str:
        return str(self.library.aorta_kernels_error().decode())

    def take(self, most: int = 1000) -> tuple[Any, _Taken]:
        rows, taken = np.zeros(most, RECORD_DTYPE), _Taken()
        self.library.aorta_kernels_take(
            ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(most), ctypes.byref(taken)
        )
        return rows[: taken.num_taken], taken

    def name(self, index: int) -> str:
        return str(self.library.aorta_kernels_name(ctypes.c_uint32(int(index))).decode())

    def run(self, name: bytes | None = b"gemm", start: int = 1000, end: int = 2000, **more: Any) -> Any:
        """Launch something and let it end."""
        token = self.launch(name, **more)
        self.done(token, start, end)
        return token

    def launch(self, name: bytes | None = b"gemm", what: str = KERNEL, stream: int = 3) -> Any:
        """Launch something; a token for `done`."""
        raise NotImplementedError

    def mark(self, number: int, stream: int = 3) -> Any:
        """Put a mark on a stream; a token for `done`."""
        assert self.library.aorta_kernels_mark(ctypes.c_void_p(stream), number) == 0
        return self.marked(number, stream)

    def marked(self, number: int, stream: int = 3) -> Any:
        """The token of a mark that was put last."""
        raise NotImplementedError

    def done(self, token: Any, start: int = 1000, end: int = 2000) -> None:
        """Hand over the record of what was launched."""
        raise NotImplementedError

    def is_recording(self) -> bool:
        raise NotImplementedError

    def capture(self, rows: Sequence[tuple[bytes, int, int, int]]) -> None:
        """Play a recorded capture: names, streams, starts and ends of kernels, in order of launch."""
        raise NotImplementedError


class PlannedActivity(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("kind", "value", "stream", "device", "correlation", "graph")),
        *((name, ctypes.c_uint64) for name in ("start", "end", "bytes")),
        ("name", ctypes.c_char_p),
    )


class Cupti(StandIn):
    library_name = "kernel_records"
    PER_BUFFER = 4000

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.vendor.play_now.restype = ctypes.c_uint64
        self.num_launched = 0
        self._names: dict[bytes, ctypes.Array[ctypes.c_char]] = {}

    def play(self, *records: PlannedActivity) -> int:
        return int(self.vendor.play_buffer((PlannedActivity * len(records))(*records), len(records)))

    def _planned(self, name: bytes | None, what: str, stream: int) -> PlannedActivity:
        self.num_launched += 1
        kind = {COPY: 1, FILL: 2}.get(what, 10)
        return PlannedActivity(
            kind=kind, stream=stream, device=1, correlation=self.num_launched, graph=what == GRAPH,
            bytes=64, name=name,
        )  # fmt: skip

    def launch(self, name: bytes | None = b"gemm", what: str = KERNEL, stream: int = 3) -> int:
        return self.play(self._planned(name, what, stream))

    def marked(self, number: int, stream: int = 3) -> int:
        planned = self._planned(None, FILL, stream)
        planned.bytes, planned.value = 4, 0xA0000000 | number
        return self.play(planned)

    def done(self, token: int, start: int = 1000, end: int = 2000) -> None:
        self.vendor.play_times(token, ctypes.c_uint64(start), ctypes.c_uint64(end))
        self.vendor.play_return(token)

    def is_recording(self) -> bool:
        return int(self.vendor.play_num_enabled()) > 0

    def capture(self, rows: Sequence[tuple[bytes, int, int, int]]) -> None:
        for first in range(0, len(rows), self.PER_BUFFER):
            planned = []
            for name, stream, start, end in rows[first : first + self.PER_BUFFER]:
                kept = self._names.setdefault(name, ctypes.create_string_buffer(name))
                record = self._planned(ctypes.cast(kept, ctypes.c_char_p).value, KERNEL, stream)
                record.name, record.start, record.end = ctypes.cast(kept, ctypes.c_char_p), start, end
                planned.append(record)
            self.vendor.play_return(self.play(*planned))


class PlannedWork(ctypes.Structure):
    fields = ("is_copy", "correlation", "start", "end", "agent", "queue", "kernel")
    _fields_ = tuple((name, ctypes.c_uint64) for name in fields)


class Rocm(StandIn):
    library_name = "kernel_records_rocm"
    CALLS = {KERNEL: 1, COPY: 2, FILL: 3, GRAPH: 4}
    RCCL = ("ncclAllGather", "ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv")
    ENTER, EXIT = 1, 2

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.vendor.play_call.restype = self.vendor.play_last.restype = ctypes.c_uint64
        self.vendor.play_call.argtypes = (ctypes.c_uint32, ctypes.c_uint64)
        self.vendor.play_ahead.argtypes = (ctypes.c_int64,)
        self.vendor.play_dropped.argtypes = (ctypes.c_uint64,)
        self._kernels: dict[bytes | None, int] = {None: 0}

    def kernel(self, name: bytes | None) -> int:
        """The number that rocprofiler-sdk gives a kernel when its code is loaded."""
        if name not in self._kernels:
            self._kernels[name] = len(self._kernels)
            self.vendor.play_symbol(ctypes.c_uint64(self._kernels[name]), ctypes.c_char_p(name + b".kd"))
        return self._kernels[name]

    def rccl(self, name: str, *phases: int) -> None:
        for phase in phases or (self.ENTER, self.EXIT):
            self.vendor.play_rccl(self.RCCL.index(name), phase)

    def launch(
        self, name: bytes | None = b"gemm", what: str = KERNEL, stream: int = 3, queue: int = 9
    ) -> PlannedWork:
        number = self.vendor.play_call(self.CALLS[what], stream)
        assert number, "the call is not traced"
        return PlannedWork(what == COPY, number, 0, 0, 500, queue, self.kernel(name))

    def marked(self, number: int, stream: int = 3) -> PlannedWork:
        return PlannedWork(
            0, self.vendor.play_last(), 0, 0, 500, 9, self.kernel(b"__amd_rocclr_fillBufferAligned")
        )

    def done(self, token: PlannedWork, start: int = 1000, end: int = 2000) -> None:
        token.start, token.end = start, end
        self.vendor.play_work(ctypes.byref(token), 1)

    def is_recording(self) -> bool:
        return bool(self.vendor.play_num_active() & 2)

    def capture(self, rows: Sequence[tuple[bytes, int, int, int]]) -> None:
        planned = (PlannedWork * len(rows))()
        for place, (name, stream, start, end) in enumerate(rows):
            number = self.vendor.play_call(self.CALLS[KERNEL], stream)
            planned[place] = PlannedWork(0, number, start, end, 500, stream, self.kernel(name))
        self.vendor.play_work(planned, len(rows))


SOURCES = {"cupti": Cupti, "rocm": Rocm}
