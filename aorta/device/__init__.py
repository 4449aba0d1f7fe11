"""Tells the rest of aorta about devices: which there are, what they can time, what they say of themselves.

backend.py            the seam: one object per kind of device; every other room asks it
cuda.py               that object for NVIDIA's and AMD's devices
marks.py              points in time, and the host's clock as one that sets them
event_clock.py        the same by events on a device's streams; orders between streams
kernel_records.py     the driver's own records of kernels, through native/*.c
telemetry.py          power, clocks, temperature, throttling, sampled in a thread
environment.py        versions, variables and devices for run.json, and warnings about them
ranks.py              a rank's device, its process group and exchange, for aorta's own commands
streams.py            a set of streams to submit work to, for queues and host programs
"""
