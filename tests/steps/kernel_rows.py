"""Kernel records and steps as the recorder hands them over, made by hand."""

from typing import Any

import numpy as np

from aorta.steps.raw import RECORD_DTYPE, KernelChunk, RawCall, RawGroup, RawStep, ResolverSettings, What

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


def call(op: str, seq: int = 0, **fields: Any) -> RawCall:
    values = {
        "group": 0, "op": op, "stream": "group", "bytes": 8 * 10**6, "dtype": "bfloat16", "seq": seq,
        "is_async": True, "blocks": False, "start": None, "launched_ns": ORIGIN_NS, "end": None,
        "reason": None, "members": None,
    }  # fmt: skip
    return RawCall(**(values | fields))


def step(
    calls: list[RawCall], number: int = 0, marks: tuple[int, int, int] = (1, 2, 3), **fields: Any
) -> RawStep:
    values = {
        "global_step": number, "step": number, "epoch": 0, "tokens": 64, "start_ns": ORIGIN_NS,
        "window_ms": 0.0, "body_ms": 0.0, "body_end_ns": ORIGIN_NS + MS, "window_end_ns": ORIGIN_NS + MS,
        "host_ms": 1.0, "groups": [RawGroup("0", "default", [0, 1]), RawGroup("1", "alone", [0])],
        "calls": calls, "waits": [], "stalls": [], "final_waits": [], "scalars": {"loss": 2.5},
        "memory": (1, 2, 3, 0, 0), "device": None, "not_measured": {},
        "kernel_marks": marks,
    }  # fmt: skip
    return RawStep(**(values | fields))
