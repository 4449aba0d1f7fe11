"""The same kernels as PTX, loaded by the CUDA driver: needs neither Triton nor a C compiler.

The text is compiled by the driver for the GPU that is present.
"""

import ctypes
from typing import Any

import torch

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
