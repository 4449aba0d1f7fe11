"""Names of parts: the one look-up from a device's own name to the file of its part."""

import re
from functools import cache
from pathlib import Path

PARTS_DIR = Path(__file__).resolve().parent / "parts"
"""Folder with a file for each part; vendor/ holds what a vendor's parts share."""


@cache
def hardware_names() -> list[str]:
    """Names of parts that load_hardware takes."""
    return sorted(path.stem for path in PARTS_DIR.glob("[!.]*.yaml"))


def hardware_name_of(device_name: str) -> str | None:
    """Name of the part that a driver's name of a device means: 'NVIDIA GH200 480GB' is gh200 and not h200.

    Whole words are compared, and the part with most of them wins. None: no part of that name is known, and a
    near one would be a guess.
    """
    words = _words(device_name)
    if {"h20", "3e"} <= words:  # what the driver calls an H20 with the memory of H200
        words |= {"141gb"}
    if words & {"mig", "vgpu", "cnx"}:  # a share of a device, or a form with rates of its own
        return None
    # Cards have other clocks and links than the modules of the same name.
    card = words & {"pcie", "nvl"}
    fitting = [name for name in hardware_names() if card <= _words(name) <= words]
    return max(fitting, key=lambda name: len(_words(name)), default=None)


def part_name(text: str) -> str | None:
    """Name of the part that people mean by '8xH100', 'H100 SXM5 80GB' or 'GB200 NVL72'; None if unknown."""
    plain = text.strip().lower()
    counted = re.sub(r"^\d+ ?x ?(?=[a-z])|(?<=[a-z0-9]) ?x ?\d+$", "", plain)
    return counted if counted in hardware_names() else hardware_name_of(counted)


def packaged(path: Path, folder: str, packaged_folder: Path) -> Path:
    """The path; for config/<folder>/NAME.yaml, if there is no such file, the one that comes with aorta."""
    if not path.exists() and path.parts[-3:-1] == ("config", folder):
        return packaged_folder / path.name
    return path


def _words(name: str) -> set[str]:
    """Lower-case words; 'H100-80GB' has two."""
    return set(re.findall(r"[a-z0-9]+", name.lower()))
