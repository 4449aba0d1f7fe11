"""Which numbers of a run lead a report: as they were measured, or calibrated ones.

Event numbers are biased, each device in its own way; where kernels of some steps are known, the others have
calibrated numbers. These lead where nearly all judged steps have them, and in a comparison where they meet
their like. Everything that shows compute, communication or what is made of them asks here, so that a
sentence, a picture, a verdict and a limit speak of the same numbers.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.judged import statistic
from aorta.account.judge.overhead import overhead_texts
from aorta.account.judge.timed_steps import share_host_bound, timed_steps
from aorta.account.judge.whole_run import whole_run_text
from aorta.account.load.rank.kernels import graph_text
from aorta.account.metrics import metric_key, of_source
from aorta.account.model import Dataset, JudgedRun, Lead
from aorta.account.numbers import number
from aorta.timeline.types import KERNEL_SOURCES

ENOUGH = 0.9
"""Of the judged steps of a run that were timed must have calibrated numbers on every rank for them to lead: a
step without them is in a state that the traces did not show, and leaving out many such steps would choose a
result. A step that was not timed has no raw numbers either, and has no say."""
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
LED: dict[Lead, tuple[str, ...]] = {
    "raw": (),
    "calibrated": (*OF_COMPUTE, "comm_ms", "comm_per_step"),
    "compute_stream": OF_COMPUTE,
}
"""Metrics that a lead has numbers of its own for: exposed_ms is then calibrated.exposed_ms."""
RAW_PARTS = (
    "exposed_wait_ms",
    "exposed_transfer_ms",
    "compute_allreduce_ms",
    "compute_reducescatter_ms",
)
"""Beside comm_ms and exposed_ms of an operation: parts of metrics of LED that are known as measured only, and
need not fit what leads."""
ACCURACY = {"comm_ms": 0.05, "hidden_ms": 0.05, "exposed_ms": 0.05, "compute_ms": 0.1, "idle_ms": 0.1}
"""Of calibrated numbers, as a part of comm: what most runs of docs/evidence.md keep to. A calibration is
off by the same in all steps of its run, which no interval over steps can know."""
HOST_BOUND_ACCURACY = {"hidden_ms": 0.08, "exposed_ms": 0.08}
"""Of runs in which most steps are host-bound, on whichever rank: that rank's numbers are off by so much, and
may be the ones that a median over ranks shows."""
WORDS: dict[Lead, str] = {"raw": "", "calibrated": "calibrated", "compute_stream": "compute stream"}
BESIDE_WORDS: dict[Lead, str] = {"raw": "calibrated", "calibrated": "raw", "compute_stream": "all kernels"}
"""What the numbers beside the leading ones are called."""
AGAINST_KERNELS = "calibrated events against the kernels of the compute stream"


def leading(dataset: Dataset, name: str) -> str:
    """The metric of dataset.statistics that stands for name."""
    return metric_of(dataset.lead, name)


def metric_of(lead: Lead, name: str) -> str:
    return of_source(lead, name) if name in LED[lead] else name


def accuracy(name: str, sides: Sequence[Dataset]) -> float | None:
    """Differences below this, in the metric's unit, calibration does not tell; None where it has no part."""
    calibrated = [side for side in sides if metric_key(metric_of(side.lead, name)).source == "calibrated"]
    if not calibrated or name not in (*ACCURACY, "overlap_ratio"):
        return None
    is_host_bound = any(
        (share_host_bound(judged) or 0.0) > 0.5 for side in calibrated for judged in side.runs
    )
    of_part = ACCURACY | (HOST_BOUND_ACCURACY if is_host_bound else {})
    if name == "overlap_ratio":
        return of_part["hidden_ms"]
    medians = [side.statistics["calibrated.comm_ms"].median for side in calibrated]
    return of_part[name] * max((median for median in medians if median is not None), default=0.0)


def with_word(name: str, word: str) -> str:
    return f"{name}, {word}" if word else name


def source_text(dataset: Dataset) -> str:
    """'events, calibrated'"""
    return with_word(dataset.source, WORDS[dataset.lead])


def is_raw_part(name: str) -> bool:
    key = metric_key(name)
    is_of_operation = bool(key.operation) and key.name in ("comm_ms", "exposed_ms")
    return not key.source and (is_of_operation or key.name in RAW_PARTS)


def settled(
    datasets: dict[str, Dataset], reference: str | None = None, candidate: str | None = None
) -> dict[str, Dataset]:
    """The datasets with what leads in each; the two that are compared agree on it."""
    leads = {label: own_lead(dataset) for label, dataset in datasets.items()}
    if reference is not None and candidate is not None:
        leads |= _of_sides({label: datasets[label] for label in (reference, candidate)}, leads)
    return {label: msgspec.structs.replace(dataset, lead=leads[label]) for label, dataset in datasets.items()}


def common_lead(leads: Iterable[Lead]) -> Lead:
    """Lead of numbers that are looked at together: calibrated where all of them have it."""
    return "calibrated" if set(leads) == {"calibrated"} else "raw"


def own_lead(dataset: Dataset) -> Lead:
    """Lead of a dataset that is looked at alone."""
    return common_lead(
        "calibrated" if _share_calibrated(judged) >= ENOUGH else "raw" for judged in dataset.runs
    )


def _of_sides(sides: dict[str, Dataset], own_leads: dict[str, Lead]) -> dict[str, Lead]:
    leads: dict[str, Lead] = {
        label: "compute_stream" if _has_compute_stream(dataset) else own_leads[label]
        for label, dataset in sides.items()
    }
    if sorted(leads.values()) == ["calibrated", "compute_stream"]:
        return leads
    return dict.fromkeys(sides, common_lead(leads.values()))


def _has_compute_stream(dataset: Dataset) -> bool:
    statistic = dataset.statistics.get("compute_stream.compute_ms")
    return is_of_kernels(dataset) and statistic is not None and statistic.median is not None


def is_of_kernels(dataset: Dataset) -> bool:
    return dataset.source in KERNEL_SOURCES or dataset.source == "projected"


def num_calibrated(judged: JudgedRun) -> int:
    """Judged steps in which every rank has calibrated numbers."""
    if "calibrated.comm_ms" not in judged.run.metrics:
        return 0
    values = judged.values("calibrated.comm_ms")
    return judged.once("num_calibrated", lambda: int(np.isfinite(values).all(axis=0).sum()))


def _share_calibrated(judged: JudgedRun) -> float:
    """num_calibrated over the judged steps that were timed; 0 where none was."""
    return num_calibrated(judged) / max(1, num_timed(judged))


def num_timed(judged: JudgedRun) -> int:
    """Judged steps in which some rank has raw numbers, and so could have calibrated ones."""
    return int(timed_steps(judged).sum())


def has_any(dataset: Dataset) -> bool:
    """Returns True where some rank has calibrated numbers in a judged step."""
    statistic = dataset.statistics.get("calibrated.comm_ms")
    return statistic is not None and statistic.median is not None


def why_raw(dataset: Dataset) -> str:
    """Reason why a dataset with calibrated numbers does not lead with them; '' where it has none, or does."""
    if dataset.lead != "raw" or not has_any(dataset):
        return ""
    if own_lead(dataset) == "calibrated":
        return "raw numbers come first, because the other side of the comparison has no calibrated ones"
    return f"raw numbers come first: {few_calibrated(dataset)}"


def few_calibrated(dataset: Dataset) -> str:
    """'40 of 100 judged steps have calibrated numbers on every rank, 90 % are needed: why'."""
    least = min(dataset.runs, key=_share_calibrated)
    of_run = " of a run" if len(dataset.runs) > 1 else ""
    text = (
        f"{num_calibrated(least)} of {_timed_text([least], of_run)} have calibrated numbers on every rank,"
        f" {100 * ENOUGH:.0f} % are needed"
    )
    details = least.run.has_details[least.num_warmup :][timed_steps(least)]
    if details.sum() < ENOUGH * len(details):
        return f"{text}; most steps were recorded without details"
    num_traced = _num_traced(least)
    if num_traced:
        return f"{text}; {num_traced} of them had their kernels traced, and traced steps get none"
    reason = least.run.not_measured.get("calibrated")
    return f"{text}; {reason}" if reason else text


def _timed_text(runs: Sequence[JudgedRun], of_run: str = "") -> str:
    """'100 judged steps', or '25 judged steps that were timed' where others were not."""
    num = sum(num_timed(judged) for judged in runs)
    only = " that were timed" if num < sum(judged.num_steps for judged in runs) else ""
    return f"{num} judged steps{of_run}{only}"


def _num_traced(judged: JudgedRun) -> int:
    """Judged steps whose kernels are known on every rank."""
    kernel_runs = [run for source, run in judged.run.other_sources.items() if source in KERNEL_SOURCES]
    steps = judged.run.global_step[judged.num_warmup :]
    return sum(int(np.isin(steps, run.global_step).sum()) for run in kernel_runs)


def remarks(dataset: Dataset) -> list[str]:
    """Remarks on the numbers that lead, and on how many steps they are of."""
    reason = why_raw(dataset) if dataset.lead == "raw" else None
    lines = [
        text
        for text in (
            partly_timed(dataset),
            recorded_apart(dataset),
            *_whole_runs(dataset),
            graph_text(dataset),
        )
        if text
    ]
    lines += overhead_texts(dataset)
    if dataset.lead == "compute_stream":
        text = "compute stream: the kernels of that stream alone, which calibrated events are compared with"
        return [*lines, text]
    if dataset.lead == "raw":
        return [*lines, reason] if reason else lines
    text = (
        "calibrated: events corrected by kernel traces of other steps; compute is the time of the compute"
        " stream's kernels. raw: as the events gave it; numbers per operation and waiting are raw"
    )
    lacking = sum(num_timed(judged) - num_calibrated(judged) for judged in dataset.runs)
    if lacking:
        text += f"; without {lacking} of {_timed_text(dataset.runs)}, which lack them on some rank"
    return [*lines, text]


def timed_step_ms(dataset: Dataset) -> float | None:
    """Median step of the steps that were timed: the whole that compute and communication are parts of."""
    medians = [_timed_step_ms(judged) for judged in dataset.runs if num_timed(judged)]
    measured = [median for median in medians if median is not None]
    return (
        float(np.mean(measured))
        if len(measured) == len(dataset.runs)
        else dataset.statistics["step_ms"].median
    )


def _timed_step_ms(judged: JudgedRun) -> float | None:
    is_timed = timed_steps(judged)
    if is_timed.all():
        return judged.statistics["step_ms"].median
    return judged.once("timed_step_ms", lambda: statistic(judged.values("step_ms")[:, is_timed]).median)


def _whole_runs(dataset: Dataset) -> list[str]:
    names = {"compute": "compute_ms", "exposed communication": "exposed_ms", "neither": "idle_ms"}
    parts = {title: metric_of(dataset.lead, name) for title, name in names.items()}
    several = len(dataset.runs) > 1
    texts = [(judged.run.label, whole_run_text(judged, parts)) for judged in dataset.runs]
    return [f"{label}: {text}" if several else text for label, text in texts if text]


def partly_timed(dataset: Dataset) -> str:
    """Text of how many judged steps were timed, and whether these took as long as the others, which a share
    of the step is told by; '' where all were timed, or none."""
    is_timed = np.concatenate([timed_steps(judged) for judged in dataset.runs])
    if is_timed.all() or not is_timed.any():
        return ""
    return (
        f"only {is_timed.sum()} of {len(is_timed)} judged steps were recorded (--overhead):"
        " compute, communication and all numbers derived from them come from these steps"
        f"{_lengths(dataset, is_timed)}"
    )


def recorded_apart(dataset: Dataset) -> str:
    """Text of how many judged steps are not in the account because recording makes them longer, while all is
    known of the others too; '' where all are in it."""
    left_out = np.concatenate([judged.run.left_out[judged.num_warmup :] for judged in dataset.runs])
    num = int((~left_out).sum())
    if partly_timed(dataset) or not 0 < num <= len(left_out) / 2:
        return ""
    return (
        f"{num} of {len(left_out)} judged steps were recorded with their details (--overhead) and are in no"
        f" mean, since that may make them longer{_lengths(dataset, ~left_out)}"
    )


def _lengths(dataset: Dataset, is_recorded: NDArray[np.bool_]) -> str:
    step_ms = np.concatenate([np.median(judged.values("step_ms"), axis=0) for judged in dataset.runs])
    if np.isnan(step_ms).any():
        return ""
    own, others = (number(np.median(step_ms[which])) for which in (is_recorded, ~is_recorded))
    return f"; the recorded ones' median step takes {own} ms, the others' {others} ms"
