"""Behaviour of hardware queues under many streams.

workload    what a workload is: it submits, the harness measures
workloads   the workloads, one file each
options     types and notation of a workload's options; catalogue: the same as a file, for help without torch
harness     pieces of work timed, iterations, metrics of a point, scaling of a sweep, measuring points
probe       number of queues, cost of a switch, priorities, from kernels that stamp the device's clock
cli         commands and their tables
"""
