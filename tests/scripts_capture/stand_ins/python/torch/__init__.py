"""In place of torch where scripts ask for the platform and the number of GPUs."""

import os
from types import SimpleNamespace

hip = os.environ.get("STAND_IN_HIP") or None
version = SimpleNamespace(hip=hip, cuda=None if hip or "STAND_IN_CPU" in os.environ else "13.0")


def _device_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(os.environ["STAND_IN_GPUS"]) if visible is None else len([v for v in visible.split(",") if v])


cuda = SimpleNamespace(device_count=_device_count)
