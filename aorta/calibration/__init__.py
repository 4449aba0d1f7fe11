"""Kernel traces beside records: coverage, and event numbers corrected by the kernels of traced steps."""
