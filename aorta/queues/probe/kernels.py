"""Kernels that stamp the device's clock, and the measured properties of that clock.

`open_kernels` gives Triton's, or PTX that the driver compiles for the GPU: that needs neither Triton nor a C
compiler. Both are about CUDA and HIP themselves, so this file and triton_kernels.py do not ask the device
backend.
"""

import ctypes
import time
from typing import Any, Protocol

import numpy as np
import torch

from aorta.queues.probe.machine import ProbeClock, ProbeError

NUM_SLOTS = 2048
"""Stamps that the buffer has room for: kernels of one program."""
WIDE_THREADS = 256
"""Threads of a CTA of a kernel that is to fill the device."""
NEVER = np.iinfo(np.int64).max
"""Start of a kernel that has not run; its end is 0."""
CALIBRATION_S = 0.03
"""Time over which the device's clock is compared with the host's."""


class Kernels(Protocol):
    """Launches on a torch stream; slot s of the buffer gets (first start, last end) in counts."""

    source: str

    def stamp(self, stream: Any, slot: int) -> None: ...

    def spin(self, stream: Any, slot: int, counts: int, ctas: int) -> None:
        """1 CTA of one warp, or `ctas` of WIDE_THREADS threads; each spins for `counts`."""
        ...

    def sample(self, stream: Any, num: int) -> None:
        """`num` successive reads, from the buffer's beginning on."""
        ...


def open_kernels(device: torch.device, buffer: torch.Tensor) -> Kernels:
    """Triton's kernels, else PTX's; ProbeError says why neither works."""
    try:
        return TritonKernels(device, buffer)
    except Exception as error:  # a compiler has many ways to fail, and there is another way to go on
        reasons = [f"Triton: {_one_line(error)}"]
    try:
        return PtxKernels(device, buffer, WIDE_THREADS)
    except (RuntimeError, OSError, AttributeError) as error:
        reasons.append(f"PTX: {_one_line(error)}")
    raise ProbeError(f"no kernel on {device} can read its clock ({'; '.join(reasons)})")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:200]


class TritonKernels:
    """Triton's compiled kernels, launched by their handles: a launch by name costs several times as much."""

    def __init__(self, device: torch.device, buffer: torch.Tensor) -> None:
        with torch.cuda.device(device):
            from aorta.queues.probe import triton_kernels as code

            self.source = ("memrealtime" if torch.version.hip else "%globaltimer") + ", Triton"
            warp = torch.cuda.get_device_properties(device).warp_size
            self._wide_warps = WIDE_THREADS // warp
            self._code = code
            self._buffer = buffer
            self._compiled = {
                "stamp": code.stamp[(1,)](buffer, 0, num_warps=1),
                "spin": code.spin[(1,)](buffer, 0, 10, num_warps=1),
                "wide": code.spin[(1,)](buffer, 0, 10, num_warps=self._wide_warps),
                "sample": code.sample[(1,)](buffer, 2, num_warps=1),
            }
            torch.cuda.synchronize(device)
            self._runners: dict[tuple[str, int], Any] = {}
            self._by_handle = self._handles_work(device)

    def _handles_work(self, device: torch.device) -> bool:
        """True if this Triton launches a compiled kernel with the arguments alone; tried, not assumed."""
        self._buffer.zero_()
        self._buffer[3, 0] = NEVER
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device)
        try:
            self._run_handle("stamp", stream, 1, 1)
            self._run_handle("spin", stream, 1, 3, 10)
            self._run_handle("wide", stream, 2, 3, 10)
        except (TypeError, AttributeError, ValueError, RuntimeError):
            return False
        torch.cuda.synchronize(device)
        written = self._buffer[:4].cpu().numpy()
        return bool(written[1, 0] > 0 and written[1, 0] <= written[3, 0] <= written[3, 1])

    def stamp(self, stream: Any, slot: int) -> None:
        self._launch("stamp", stream, 1, slot)

    def spin(self, stream: Any, slot: int, counts: int, ctas: int) -> None:
        self._launch("spin" if ctas == 1 else "wide", stream, ctas, slot, counts)

    def sample(self, stream: Any, num: int) -> None:
        self._launch("sample", stream, 1, num)

    def _launch(self, name: str, stream: Any, ctas: int, *arguments: int) -> None:
        if self._by_handle:
            self._run_handle(name, stream, ctas, *arguments)
            return
        function = getattr(self._code, "spin" if name == "wide" else name)
        with torch.cuda.stream(stream):
            num_warps = self._wide_warps if name == "wide" else 1
            function[(ctas,)](self._buffer, *arguments, num_warps=num_warps)

    def _run_handle(self, name: str, stream: Any, ctas: int, *arguments: int) -> None:
        runner = self._runners.get((name, ctas))
        if runner is None:
            runner = self._runners[name, ctas] = self._compiled[name][(ctas, 1, 1)]
        runner(self._buffer, *arguments, stream=stream.cuda_stream)


class PtxKernels:
    """Launches through the driver; arguments are addresses in `buffer`, int64 [slots, 2]."""

    source = "%globaltimer, PTX"

    def __init__(self, device: torch.device, buffer: torch.Tensor, wide_threads: int) -> None:
        if torch.version.hip:
            raise RuntimeError("PTX needs an NVIDIA GPU")
        self._address = buffer.data_ptr()  # the allocation makes the device's context current
        self._wide_threads = wide_threads
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchKernel.argtypes = (
            [ctypes.c_void_p]
            + [ctypes.c_uint] * 7
            + [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
        )
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self._module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(PTX.encode()))
            self._functions = {name: self._function(name) for name in ("stamp", "spin", "sample")}

    def stamp(self, stream: Any, slot: int) -> None:
        self._launch("stamp", stream, 1, 1, self._address + 16 * slot)

    def spin(self, stream: Any, slot: int, counts: int, ctas: int) -> None:
        threads = 32 if ctas == 1 else self._wide_threads
        self._launch("spin", stream, ctas, threads, self._address + 16 * slot, counts)

    def sample(self, stream: Any, num: int) -> None:
        self._launch("sample", stream, 1, 1, self._address, num)

    def _launch(self, name: str, stream: Any, ctas: int, threads: int, *values: int) -> None:
        arguments = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(value) for value in arguments])
        # The driver copies the arguments before it returns.
        status = self._driver.cuLaunchKernel(
            self._functions[name], ctas, 1, 1, threads, 1, 1, 0, stream.cuda_stream, pointers, None
        )
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with status {status}")

    def _function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._call(
            "cuModuleGetFunction",
            ctypes.byref(function),
            self._module,
            ctypes.c_char_p(f"aorta_{name}".encode()),
        )
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")


PTX = """
.version 6.0
.target sm_60
.address_size 64

.visible .entry aorta_stamp(.param .u64 address)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [address];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u64 %rd2, %globaltimer;
    st.global.u64 [%rd1], %rd2;
    st.global.u64 [%rd1+8], %rd2;
    ret;
}

.visible .entry aorta_spin(.param .u64 address, .param .u64 counts)
{
    .reg .pred %p<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [counts];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u64 %rd3, %globaltimer;
AGAIN:
    mov.u64 %rd4, %globaltimer;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p1, %rd5, %rd2;
    @%p1 bra AGAIN;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra DONE;
    red.global.min.u64 [%rd1], %rd3;
    red.global.max.u64 [%rd1+8], %rd4;
DONE:
    ret;
}

.visible .entry aorta_sample(.param .u64 address, .param .u64 num)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [address];
    ld.param.u64 %rd2, [num];
    cvta.to.global.u64 %rd1, %rd1;
NEXT:
    mov.u64 %rd3, %globaltimer;
    st.global.u64 [%rd1], %rd3;
    add.u64 %rd1, %rd1, 8;
    sub.u64 %rd2, %rd2, 1;
    setp.ne.u64 %p1, %rd2, 0;
    @%p1 bra NEXT;
    ret;
}
"""


def measure_clock(kernels: Kernels, device: torch.device, buffer: torch.Tensor) -> ProbeClock:
    """Tick from successive reads in one kernel; length of a count from the host's clock."""
    stream = torch.cuda.current_stream(device)
    num = buffer.numel()
    kernels.sample(stream, num)
    torch.cuda.synchronize(device)
    tick, read = tick_counts(buffer.flatten().cpu().numpy())
    started = time.perf_counter_ns()
    kernels.stamp(stream, 0)
    torch.cuda.synchronize(device)
    time.sleep(CALIBRATION_S)
    ended = time.perf_counter_ns()
    kernels.stamp(stream, 1)
    torch.cuda.synchronize(device)
    stamps = buffer[:2, 0].cpu().numpy()
    host_ns_per_count = (ended - started) / float(stamps[1] - stamps[0])
    ns_per_count = nominal_ns(host_ns_per_count)
    return ProbeClock(
        source=kernels.source,
        tick_ns=tick * ns_per_count,
        read_ns=read * ns_per_count,
        ns_per_count=ns_per_count,
        host_ratio=ns_per_count / host_ns_per_count,
    )


def tick_counts(reads: "np.ndarray[Any, np.dtype[np.int64]]") -> tuple[float, float]:
    """Smallest nonzero and mean difference of successive reads, in counts."""
    steps = np.diff(reads)
    advanced = steps[steps > 0]
    if not len(advanced) or (steps < 0).any():
        raise ProbeError("the device's clock does not advance within a kernel")
    return float(advanced.min()), float(steps.mean())


def nominal_ns(measured_ns: float) -> float:
    """Nanoseconds per count: 1 (NVIDIA) or 10 (AMD, 100 MHz) where the host's clock agrees within 2 %."""
    for nominal in (1.0, 10.0):
        if abs(measured_ns / nominal - 1) < 0.02:
            return nominal
    return measured_ns
