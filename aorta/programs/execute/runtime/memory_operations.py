"""Flags in memory that streams write and wait for without occupying a compute unit.

A wait that is a kernel needs a place on the device, which a matrix multiply that fills it does not leave.
The driver's stream memory operations need none.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from aorta.programs.language.expr import HostProgramError

WAIT_GREATER_EQUAL = 0
WRITE_AFTER_EARLIER_WORK = 0
"""Default flags: the value is written when all earlier work of the stream is visible to everybody."""


class StreamMemory:
    """The driver's write and wait operations on 32-bit values of device memory, a peer's included."""

    def __init__(self) -> None:
        """Raises HostProgramError where the driver has none."""
        if torch.version.hip:
            raise HostProgramError("HIP waits on signal memory only, which a peer cannot map")
        self._write = _function("cuStreamWriteValue32_v2")
        self._wait = _function("cuStreamWaitValue32_v2")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """The stream writes value once everything before it is done and visible."""
        _check(
            self._write(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(WRITE_AFTER_EARLIER_WORK),
            ),
            "writing a flag",
        )

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Later work of the stream follows the flag reaching value; the comparison is cyclic."""
        _check(
            self._wait(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(WAIT_GREATER_EQUAL),
            ),
            "waiting for a flag",
        )


def driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises HostProgramError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise HostProgramError("the CUDA driver (libcuda.so.1) cannot be loaded") from None


def _function(name: str) -> Callable[..., Any]:
    function = getattr(driver(), name, None)
    if function is None:
        raise HostProgramError(f"the CUDA driver has no {name}: it is older than 11.7")
    function.restype = ctypes.c_int
    narrowed: Callable[..., Any] = function
    return narrowed


def _check(status: int, call: str) -> None:
    if status != 0:
        raise HostProgramError(f"{call} failed with CUDA driver status {status}")
