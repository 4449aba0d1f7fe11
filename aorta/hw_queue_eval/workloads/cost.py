"""Arithmetic that a workload cannot avoid, under the names that config/hardware has for it."""

import torch

from aorta.hw_queue_eval.workload import DeviceWork


def matrix_work(dtype: torch.dtype, flops: float, num_bytes: float = 0.0) -> DeviceWork:
    """flops of matrix multiplies in this type, num_bytes to and from the device's memory."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    fp32 = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return DeviceWork({names.get(dtype, fp32): flops}, num_bytes)
