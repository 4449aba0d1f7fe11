"""Faults of CUPTI versions that change what kernel records say, from NVIDIA's release notes.

A fault is known by the version that mends it; none of them was reproduced for this table.
"""

from typing import NamedTuple

SOURCE = "https://docs.nvidia.com/cupti/release-notes/release-notes.html, read 2026-11-25"


class Fault(NamedTuple):
    mended_in: int
    """The first version without it, as cuptiGetVersion counts: 22 is 12.4, 130101 is 13.1 update 1."""
    text: str


FAULTS = (
    Fault(22, "a device graph that the host has not launched before may have an end of 0 (no time)"),
    Fault(130_001, "turning kernel records off may deadlock, and a flush may crash"),
    Fault(130_001, "cudaDeviceSynchronize has no synchronisation record"),
    Fault(130_101, "after the first session, kernels of CUDA graphs have wrong correlation numbers"),
    Fault(130_401, "CPU use grows without bound in long tracing"),
    Fault(130_401, "kernels of modules that were loaded again may have old names"),
)


def known_faults(version: int) -> list[str]:
    """What the release notes say is wrong in this version; the label says that it was not tried here."""
    return [
        f"{fault.text} (mended in {version_text(fault.mended_in)}; from the release notes, not tried)"
        for fault in FAULTS
        if version < fault.mended_in
    ]


def version_text(version: int) -> str:
    """'13.1 update 1' of 130101."""
    if version < 100:  # counted up to 12.x: 18 is 12.0
        return f"12.{version - 18}"
    major, rest = divmod(version, 10_000)
    minor, update = divmod(rest, 100)
    return f"{major}.{minor}" + (f" update {update}" if update else "")
