# mypy: ignore-errors
"""Kernels that read the device's clock. Imported only where Triton is installed and a GPU is used.

A slot of the int64 buffer holds a kernel's first start and last end. is_pure=False keeps every read of the
clock where it is written: a pure one would be moved out of the loop, which would then never end.
"""

import torch
import triton
import triton.language as tl

PTX = "mov.u64 $0, %globaltimer;"
GCN = "s_memrealtime $0\ns_waitcnt lgkmcnt(0)"
RDNA = "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_waitcnt lgkmcnt(0)"
RDNA4 = "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_wait_kmcnt 0x0"


def read_instruction() -> str:
    """Assembly that reads the clock of the current device."""
    if not torch.version.hip:
        return PTX
    arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
    return RDNA4 if arch.startswith("gfx12") else RDNA if arch.startswith("gfx11") else GCN


READ = tl.constexpr(read_instruction() if torch.cuda.is_available() else PTX)
CONSTRAINT = tl.constexpr("=s" if torch.version.hip else "=l")


@triton.jit
def read_clock():
    return tl.inline_asm_elementwise(READ, CONSTRAINT, [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["slot"])
def stamp(buffer, slot):
    clock = read_clock()
    tl.store(buffer + 2 * slot, clock)
    tl.store(buffer + 2 * slot + 1, clock)


@triton.jit(do_not_specialize=["slot", "counts"])
def spin(buffer, slot, counts):
    start = read_clock()
    clock = start
    while clock - start < counts:
        clock = read_clock()
    tl.atomic_min(buffer + 2 * slot, start, sem="relaxed")
    tl.atomic_max(buffer + 2 * slot + 1, clock, sem="relaxed")


@triton.jit(do_not_specialize=["num"])
def sample(buffer, num):
    for index in range(num):
        tl.store(buffer + index, read_clock())
