"""Small C libraries for what Python is too slow or cannot be called for; build.py builds them on first use.

kernel_records.c       the driver's kernel records on NVIDIA's devices (CUPTI)
kernel_records_rocm.c  the same on AMD's (rocprofiler-sdk)
"""
