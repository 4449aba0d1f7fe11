"""Setting of a run, for its document: device, software, limits."""

import os

from aorta.device.environment import (
    collect_devices,
    collect_environment,
    collect_versions,
    current_platform,
    environment_warnings,
)
from aorta.device.ranks import Ranks
from aorta.results.schema import Setting

_QUEUES = {"cuda": ("CUDA_DEVICE_MAX_CONNECTIONS", "8"), "hip": ("GPU_MAX_HW_QUEUES", "4")}


def setting(ranks: Ranks, num_streams: int) -> Setting:
    """Setting of this process, rank 0's."""
    on_cpu = ranks.device.type == "cpu"
    platform = "cpu" if on_cpu else current_platform()
    return Setting(
        platform=platform,
        devices=collect_devices(),
        world_size=ranks.world_size,
        backend=ranks.backend,
        versions=collect_versions(),
        environment=collect_environment(),
        queues=queues(platform),
        warnings=[] if on_cpu else environment_warnings(platform=platform, num_streams=num_streams),
    )


def queues(platform: str) -> str:
    """Limit on hardware queues of this process, and whether it was set."""
    if platform not in _QUEUES:
        return "none: worker threads"
    name, default = _QUEUES[platform]
    return f"{name}={os.environ[name]}" if name in os.environ else f"{name} is not set (default {default})"
