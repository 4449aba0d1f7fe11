"""The ranks of a run beside each other: who is late, whose device is slowed down or nearly full."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.exposed import exposed_of
from aorta.account.judge.selection import looked_at
from aorta.account.load.measures import memory_limit_bytes
from aorta.account.metrics import THROTTLED, of_operation, operations
from aorta.account.model import Dataset, JudgedRun
from aorta.account.numbers import byte_text, counted, number, percent
from aorta.account.rows import row_percentiles

Floats = NDArray[np.float64]

OFTEN_LAST = 0.8
"""Part of its collectives in which a straggler comes last."""
NOTED_WAIT = 0.01
"""Part of the step that the others must wait for a straggler for it to be named."""
SLOW_RANK = 0.95
"""A rank's usual clock over that of the median rank, below which the rank is named."""
SLOW_STEP = 0.85
"""A step's clock over the rank's own high one, below which the clock has dropped."""
NOTED_STEPS = 0.05
"""Part of a rank's steps with a dropped clock, from which it is named."""
NEARLY_FULL = 0.95
"""Part of the device's memory."""
HARMLESS = frozenset(("sw_power_cap", "applications_clocks_setting", "display_clock_setting", "sync_boost"))
"""Limits that a busy or a pinned device meets as a matter of course: listed, and no cause for alarm."""
MAX_NAMED = 3
"""Ranks of one alert that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank over the judged steps. Medians over its steps, None where it was not measured."""

    rank: int
    step_ms: float | None
    compute_ms: float | None
    exposed_ms: float | None
    caused_ms: float | None
    """What each of the other ranks is exposed in waiting for this one, the mean over steps."""
    num_last: int
    num_judged: int
    sm_clock_mhz: float | None
    lowest_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    """The highest."""
    peak_memory_bytes: float | None
    reserved_memory_bytes: float | None
    device_memory_bytes: float | None
    """The highest, as of the other memory."""
    throttling: dict[str, float]
    """Reason -> part of the steps."""

    @property
    def share_last(self) -> float:
        return self.num_last / self.num_judged if self.num_judged else 0.0


def rank_rows(judged: JudgedRun) -> list[RankRow]:
    """The rank that costs the others most first; where nobody is known to be late, by time in compute."""
    return list(judged.once("rank_rows", lambda: _rank_rows(judged)))


def _rank_rows(judged: JudgedRun) -> list[RankRow]:
    run = judged.run
    reasons = operations(run.metrics, THROTTLED)
    columns = {
        "step_ms": _over_steps(judged, "step_ms"),
        "compute_ms": _over_steps(judged, "compute_ms"),
        "exposed_ms": _over_steps(judged, "exposed_ms"),
        "sm_clock_mhz": _over_steps(judged, "sm_clock_mhz"),
        "lowest_clock_mhz": _over_steps(judged, "sm_clock_mhz", 0),
        "power_w": _over_steps(judged, "power_w"),
        "temperature_c": _over_steps(judged, "temperature_c", 100),
        "peak_memory_bytes": _over_steps(judged, "peak_memory_bytes", 100),
        "reserved_memory_bytes": _over_steps(judged, "reserved_memory_bytes", 100),
        "device_memory_bytes": _over_steps(judged, "device_memory_bytes", 100),
    }
    shares = {reason: _means(judged.values(of_operation(THROTTLED, reason))) for reason in reasons}
    caused, num_last, num_judged = _arrivals(judged)
    rows = [
        RankRow(
            rank=rank,
            **{name: _or_none(values[i]) for name, values in columns.items()},
            caused_ms=_or_none(caused[i]),
            num_last=int(num_last[i]),
            num_judged=int(num_judged[i]),
            throttling={name: float(values[i]) for name, values in shares.items() if values[i] > 0},
        )
        for i, rank in enumerate(run.ranks)
    ]
    return sorted(
        rows, key=lambda row: (-(row.caused_ms or 0.0), -row.share_last, -(row.compute_ms or 0.0), row.rank)
    )


def straggler(judged: JudgedRun) -> RankRow | None:
    """The rank that comes last nearly always and costs the others a part of the step that is worth a word."""
    if judged.run.arrivals is None:
        return None
    worst = rank_rows(judged)[0]
    step_ms = judged.statistics["step_ms"].median or 0.0
    is_late = worst.share_last >= OFTEN_LAST and (worst.caused_ms or 0.0) >= NOTED_WAIT * step_ms
    return worst if is_late and len(judged.run.ranks) > 1 else None


def alerts(dataset: Dataset) -> list[str]:
    """Lines of telemetry that may be the cause of what the times show, for every run."""
    texts = []
    for number_of_run, judged in enumerate(dataset.runs):
        run_text = f"run {number_of_run}: " if len(dataset.runs) > 1 else ""
        texts += [run_text + text for text in _alerts(judged)]
    return texts


def _alerts(judged: JudgedRun) -> Iterator[str]:
    rows = sorted(rank_rows(judged), key=lambda row: row.rank)
    yield from _few(_clock_alerts(judged, rows))
    yield from _few(_memory_alerts(judged, rows))
    if "alloc_retries" in judged.run.metrics:
        retries = np.nansum(judged.values("alloc_retries"), axis=1)
        texts = [
            f"rank {rank}: the allocator flushed its cache {counted(int(num), 'time')} to find memory, and"
            " waited for the device each time"
            for rank, num in zip(judged.run.ranks, retries.tolist(), strict=True)
            if num > 0
        ]
        yield from _few(texts)


def _clock_alerts(judged: JudgedRun, rows: list[RankRow]) -> list[str]:
    clocks = judged.values("sm_clock_mhz") if "sm_clock_mhz" in judged.run.metrics else None
    usual = [row.sm_clock_mhz for row in rows if row.sm_clock_mhz is not None]
    middle = float(np.median(usual)) if usual else None
    texts = []
    for i, row in enumerate(rows):
        text = ""
        if clocks is not None and row.sm_clock_mhz is not None and middle is not None:
            text = _slow_clock(clocks[i][np.isfinite(clocks[i])], row.sm_clock_mhz, middle, len(usual))
        severe = {name: share for name, share in row.throttling.items() if name not in HARMLESS}
        listed = severe or (row.throttling if text else {})
        throttled_text = ", ".join(
            f"{name} in {percent(share)} of the steps" for name, share in listed.items()
        )
        if text or severe:
            texts.append(f"rank {row.rank}: " + ", ".join(part for part in (text, throttled_text) if part))
    return texts


def _slow_clock(clocks: Floats, usual: float, of_ranks: float, num_ranks: int) -> str:
    high = float(np.percentile(clocks, 90))
    dropped = clocks[clocks < SLOW_STEP * high]
    if len(dropped) >= NOTED_STEPS * len(clocks) and len(dropped) < len(clocks):
        return (
            f"SM clock down to {number(float(dropped.min()))} MHz in {len(dropped)} of {len(clocks)} steps,"
            f" {number(high)} MHz otherwise"
        )
    if num_ranks > 1 and usual < SLOW_RANK * of_ranks:
        return f"SM clock {number(usual)} MHz; the median rank has {number(of_ranks)} MHz"
    return ""


def _memory_alerts(judged: JudgedRun, rows: list[RankRow]) -> list[str]:
    limit = memory_limit_bytes(judged.run.run)
    if limit is None:
        return []
    texts = []
    for row in rows:
        used_bytes = max(row.device_memory_bytes or 0.0, row.reserved_memory_bytes or 0.0)
        if used_bytes >= NEARLY_FULL * limit:
            texts.append(
                f"rank {row.rank}: device memory nearly full, {byte_text(used_bytes)} of {byte_text(limit)}"
                f" ({percent(used_bytes / limit)})"
            )
    return texts


def _few(texts: list[str]) -> list[str]:
    if len(texts) <= MAX_NAMED:
        return texts
    return [
        *texts[: MAX_NAMED - 1],
        f"{texts[MAX_NAMED - 1]}; and {len(texts) - MAX_NAMED} more ranks",
    ]


def _arrivals(judged: JudgedRun) -> tuple[Floats, Floats, Floats]:
    """Per rank over the judged steps: its cost to the others in a step, how often it came last, of how many
    collectives."""
    run_arrivals = judged.run.arrivals
    if run_arrivals is None:
        zeros = np.zeros(len(judged.run.ranks))
        return np.full(len(judged.run.ranks), np.nan), zeros, zeros
    judged_steps = slice(judged.num_warmup, None)
    exposed = exposed_of(looked_at(judged))
    return (
        np.zeros(len(judged.run.ranks)) if exposed is None else exposed.caused_ms.mean(axis=1),
        run_arrivals.num_last[:, judged_steps].sum(axis=1),
        run_arrivals.num_judged[:, judged_steps].sum(axis=1),
    )


def _over_steps(judged: JudgedRun, name: str, percentile: float = 50) -> Floats:
    """Percentile of each rank over the judged steps; NaN where it has no value."""
    if name not in judged.run.metrics:
        return np.full(len(judged.run.ranks), np.nan)
    statistic = judged.statistics.get(name)
    if statistic is not None and statistic.median is None:
        return np.full(len(judged.run.ranks), np.nan)
    return row_percentiles(judged.values(name), (percentile,))[0]


def _means(values: Floats) -> Floats:
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
