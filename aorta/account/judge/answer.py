"""What a run loses, the largest loss first, in a sentence that tables and the page begin with."""

from dataclasses import asdict, dataclass
from typing import Any

from aorta.account.judge.leading import leading, partly_timed, timed_step_ms
from aorta.account.judge.ranks import alerts, rank_rows, straggler, straggler_text
from aorta.account.load.measures import peak_text
from aorta.account.model import Causes, Dataset, Statistic
from aorta.account.numbers import number, percent, quantity

NOTED = 0.02
"""Part of the step from which the second loss is named."""
LOSS_WORDS = {"exposed_ms": "exposed communication", "idle_ms": "idle"}


@dataclass(frozen=True, slots=True)
class Loss:
    """Time of a step in which the device computes nothing."""

    name: str
    """exposed_ms or idle_ms."""
    ms: float
    share: float | None
    """Of the step."""


def losses(dataset: Dataset) -> list[Loss]:
    """Losses that were measured, the largest first."""
    step = _whole_ms(dataset)
    medians = ((name, _median(dataset.statistics.get(leading(dataset, name)))) for name in LOSS_WORDS)
    measured = [Loss(name, ms, ms / step if step else None) for name, ms in medians if ms is not None]
    return sorted(measured, key=lambda loss: -loss.ms)


def dataset_answer(dataset: Dataset, causes: Causes | None = None) -> str:
    """'fsdp: 72 % of a step is idle, 29.8 of 41.2 ms; 12 % is exposed communication, 59 % of communication is
    hidden under compute'. The largest cause comes first where it costs more than these medians hold, such as
    an evaluation between some steps."""
    text = f"{dataset.label}: {_cause_text(dataset, causes)}{_losses_text(dataset)}"
    late = straggler_text(dataset.first)
    return f"{text}; {late}" if late else text


def _cause_text(dataset: Dataset, causes: Causes | None) -> str:
    """'' where the losses of the median step may hold the largest cause."""
    if causes is None or not causes.lines:
        return ""
    largest = causes.lines[0].data
    if largest["ms"] <= sum(loss.ms for loss in losses(dataset)):
        return ""
    return f"{largest['subject']}: {quantity(largest['ms'], 'ms')} a step, {percent(largest['share'])}; "


def add_observed(summary: dict[str, Any], dataset: Dataset, causes: Causes | None = None) -> None:
    """Adds to a dataset's part of summary.json its answer, losses and alerts; to its ranks who came last, and
    what telemetry and the allocator said. Of the first run, where there are several."""
    summary["answer"] = dataset_answer(dataset, causes)
    summary["losses"] = [{"name": loss.name, "ms": loss.ms, "share": loss.share} for loss in losses(dataset)]
    summary["alerts"] = alerts(dataset)
    late = straggler(dataset.first)
    summary["straggler"] = None if late is None else late.rank
    for row in rank_rows(dataset.first, dataset.lead):
        fields = asdict(row)
        del fields["rank"]
        summary["ranks"][str(row.rank)]["judged_steps"] = fields


def mfu_text(dataset: Dataset) -> str:
    """Text of the peak rate that MFU is a share of, with a warning where MFU cannot be right. '' where it is
    not known."""
    mfu = _median(dataset.statistics.get("mfu"))
    if mfu is None:
        return ""
    text = f"MFU: model FLOP/s over {peak_text(dataset.first.run.run)}"
    if mfu <= 1:
        return text
    return (
        "warning: MFU is above 100 %: flops_per_token, tokens or the precision is not that of this run."
        f" {text}"
    )


def _losses_text(dataset: Dataset) -> str:
    statistics = dataset.statistics
    step_ms = _median(statistics.get("step_ms"))
    if step_ms is None:
        return "step times were not measured"
    comm = _median(statistics.get(leading(dataset, "comm_ms")))
    parts = losses(dataset)
    by_name = {loss.name: loss for loss in parts}
    a_step = "a timed step" if partly_timed(dataset) else "a step"
    step = _whole_ms(dataset)
    if comm == 0:
        text = f"{a_step} takes {quantity(step, 'ms')} and has no communication"
        idle = by_name.get("idle_ms")
        is_noted = idle is not None and (idle.share or 0.0) >= NOTED
        return f"{text}; {percent(idle.share)} of it is idle" if idle is not None and is_noted else text
    if "exposed_ms" not in by_name:
        return f"a step takes {quantity(step_ms, 'ms')}; overlap was not measured"
    largest, *smaller = parts
    text = (
        f"{percent(largest.share)} of {a_step} is {LOSS_WORDS[largest.name]},"
        f" {number(largest.ms)} of {quantity(step, 'ms')}"
    )
    if dataset.lead == "calibrated":
        text += " (calibrated)"
    text += _waiting(dataset, largest)
    for loss in smaller:
        if (loss.share or 0.0) >= NOTED:
            text += f"; {percent(loss.share)} is {LOSS_WORDS[loss.name]}{_waiting(dataset, loss)}"
    ratio = _median(statistics.get(leading(dataset, "overlap_ratio")))
    return text if ratio is None else f"{text}; {percent(ratio)} of communication is hidden under compute"


def _waiting(dataset: Dataset, loss: Loss) -> str:
    waiting = _median(dataset.statistics.get("exposed_wait_ms"))
    if loss.name != "exposed_ms" or dataset.lead != "raw" or waiting is None or waiting <= loss.ms / 2:
        return ""
    return f", {number(waiting)} ms of it waiting for late ranks"


def _whole_ms(dataset: Dataset) -> float | None:
    """Time that the losses are parts of: of the timed steps where only some were."""
    return timed_step_ms(dataset) if partly_timed(dataset) else _median(dataset.statistics.get("step_ms"))


def _median(statistic: Statistic | None) -> float | None:
    return None if statistic is None else statistic.median
