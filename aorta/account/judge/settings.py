"""What is configured differently on two sides."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from aorta.account.model import Dataset, SettingDifference
from aorta.records.schema import RunRecord

SPARE_SETTINGS = frozenset(("training.output_dir", "training.resume"))
"""Settings of where, not of what."""
UNLIKE_SIZE = 0.01
"""Part by which the parameters of a model may differ before it is another model."""


def setting_differences(reference: Dataset, candidate: Dataset) -> Iterator[SettingDifference]:
    sides = [side.first for side in (reference, candidate)]
    if len(sides[0].ranks) != len(sides[1].ranks):
        yield SettingDifference("run", "ranks", *(str(len(side.ranks)) for side in sides))
    if reference.source != candidate.source:
        yield SettingDifference("run", "source", reference.source, candidate.source)
    if sides[0].record is None or sides[1].record is None:
        return
    described = [_settings(side.record) for side in sides if side.record is not None]
    if sides[0].record.variables is None or sides[1].record.variables is None:
        for settings in described:
            settings["variables"] = {}
    for group in described[0]:
        r, c = (settings[group] for settings in described)
        for name in dict.fromkeys((*r, *c)):
            if r.get(name) != c.get(name):
                yield SettingDifference(group, name, r.get(name), c.get(name))


def programs(reference: Dataset, candidate: Dataset) -> tuple[str, str] | None:
    """Names of the scripts of both sides, where these are two; None where they are one, or not known."""
    names = [program_of(side.first.record) for side in (reference, candidate)]
    return None if None in names or names[0] == names[1] else (str(names[0]), str(names[1]))


def others_than(baseline: Dataset, candidate: Dataset) -> str:
    """What makes the candidate another thing than the baseline, so that no verdict on it is one on a change:
    another program, a model of another size, other devices, another number of ranks; '' where nothing is
    known to."""
    names = programs(baseline, candidate)
    if names is not None:
        return f"another program than the baseline's: {names[1]}, not {names[0]}"
    runs = [side.first for side in (baseline, candidate)]
    sizes = [parameter_bytes(run.record) for run in runs]
    if all(sizes) and abs(sizes[1] / sizes[0] - 1) > UNLIKE_SIZE:
        r, c = (f"{size / 1e6:.4g} MB" for size in sizes)
        return f"another model than the baseline's: {c} of parameters, not {r}"
    ranks = [len(run.ranks) for run in runs]
    if ranks[0] != ranks[1]:
        return f"other ranks than the baseline's: {ranks[1]}, not {ranks[0]}"
    devices = ["" if run.record is None else devices_text(run.record.devices) for run in runs]
    if all(devices) and devices[0] != devices[1]:
        return f"other devices than the baseline's: {devices[1]}, not {devices[0]}"
    return ""


def parameter_bytes(run: RunRecord | None) -> int:
    """Of all optimizers; 0 where they are not known."""
    optimizers = (run.program or {}).get("optimizers") if run is not None else None
    return sum(int(one.get("parameter_bytes") or 0) for one in optimizers or [])


def program_of(run: RunRecord | None) -> str | None:
    """The first word of the command that is a program: the script, or the module behind -m. None of aorta's
    own training, and where it is not known."""
    if run is None or run.config is not None or not run.command:
        return None
    words = run.command
    if words[0] == "-m" and len(words) > 1:
        return words[1]
    return PurePath(words[0]).name


def _settings(run: RunRecord) -> dict[str, dict[str, str]]:
    """Settings by group, the most telling first."""
    return {
        "devices": {"devices": text} if (text := devices_text(run.devices)) else {},
        "layout": dict(_flat(run.layout or {})),
        "model": dict(_flat(run.model or {})),
        "config": {k: v for k, v in _flat(run.config or {}) if k not in SPARE_SETTINGS},
        "run": _of_run(run),
        "versions": {name: version for name, version in run.versions.items() if version is not None},
        "environment": dict(run.environment),
        "variables": dict(run.variables or {}),
    }


def _of_run(run: RunRecord) -> dict[str, str]:
    """Of a script that aorta run attached to, the command is its configuration."""
    named = {"placement": run.placement, "command": shlex.join(run.command) if run.config is None else ""}
    return {name: value for name, value in named.items() if value}


def devices_text(devices: Sequence[dict[str, Any]]) -> str:
    """'2 x NVIDIA H200'; '' where no name is known."""
    names = [str(device.get("name")) for device in devices if device.get("name")]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{num} x {name}" for name, num in counts.items())


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
