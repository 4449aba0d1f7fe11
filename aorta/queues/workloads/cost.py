"""Arithmetic that a workload cannot avoid, under the names of config/hardware, and rates of copies."""

from collections.abc import Iterable
from statistics import median

import torch

from aorta.queues.workload import DeviceWork, Piece


def rate_alone_gb_s(pieces: Iterable[Piece], name: str, num_bytes: float) -> float | None:
    """Rate of pieces of num_bytes each, where every piece followed the one before it; None without any."""
    each_ms = [piece.duration_ms for piece in pieces if piece.leg == "alone" and piece.name == name]
    return num_bytes / (median(each_ms) * 1e6) if each_ms else None


def matrix_work(dtype: torch.dtype, flops: float, num_bytes: float = 0.0) -> DeviceWork:
    """flops of matrix multiplies in this type, num_bytes to and from the device's memory."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    fp32 = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return DeviceWork({names.get(dtype, fp32): flops}, num_bytes)
