"""The library that takes kernel records on ROCm, through roctracer. Not run on a device yet."""

import ctypes
import os

from aorta.device.kernel_tracer import BUFFER_BYTES, CAPACITY, KernelRecordsUnavailable, mapped_files
from aorta.device.native.build import NativeError, load_library
from aorta.steps.raw import RECORD_DTYPE

NOTE = "read through roctracer, a path that has not been run on a device: compare with kernels='off'"
NOT_BY_ITSELF = "kernel records of ROCm have not been run on a device: ask for them with kernels='on'"
KNOWN_MAJOR = 4
"""roctracer's interface since ROCm 4.1, unchanged up to 7."""
TRACER, RUNTIME = "libroctracer64.so", "libamdhip64.so"


def rocm_library(taken_bytes: int) -> ctypes.CDLL:
    """The library, open. taken_bytes: of what Python has for its `Taken`. Raises KernelRecordsUnavailable."""
    try:
        library = load_library("kernel_records_rocm")
    except NativeError as error:
        raise KernelRecordsUnavailable(str(error)) from None
    library.aorta_kernels_error.restype = ctypes.c_char_p
    library.aorta_kernels_version.restype = ctypes.c_uint32
    if (library.aorta_kernels_record_bytes(), library.aorta_kernels_taken_bytes()) != (
        RECORD_DTYPE.itemsize,
        taken_bytes,
    ):
        raise KernelRecordsUnavailable("kernel_records_rocm.c has other records than the rest of aorta")
    opened = library.aorta_kernels_open(
        os.fsencode(loaded_path(TRACER)),
        os.fsencode(loaded_path(RUNTIME)),
        ctypes.c_uint64(CAPACITY),
        ctypes.c_size_t(BUFFER_BYTES),
    )
    if opened:
        text: bytes = library.aorta_kernels_error()
        raise KernelRecordsUnavailable(f"roctracer cannot be used: {text.decode('utf-8', 'replace')}")
    version: int = library.aorta_kernels_version()
    if version != KNOWN_MAJOR:
        raise KernelRecordsUnavailable(
            f"roctracer's version {version} is not the one whose records are known (4)"
        )
    return library


def loaded_path(name: str) -> str:
    """The file of a library that the process has loaded, else the name for the loader to find."""
    for path in mapped_files():
        if os.path.basename(path).startswith(name):
            return path
    return name
