"""In place of torch where scripts ask for the platform and the number of GPUs."""

import os
from types import SimpleNamespace

version = SimpleNamespace(hip=os.environ.get("STAND_IN_HIP") or None)


def _device_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(os.environ["STAND_IN_GPUS"]) if visible is None else len([v for v in visible.split(",") if v])


cuda = SimpleNamespace(device_count=_device_count)
