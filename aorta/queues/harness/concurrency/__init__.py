"""Concurrency of a workload's pieces: their spans, corrected by traced kernels, as statistics."""
