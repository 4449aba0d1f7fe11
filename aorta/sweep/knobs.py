"""Environment variables that a sweep may vary: those that something reads.

A library that is given a variable it does not know says nothing, and the sweep measures noise. So a name must
be in the list below, and where the communication library is found, in that file too (libraries hold the
names that they read as text); a name that only the library has is good as well.

Sources: NVIDIA NCCL user guide (environment variables), AMD RCCL documentation (environment variables),
PyTorch's documentation of its own, CUDA and HIP programming guides.
"""

import mmap
import re
import sys
from functools import cache
from pathlib import Path

from aorta.errors import ConfigError, did_you_mean

_NCCL = """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD
COMM_BLOCKING CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GDRCOPY_ENABLE
GRAPH_MIXING_SUPPORT GRAPH_REGISTER IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE IB_GID_INDEX IB_HCA
IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
IGNORE_CPU_AFFINITY LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MIN_CTAS
MIN_NCHANNELS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS
NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE P2P_DIRECT_DISABLE P2P_DISABLE
P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE RUNTIME_CONNECT SHM_DISABLE
SOCKET_IFNAME SOCKET_NTHREADS WIN_ENABLE WORK_FIFO_BYTES
"""
_RCCL = "MSCCLPP_ENABLE MSCCLPP_THRESHOLD MSCCL_ENABLE MSCCL_FORCE_ENABLE"
_OTHERS = """
CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING GPU_MAX_HW_QUEUES HIP_FORCE_DEV_KERNARG HSA_ENABLE_SDMA
HSA_NO_SCRATCH_RECLAIM HSA_FORCE_FINE_GRAIN_PCIE TORCH_NCCL_HIGH_PRIORITY
TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_CUDA_EVENT_CACHE
TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_TRACE_BUFFER_SIZE PYTORCH_TUNABLEOP_ENABLED PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING OMP_NUM_THREADS
MKL_NUM_THREADS GLOO_SOCKET_IFNAME
"""
KNOBS: frozenset[str] = frozenset(
    [*(f"NCCL_{n}" for n in _NCCL.split()), *(f"RCCL_{n}" for n in _RCCL.split()), *_OTHERS.split()]
)
_OF_LIBRARY = ("NCCL_", "RCCL_")
_LIBRARY_FILES = (
    "nvidia/nccl/lib/libnccl.so*",
    "nvidia/*/lib/libnccl.so*",
    "torch/lib/librccl.so*",
    "torch/lib/libnccl.so*",
)
_SYSTEM_FILES = ("/opt/rocm/lib/librccl.so", "/usr/lib/x86_64-linux-gnu/libnccl.so.2")


def check_knob(name: str) -> None:
    """ConfigError where nothing is known to read the variable."""
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise ConfigError(f"environment.{name}: names of variables are capital letters, digits and _")
    in_library = library_reads(name) if name.startswith(_OF_LIBRARY) else None
    if in_library or (name in KNOBS and in_library is None):
        return
    if name in KNOBS:
        raise ConfigError(f"environment.{name}: {_library()} does not read it")
    hint = did_you_mean(name, KNOBS, "; aorta/sweep/knobs.py lists those that are")
    raise ConfigError(f"environment.{name} is no variable that anything is known to read{hint}")


def library_reads(name: str) -> bool | None:
    """True where NCCL or RCCL, as torch would load it here, holds the name; None where there is none."""
    path = _library()
    return None if path is None else _holds(path, name)


@cache
def _library() -> Path | None:
    for folder in sys.path:
        for pattern in _LIBRARY_FILES:
            for path in sorted(Path(folder or ".").glob(pattern)):
                return path
    return next((Path(path) for path in _SYSTEM_FILES if Path(path).exists()), None)


@cache
def _holds(path: Path, name: str) -> bool | None:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(name.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return None
