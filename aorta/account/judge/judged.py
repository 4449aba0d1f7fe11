"""The steps of a run that are judged, those of them that are looked at, and their statistics, also of the
runs of a label together."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.load.evidence import comm_evidence
from aorta.account.load.rank.kernels import NAME_COUNT, NAME_TIME
from aorta.account.load.waits import is_of_transfer
from aorta.account.metrics import metric_key, of_operation
from aorta.account.model import CollectiveKind, CollectiveRow, Dataset, Run, Statistic, once_of_run
from aorta.account.numbers import none_if_nan
from aorta.account.rows import row_medians_and_percentile
from aorta.errors import ReportError
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.collective import busbw_factor
from aorta.timeline.noise import NORMAL_95
from aorta.timeline.statistics import MIN_STEPS, WARMUP_RULE, WARMUP_SHARE, warmup_steps

MOST_NUMBERS = 1 << 20
"""Ranks times steps that causes are looked for in at once: 220 MB for a million."""

FIRST_STEPS = 16
"""Among which calls are noted; of a job that went on, that step is in the middle of the run."""
FEWEST_STEPS = 4
TWICE = 2.0
UNLIKE = 0.05
"""Of the usual step, by which recorded ones are longer or shorter."""
OF_KINDS = 0.1
"""Of the mean step, that the median is off where steps are of several kinds."""


def judge(run: Run, num_warmup: int | None = None) -> Run:
    """Statistics without the warm-up: num_warmup steps, or by WARMUP_RULE."""
    rule = "as asked for"
    if num_warmup is None:
        rule, num_warmup = WARMUP_RULE, _warmup_of(run)
    if not 0 <= num_warmup < run.num_steps:
        why = "leaves no step" if num_warmup >= 0 else "is none"
        raise ReportError(f"{run.label}: warm-up of {num_warmup} {why}: {run.num_steps} were recorded")
    return msgspec.structs.replace(
        run,
        num_warmup=num_warmup,
        warmup_rule=rule,
        statistics={name: statistic(values[:, num_warmup:]) for name, values in run.metrics.items()},
        collective_rows=collective_rows(run, num_warmup),
    )


def _warmup_of(run: Run) -> int:
    """Steps of the warm-up, judged by those that were timed: the others lack what timing costs, and beside
    them all timed steps at the beginning would seem slow. One in which the model's calls were noted is long
    for that alone."""
    step_ms = run.metrics["step_ms"]
    timed = np.flatnonzero(~run.left_out)
    if len(timed) in (0, run.num_steps):
        num = warmup_steps(step_ms)
    else:
        num_timed = warmup_steps(step_ms[:, timed])
        num = int(timed[num_timed - 1]) + 1 if num_timed else 0
    noted = run.noted.coverage.get("noted_step", -1)
    is_noted = run.global_step[: min(run.num_steps // WARMUP_SHARE, FIRST_STEPS)] == noted
    return max(num, int(is_noted.argmax()) + 1) if is_noted.any() else num


def selected(run: Run, steps: tuple[int, int] | None, ranks: Collection[int] | None) -> Run:
    """steps: first and last global step. ReportError where nothing is left."""
    rows = [i for i, rank in enumerate(run.ranks) if ranks is None or rank in ranks]
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing or not rows:
        raise ReportError(f"{run.path} has ranks {run.ranks[0]} to {run.ranks[-1]}, and no rank {missing[0]}")
    low, high = steps if steps is not None else (int(run.global_step[0]), int(run.global_step[-1]))
    columns = np.flatnonzero((run.global_step >= low) & (run.global_step <= high))
    if not len(columns):
        raise ReportError(
            f"{run.path} has steps {run.global_step[0]} to {run.global_step[-1]}, none from {low} to {high}"
        )
    return msgspec.structs.replace(_part(run, np.array(rows), columns), other_sources={})


@once_of_run
def looked_at(run: Run) -> Run:
    """The judged steps that the account is made of: those whose parts are known on every rank, without a
    last one that holds the program's end; of a run of many ranks and steps the last ones, MOST_NUMBERS of all
    ranks together. Where the parts of steps that the overhead left out are known too, and these are the most,
    those alone; without the first ones where these are no usual steps and enough others are. The run itself
    where that is all of them.
    """
    first = _first_looked_at(run)
    is_known = np.ones(run.num_steps - first, dtype=bool)
    for name in ("step_ms", "compute_ms", "exposed_ms"):
        if name in run.metrics:
            is_finite = np.isfinite(run.metrics[name][:, first:]).all(axis=0)
            if (is_known & is_finite).any():
                is_known &= is_finite
    is_known[-1] &= not last_holds_the_end(run)
    is_left_out = is_known & run.left_out[first:]
    if 2 * is_left_out.sum() >= is_known.sum():  # recording makes the others longer
        is_known = is_left_out if is_left_out.any() else is_known
    is_known &= ~_unlike_start(run, first, is_known)
    if first == run.num_warmup and is_known.all():
        return run
    before = [first - 1] if first else []  # what lies behind a step's body delays the next step
    columns = np.array([*before, *(first + np.flatnonzero(is_known)).tolist()], dtype=np.intp)
    return msgspec.structs.replace(_part(run, ALL, columns), num_warmup=len(before), part_of=run)


def _first_looked_at(judged: Run) -> int:
    num_steps = max(MOST_NUMBERS // len(judged.ranks), 1)
    return max(judged.num_warmup, judged.num_steps - num_steps)


def _unlike_start(run: Run, first: int, is_looked_at: Flags) -> Flags:
    """[step from first on]: of few steps that are looked at, those in a row at the start, where these are off
    the length of the others of the run, by more than the later ones are: a loader has a stock for them."""
    at_start = np.zeros(len(is_looked_at), dtype=bool)
    step_ms = run.metrics["step_ms"][:, first:].mean(axis=0)
    others_ms = step_ms[~is_looked_at & np.isfinite(step_ms)]
    places = np.flatnonzero(is_looked_at)
    if len(places) < len(others_ms):
        at_start[places[: int(np.argmax(np.diff(places, append=len(step_ms) + 1) > 1)) + 1]] = True
    later = is_looked_at & ~at_start
    if later.sum() < MIN_STEPS or not at_start.any():
        return np.zeros_like(at_start)
    usual_ms = float(np.median(others_ms))
    off_ms, later_off_ms = (abs(float(step_ms[of].mean()) - usual_ms) for of in (at_start, later))
    return at_start & (off_ms > max(UNLIKE * usual_ms, later_off_ms))


class UsualStep(NamedTuple):
    """The step of a run of which few are looked at, by the lengths of the judged ones, which are known."""

    ms: float
    statistic: Literal["median", "mean"]
    """mean: of steps of several kinds, of which a median is one."""
    recorded_ms: float
    """Mean of the steps that are looked at."""
    error_ms: float
    """Half of the 95 % interval by which that is off the mean of the others, for their scatter."""
    is_of_left_out: bool
    """Of those alone that were not recorded, since the recorded ones are longer."""
    global_step: Ints
    """That it is of."""


@once_of_run
def usual_step(judged: Run) -> UsualStep | None:
    """None where half of the judged steps or more are looked at: their mean is that of the run. Of the others
    alone where these are shorter: steps are long for being recorded, or for being early."""
    first, looked = _first_looked_at(judged), looked_at(judged)
    step_ms = judged.metrics["step_ms"][:, first:].mean(axis=0)
    is_known = np.isfinite(step_ms)
    is_known[-1] &= not last_holds_the_end(judged)
    is_looked_at = np.isin(judged.global_step[first:], looked.global_step[looked.judged_steps])
    all_ms, recorded_ms, others_ms = (step_ms[is_known & of] for of in (True, is_looked_at, ~is_looked_at))
    if not FEWEST_STEPS <= len(recorded_ms) <= len(others_ms):
        return None
    median, mean, of_recorded = (float(ms) for ms in (np.median(all_ms), all_ms.mean(), recorded_ms.mean()))
    is_of_kinds = abs(others_ms.mean() - np.median(others_ms)) > OF_KINDS * others_ms.mean()
    # A host that fills its device's queue anew is short in some steps; most take as long as the device.
    is_refilled = mean < of_recorded <= median + OF_KINDS * of_recorded
    error_ms = NORMAL_95 * math.hypot(
        *(float(ms.std(ddof=1)) / math.sqrt(len(ms)) for ms in (others_ms, recorded_ms))
    )
    is_of = is_known & judged.left_out[first:]
    is_of_left_out = is_of.sum() >= len(recorded_ms) and bool(
        step_ms[is_known & ~is_of].mean() - step_ms[is_of].mean()
        > max(error_ms, UNLIKE * step_ms[is_of].mean())
    )
    if is_of_left_out:
        median, mean = float(np.median(step_ms[is_of])), float(step_ms[is_of].mean())
    steps = judged.global_step[first:][is_of if is_of_left_out else is_known]
    if is_of_kinds and not is_refilled:
        return UsualStep(mean, "mean", of_recorded, error_ms, is_of_left_out, steps)
    return UsualStep(median, "median", of_recorded, error_ms, is_of_left_out, steps)


def last_holds_the_end(judged: Run) -> bool:
    """Whether the last step is over twice as long as any other: no step came after it to end it, so that it
    holds what the program does at its end, such as a last checkpoint."""
    longest = np.nan_to_num(judged.metrics["step_ms"][:, _first_looked_at(judged) :]).max(axis=0)
    return len(longest) > FEWEST_STEPS and float(longest[-1]) > TWICE * float(longest[:-1].max())


def stretches(judged: Run) -> Iterator[Run]:
    """The whole run in order, its warm-up too, MOST_NUMBERS of all ranks at a time."""
    num_steps = max(MOST_NUMBERS // len(judged.ranks), 1)
    for first in range(0, judged.num_steps, num_steps):
        columns = np.arange(first, min(first + num_steps, judged.num_steps))
        yield msgspec.structs.replace(_part(judged, ALL, columns), num_warmup=0)


ALL = slice(None)
BY_STEP = ("global_step", "has_details", "has_collectives", "left_out")
"""Arrays of a run with a number for each step, of all ranks."""


def _part(run: Run, rows: NDArray[np.intp] | slice, columns: NDArray[np.intp]) -> Run:
    """The run with the ranks in these rows and the steps in these columns. Arrays of metrics are read when
    they are asked for."""
    ranks = [run.ranks[i] for i in np.arange(len(run.ranks))[rows]]

    def part(values: NDArray[Any], of: NDArray[np.intp] = columns) -> NDArray[Any]:
        return values[rows][:, of]

    def parts_of(whole: object, *names: str, of: NDArray[np.intp] = columns) -> dict[str, NDArray[Any]]:
        return {name: part(getattr(whole, name), of) for name in names}

    arrivals = run.arrivals
    if arrivals is not None:
        waits = {rank: arrivals.waits[rank] for rank in ranks}
        of_arrivals = parts_of(arrivals, "num_last", "num_judged", "caused_ms", "exposed_ms")
        arrivals = msgspec.structs.replace(arrivals, **of_arrivals, waits=waits)
    kept = (np.cumsum(run.has_collectives) - 1)[columns[run.has_collectives[columns]]]
    of_kinds = ("count", "duration_ms", "wait_ms", "transfer_ms")
    return msgspec.structs.replace(
        run,
        ranks=ranks,
        **parts_of(run, "start_unix_ns", "num_collectives", "host_bound"),
        **{name: getattr(run, name)[columns] for name in BY_STEP},
        metrics=cast(MutableMapping[str, Floats], _Parts(run.metrics, part)),
        collectives=[
            msgspec.structs.replace(kind, **parts_of(kind, *of_kinds, of=kept)) for kind in run.collectives
        ],
        arrivals=arrivals,
        host_parts=_Parts(run.host_parts, part),
    )


class _Parts(Mapping[str, Floats]):
    """Parts of arrays, each read when it is asked for."""

    def __init__(self, arrays: Mapping[str, Floats], part: Callable[[Floats], Floats]) -> None:
        self._arrays, self._part = arrays, part

    def __getitem__(self, name: str) -> Floats:
        return self._part(self._arrays[name])

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


# -- statistics of the judged steps ----------------------------------------------------------------------


def dataset(label: str, runs: list[Run]) -> Dataset:
    """The runs of a label, which must be of the same kind."""
    for attribute, kinds in (
        ("ranks", sorted({len(judged.ranks) for judged in runs})),
        ("source", sorted({judged.source for judged in runs})),
    ):
        if len(kinds) > 1:
            raise ReportError(
                f"{label}: its runs differ in {attribute} ({', '.join(map(str, kinds))});"
                " runs that are not alike need labels of their own"
            )
    names = dict.fromkeys(name for judged in runs for name in judged.statistics)
    together = {name: mean_of_runs([judged.statistics.get(name) for judged in runs]) for name in names}
    together |= {name: mean_of_runs([None]) for name in names if is_unlike(runs, name)}
    return Dataset(label, runs, runs[0].statistics if len(runs) == 1 else together)


def statistic(values: Floats) -> Statistic:
    """Statistic of values [rank, step] without the steps in which it was not measured (NaN)."""
    medians, p95 = row_medians_and_percentile(values, 95)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what no rank has: NaN, wanted here
        middle, least, greatest = np.nanmedian(medians), np.nanmin(medians), np.nanmax(medians)
        across_ranks = (middle, np.nanmedian(p95), least, greatest)
    return Statistic(*(none_if_nan(float(value)) for value in across_ranks))


def mean_of_runs(of_runs: Collection[Statistic | None]) -> Statistic:
    """Unknown where one of them has none."""
    measured = [statistic for statistic in of_runs if statistic is not None and statistic.median is not None]
    if len(measured) < len(of_runs):
        return Statistic(None, None, None, None)
    return Statistic(
        median=float(np.mean([statistic.median for statistic in measured if statistic.median is not None])),
        p95=float(np.mean([statistic.p95 for statistic in measured if statistic.p95 is not None])),
        min=min(statistic.min for statistic in measured if statistic.min is not None),
        max=max(statistic.max for statistic in measured if statistic.max is not None),
    )


Bandwidth = Literal["transfer", "duration"]
"""What a busbw_gb_s.<op> is over."""


def bandwidths(runs: Iterable[Run], name: str) -> set[Bandwidth]:
    """The bases of the bandwidth called name in the runs that have it; empty for other metrics."""
    key = metric_key(name)
    if key.name != "busbw_gb_s":
        return set()
    runs_with_it = (
        judged for judged in runs if name in judged.statistics and judged.statistics[name].median is not None
    )
    return {"transfer" if is_of_transfer(run.metrics, key.operation) else "duration" for run in runs_with_it}


def is_unlike(runs: Iterable[Run], name: str) -> bool:
    """Returns True where a mean over the runs would be of unlike things."""
    return len(bandwidths(runs, name)) > 1


def collective_rows(run: Run, num_warmup: int) -> list[CollectiveRow]:
    """Rows of the collectives of the steps after the first num_warmup, the longest in a step first."""
    judged = np.flatnonzero(run.has_collectives) >= num_warmup
    rows = [_row(kind, judged) for kind in run.collectives] if judged.any() else []
    present = [row for row in rows if row.count_per_step > 0]
    return sorted(present, key=lambda row: -(row.count_per_step * (row.duration_ms or 0.0)))


def _row(kind: CollectiveKind, judged: Flags) -> CollectiveRow:
    durations, waits, transfers = (
        _medians(values[:, judged]) for values in (kind.duration_ms, kind.wait_ms, kind.transfer_ms)
    )
    duration, transfer = _median(durations), _median(transfers)
    moved_in = transfer or duration
    busbw = None
    if kind.bytes and kind.num_ranks and moved_in:  # neither unknown nor 0 bytes, as a barrier's
        busbw = kind.bytes / moved_in / 1e6 * busbw_factor(kind.op, kind.num_ranks)
    return CollectiveRow(
        op=kind.op,
        bytes=kind.bytes,
        dtype=kind.dtype,
        num_ranks=kind.num_ranks,
        stream=kind.stream,
        count_per_step=float(np.nanmean(kind.count[:, judged])),
        duration_ms=duration,
        duration_min_ms=min(durations, default=None),
        duration_max_ms=max(durations, default=None),
        wait_ms=_median(waits),
        transfer_ms=transfer,
        busbw_gb_s=busbw,
    )


def _medians(values: Floats) -> list[float]:
    """Over steps, of each rank that has any."""
    return [float(np.median(measured)) for row in values if len(measured := row[~np.isnan(row)])]


def _median(medians: list[float]) -> float | None:
    return float(np.median(medians)) if medians else None


OF_CALLS = ("duration_ms", "transfer_ms", "wait_ms", "busbw_gb_s", "count", "bytes")
"""Metrics of the collectives of an operation."""


def why_missing(dataset: Dataset, name: str) -> str:
    """Reason why the dataset has no statistic of this name."""
    if is_unlike(dataset.runs, name):
        return "not the same thing in all of its runs: ranks were matched in some of them only"
    return missing(dataset.first).get(name) or not_given(dataset.first, name)


def missing(judged: Run) -> dict[str, str]:
    """Metrics that no judged step has, and why."""
    reasons = judged.not_measured
    return {
        name: reasons.get(name) or _reason(judged, name)
        for name, values in judged.statistics.items()
        if values.median is None
    }


def not_given(judged: Run, name: str) -> str:
    """Reason why a run has no such metric."""
    key = metric_key(name)
    is_of_calls = key.name in OF_CALLS and bool(key.operation)
    is_absent = of_operation("count", key.operation) not in judged.statistics
    if is_of_calls and is_absent and judged.has_details.any():
        return f"no {key.operation} was recorded"
    if key.name in (NAME_TIME, NAME_COUNT):
        return "no kernel of this name is among those with most time"
    return f"not given by source {judged.source}"


def _reason(judged: Run, name: str) -> str:
    if name == "overlap_ratio" and judged.statistics["comm_ms"].median == 0:
        evidence = comm_evidence(judged)
        if evidence.num_ranks > 1 and not evidence.is_found:
            return evidence.absence
        return "there was no communication"
    key = metric_key(name)
    size = judged.statistics.get(of_operation("bytes", key.operation))
    if key.name == "busbw_gb_s" and size is not None and size.median == 0:
        return "it carries no bytes"
    return not_given(judged, name)
