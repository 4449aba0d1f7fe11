"""Kernels that stamp the device's clock, and the measured properties of that clock.

They are Triton's, about CUDA and HIP themselves, so this file and triton_kernels.py do not ask the device
backend.
"""

import time
from typing import Any

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


def open_kernels(device: torch.device, buffer: torch.Tensor) -> "TritonKernels":
    """Kernels for the device; ProbeError says why there are none."""
    try:
        return TritonKernels(device, buffer)
    except Exception as error:  # a compiler has many ways to fail
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ProbeError(f"no kernel on {device} can read its clock: Triton: {reason}") from error


class TritonKernels:
    """Compiled kernels, launched by their handles: a launch by name costs several times as much.

    Slot s of the buffer, int64 [slots, 2], gets first start and last end in counts of the device's clock.
    """

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
        """1 CTA of one warp, or `ctas` of WIDE_THREADS threads; each spins for `counts`."""
        self._launch("spin" if ctas == 1 else "wide", stream, ctas, slot, counts)

    def sample(self, stream: Any, num: int) -> None:
        """`num` successive reads, from the buffer's beginning on."""
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


def measure_clock(kernels: TritonKernels, device: torch.device, buffer: torch.Tensor) -> ProbeClock:
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
