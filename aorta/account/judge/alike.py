"""What two sides have alike: numbers that mean the same, work of a step, programs and settings."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from aorta.account.judge.judged import bandwidths
from aorta.account.judge.timed_steps import values_where_timed
from aorta.account.metrics import RATES, WORK, meaning, metric_key
from aorta.account.model import Dataset, Run, SettingDifference, StepWork
from aorta.account.numbers import number, times
from aorta.records.schema import RunRecord
from aorta.timeline.statistics import (
    Estimate,
    estimate,
)
from aorta.timeline.types import KERNEL_SOURCES

MAIN = "step_ms"
OF_COMPUTE = (
    "compute_ms",
    "hidden_ms",
    "exposed_ms",
    "idle_ms",
    "overlap_ratio",
    "hidden_per_compute",
    "compute_per_step",
    "exposed_per_step",
    "idle_per_step",
)
"""Depend on what compute means, which is not the same for events, host and kernels."""


def estimates(dataset: Dataset, name: str) -> list[Estimate] | None:
    """One for each run; None where one of them has too few steps of it."""
    per_run = []
    for judged in dataset.runs:
        run_estimate = None
        if name in judged.metrics:
            run_estimate = estimate(values_where_timed(judged, name))
        if run_estimate is None:
            return None
        per_run.append(run_estimate)
    return per_run


def why_unlike(name: str, reference: Dataset, candidate: Dataset) -> str:
    """Reason why a metric of the two sides does not mean the same; '' where it does."""
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1 and (meaning(name).unit in ("ms", "bytes") or metric_key(name).name == "count"):
        return f"{windows[0]} marks no steps: its numbers are of all that was read"
    if unlike := _unlike_bandwidths(name, reference, candidate):
        return unlike
    if kind_of_source(reference) == kind_of_source(candidate) or name not in OF_COMPUTE:
        return ""
    return f"{reference.source} and {candidate.source} mean different things by compute"


def _unlike_bandwidths(name: str, reference: Dataset, candidate: Dataset) -> str:
    """Reason why bandwidths differ other than speed; '' where they do not, or one is not known."""
    bases = [bandwidths(side.runs, name) for side in (reference, candidate)]
    if [len(basis) for basis in bases] != [1, 1] or bases[0] == bases[1]:
        return ""
    labels = (reference.label, candidate.label)
    matched, unmatched = labels if "transfer" in bases[0] else labels[::-1]
    return (
        f"not the same thing on both sides: that of {matched} is over the transfer, that of {unmatched} over"
        " the whole duration, waiting for late ranks included"
    )


def is_window(side: Dataset) -> bool:
    """A trace without step markers: all that was read is one step."""
    return is_whole_trace(side.first)


def is_whole_trace(run: Run) -> bool:
    """As is_window, of one run."""
    if run.source not in KERNEL_SOURCES or run.num_steps > 1:
        return False
    spans_ms = [run.totals[rank]["span_ms"] for rank in run.ranks]
    return bool(np.allclose(run.metrics["step_ms"][:, 0], np.array(spans_ms, dtype=float), rtol=1e-6))


def kind_of_source(side: Dataset) -> str:
    return "kernels" if side.source in KERNEL_SOURCES else side.source


# -- programs, models, devices and settings ------------------------------------------------------------------


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
    records = [side.record for side in sides if side.record is not None]
    if len(records) < 2:
        return
    described = [*map(_settings, records)]
    if any(record.variables is None for record in records):
        for settings in described:
            settings["variables"] = {}
    for group in described[0]:
        r, c = (settings[group] for settings in described)
        for name in dict.fromkeys((*r, *c)):
            if r.get(name) != c.get(name):
                yield SettingDifference(group, name, r.get(name), c.get(name))


def programs(reference: Dataset, candidate: Dataset) -> tuple[str, str] | None:
    """Names of the scripts of both sides, where these are two; None where they are one, or not known."""
    names = [program_of(side.first.noted) for side in (reference, candidate)]
    return None if None in names or names[0] == names[1] else (str(names[0]), str(names[1]))


def others_than(baseline: Dataset, candidate: Dataset) -> str:
    """What makes the candidate another thing than the baseline, so that no verdict on it is one on a change:
    another program, a model of another size, other devices, another number of ranks; '' where nothing is
    known to."""
    names = programs(baseline, candidate)
    if names is not None:
        return f"another program than the baseline's: {names[1]}, not {names[0]}"
    runs = [side.first for side in (baseline, candidate)]
    sizes = [parameter_bytes(run.noted) for run in runs]
    if all(sizes) and abs(sizes[1] / sizes[0] - 1) > UNLIKE_SIZE:
        r, c = (f"{size / 1e6:.4g} MB" for size in sizes)
        return f"another model than the baseline's: {c} of parameters, not {r}"
    ranks = [len(run.ranks) for run in runs]
    if ranks[0] != ranks[1]:
        return f"other ranks than the baseline's: {ranks[1]}, not {ranks[0]}"
    devices = [devices_text(run.noted.devices) for run in runs]
    if all(devices) and devices[0] != devices[1]:
        return f"other devices than the baseline's: {devices[1]}, not {devices[0]}"
    return ""


def parameter_bytes(run: RunRecord) -> int:
    """Of all optimizers; 0 where they are not known."""
    optimizers = (run.program or {}).get("optimizers") or []
    return sum(int(one.get("parameter_bytes") or 0) for one in optimizers)


def program_of(run: RunRecord) -> str | None:
    """The first word of the command that is a program: the script, or the module behind -m. None of aorta's
    own training, and where it is not known."""
    if run.config is not None or not run.command:
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


def device_names(devices: Sequence[dict[str, Any]]) -> set[str]:
    return {str(device["name"]) for device in devices if device.get("name")}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


# -- work of a step ------------------------------------------------------------------------------------------


PER_GPU, IN_ALL = RATES[0], RATES[1]
SAMPLES = "samples_per_s"
SAME_WORK = 0.01
"""Part by which the tokens of a step may differ and still count as the same: batches are packed."""


def unequal_work(reference: Dataset, candidate: Dataset) -> StepWork | None:
    """Tokens of a GPU's step on both sides; None where they are equal or not known."""
    tokens = [_tokens_of_gpu(side) for side in (reference, candidate)]
    if tokens[0] is None or tokens[1] is None or abs(tokens[1] / tokens[0] - 1) <= SAME_WORK:
        return None
    return StepWork(tokens[0], tokens[1])


def work_text(work: StepWork, step_ratio: float | None) -> str:
    """'a step of it holds 8 times the tokens and takes 4.74 times as long'."""
    text = f"its step holds {times(work.ratio)} the tokens"
    return text if step_ratio is None else f"{text} and takes {times(step_ratio)} as long"


def unlike_steps(reference: Dataset, candidate: Dataset) -> str:
    """What makes a step of one side other work than one of the other: ranks, and samples of a rank where no
    tokens tell more; '' where nothing is known to."""
    runs = [side.first for side in (reference, candidate)]
    ranks = [max(len(run.ranks), run.noted.world_size) for run in runs]
    samples = [run.noted.samples_per_step for run in runs]
    texts = [f"other ranks: {ranks[1]}, not {ranks[0]}"] if ranks[0] != ranks[1] else []
    has_tokens = None not in map(_tokens_of_gpu, (reference, candidate))
    if not has_tokens and None not in samples and samples[0] != samples[1]:
        texts.append(f"other batches: {samples[1]} samples a rank, not {samples[0]}")
    return "; ".join(texts)


def work_notes(reference: Dataset, candidate: Dataset, work: StepWork | None) -> list[str]:
    """Notes on the work of the two sides."""
    if work is not None:
        sides = f"{reference.label}: {number(work.reference)}, {candidate.label}: {number(work.candidate)}"
        return [
            f"steps hold different amounts of work (tokens per GPU: {sides}): tokens/s per GPU is judged,"
            " not step time, and times of a step are called different, neither better nor worse"
        ]
    if unlike_steps(reference, candidate):
        statistics = [side.statistics.get(SAMPLES) for side in (reference, candidate)]
        rates = [None if one is None else one.median for one in statistics]
        if None not in rates:
            return [
                "steps are not of the same work on both sides:"
                f" {reference.label} does {number(rates[0])} samples/s, {candidate.label} {number(rates[1])}"
            ]
    unknown = [side.label for side in (reference, candidate) if _tokens_of_gpu(side) is None]
    layouts = [_work_of_layout(side) for side in (reference, candidate)]
    if unknown and None not in layouts and layouts[0] != layouts[1]:
        return [
            f"the batches differ ({' and '.join(map(str, layouts))} tokens of a step in the layouts) and"
            f" {' and '.join(unknown)} recorded no tokens: these step times are of different amounts of work"
        ]
    return []


def rate_text(name: str) -> str:
    """'tokens/s per GPU'"""
    return {PER_GPU: "tokens/s per GPU", IN_ALL: "tokens/s"}.get(name, name)


def _tokens_of_gpu(side: Dataset) -> float | None:
    statistic = side.statistics.get(WORK)
    if statistic is None or not statistic.median:
        return None
    return statistic.median / len(side.first.ranks)


def _work_of_layout(side: Dataset) -> int | None:
    """Tokens of a rank's step as run.json's layout gives them."""
    layout = side.first.noted.layout or {}
    sizes = [layout.get(key) for key in ("mbs", "seq", "grad_accum")]
    if any(not isinstance(size, int) for size in sizes):
        return None
    product = 1
    for size in sizes:
        product *= size or 1
    return product
