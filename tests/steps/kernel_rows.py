"""Kernel records and steps as the recorder hands them over, made by hand."""

from typing import Any

import numpy as np

from aorta.steps.notes import (
    RECORD_DTYPE,
    CollectiveCall,
    Group,
    KernelChunk,
    Mark,
    RecordedStep,
    ResolverSettings,
    What,
)

COMPUTE, SIDE = 7, 19
GEMM, GATHER, REDUCE, SENDRECV = (
    "nvjet_tst_128x256",
    "ncclDevKernel_AllGather_RING_LL",
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
    "ncclDevKernel_SendRecv",
)
NAMES = ["", GEMM, GATHER, REDUCE, SENDRECV]
MS = 1_000_000
ORIGIN_NS = 5_000 * MS
"""Monotonic ns of time 0 of these tests."""

SETTINGS = ResolverSettings(
    rank=0, world_size=2, on_device=True, clock_lower_ns=0, clock_upper_ns=0,
    unix_minus_monotonic_ns=10**18,
)  # fmt: skip


def row(what: What, start_ms: float, end_ms: float, launch: int, **fields: Any) -> dict[str, Any]:
    return {
        "start": ORIGIN_NS + round(start_ms * MS),
        "end": ORIGIN_NS + round(end_ms * MS),
        "correlation": launch % 2**32,
        "stream": COMPUTE,
        "what": what,
    } | fields


def mark(number: int, at_ms: float, launch: int, **fields: Any) -> dict[str, Any]:
    return row(What.MARK, at_ms, at_ms + 0.001, launch, name=number, **fields)


def kernel(name: str, start_ms: float, end_ms: float, launch: int, **fields: Any) -> dict[str, Any]:
    stream = COMPUTE if name == GEMM else SIDE
    return row(
        What.KERNEL, start_ms, end_ms, launch, **{"name": NAMES.index(name), "stream": stream} | fields
    )


def chunk(rows: list[dict[str, Any]], complete_ms: float = 1e6, **fields: Any) -> KernelChunk:
    table = np.zeros(len(rows), RECORD_DTYPE)
    for i, values in enumerate(rows):
        for name, value in values.items():
            table[name][i] = value
    values = {
        "records": table.tobytes(),
        "names": NAMES,
        "settled": 0,
        "complete_ns": ORIGIN_NS + round(complete_ms * MS),
        "num_lost": 0,
        "lost_ns": (0, 0),
        "num_dropped": 0,
    }
    return KernelChunk(**(values | fields))


PAIR, ALONE = Group("0", "default", [0, 1]), Group("1", "alone", [0])


def call(op: str, seq: int = 0, group: Group = PAIR, **fields: Any) -> CollectiveCall:
    values = {"seq": seq, "stream": "group", "launched_ns": ORIGIN_NS} | fields
    return CollectiveCall(group, op, 8 * 10**6, "bfloat16", True, **values)


def step(
    calls: list[CollectiveCall],
    number: int = 0,
    marks: tuple[int, int, int] = (1, 2, 3),
    queued_ms: tuple[int, int, int] = (0, 1, 1),
    **fields: Any,
) -> RecordedStep:
    start, body_end, window_end = (
        Mark(ORIGIN_NS + ms * MS, number=mark) for ms, mark in zip(queued_ms, marks, strict=True)
    )
    values = {"scalars": {"loss": 2.5}, "memory": (1, 2, 3, 0, 0), "host_end_ns": MS} | fields
    return RecordedStep(
        number, number, 0, 64, start, body_end, window_end, calls=calls, by_kernels=True, **values
    )
