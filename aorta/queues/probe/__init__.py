"""Probe of a device's streams: number of queues, cost of a switch, priorities.

Kernels stamp the device's own clock; nothing is inferred from host times. Every inference is a plain function
on those stamps, so that it can be tested against a simulated device whose queues are known.
"""
