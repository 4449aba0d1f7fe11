"""The terminal table: the answer first, aligned, a unit beside each number, the spread beside the middle."""

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from aorta.account.judge.answer import (
    PER_TIME,
    dataset_answer,
    is_of_mean_step,
    mfu_text,
    statistic_beside_step,
)
from aorta.account.judge.cells import CELLS, account_of
from aorta.account.judge.compare import CALLED
from aorta.account.judge.cores import cores_had
from aorta.account.judge.judged import looked_at, missing, why_missing
from aorta.account.judge.kernels import kernels_by_class, kernels_by_name, operators, queue_text
from aorta.account.judge.phases import PhaseRow, phases_of
from aorta.account.judge.timed_steps import host_bound_text, remarks, timed_steps
from aorta.account.load.measures import memory_limit_bytes, usable_cores
from aorta.account.load.rank.kernels import KernelTimeRow, compared_kernels, count_text, kernel_name
from aorta.account.metrics import (
    CORES,
    MEASURES,
    PER_STEP,
    metric_key,
    of_operation,
    operations,
)
from aorta.account.model import (
    Causes,
    Comparison,
    Dataset,
    Decomposition,
    MetricComparison,
    Part,
    Run,
)
from aorta.account.numbers import byte_text, counted, number, percent, quantity, times
from aorta.page.parts import MAX_LABEL, interval_text
from aorta.timeline.statistics import LEVEL, WARMUP_RULE
from aorta.timeline.types import TRACE_SOURCES

ROWS = (
    ("step", "step_ms"),
    ("busy", "compute_ms"),
    ("comm", "comm_ms"),
    ("hidden", "hidden_ms"),
    ("exposed", "exposed_ms"),
    ("idle", "idle_ms"),
)
ALWAYS_EXPECTED = {metric for _, metric in ROWS}
OP_ROWS = (
    ("comm", "comm_ms"),
    ("exposed", "exposed_ms"),
    ("transfer", "transfer_ms"),
    ("time", "duration_ms"),
    ("busbw", "busbw_gb_s"),
    ("count", "count"),
    ("bytes", "bytes"),
)
RATE_ROWS = (
    ("tokens/s per GPU", "tokens_per_s_per_gpu", ""),
    ("tokens/s", "tokens_per_s", ""),
    ("samples/s", "samples_per_s", ""),
    ("model FLOP/s per GPU", "model_tflops_per_gpu", "TFLOP/s"),
    ("MFU", "mfu", "%"),
    ("energy per token", "energy_per_token_mj", "mJ"),
    ("peak memory", "peak_memory_bytes", "bytes"),
    ("reserved memory", "reserved_memory_bytes", "bytes"),
)
"""Work per time first; in the terminal where they are known."""
DEVICE_ROWS = (
    ("device memory", "device_memory_bytes", "bytes"),
    ("power", "power_w", "W"),
    ("SM clock", "sm_clock_mhz", "MHz"),
    ("temperature", "temperature_c", "°C"),
    ("cores of the host", CORES, ""),
)
KERNEL_WORDS = {
    "kernel_ms": " kernels",
    "kernel_count": " kernels, launches",
    "kernel_name_ms": "",
    "kernel_name_count": ", launches",
}
"""Text after the class or the name of kernels."""
LEAST_SHOWN = 0.005
"""Part of the step from which on a cell has a row of its own."""
MAX_OPS = 6
"""Operations with a row of their own."""
MAX_DIFFERENCES = 6
SHORT_NOTES, SHORT_ROWS = 4, 5
MAX_SETTING, BEFORE_DIFFERENCE = 40, 12
MAX_KERNEL = 48
"""Letters of a kernel's name beside a comparison."""
MAX_OPERATOR = 64
"""Letters of an operator with its shapes."""
WIDE_SPREAD = 1.2
"""p95 / median above which the table warns that the middle says little."""
WARMUP_SHORT = "until step time settles; --warmup N overrides"
DEFINITIONS = (
    "means over the judged steps and ranks, as parts of the step: the rows add up to it; ranks: least and"
    " most; each row is defined in docs/definitions.md"
)
COMPUTE_OF_SOURCE = {
    "events": "compute: time in which the compute stream is neither stalled nor in a collective; gaps with"
    " nothing queued are included",
    "host": "compute: host time outside collectives that no other row has",
}
"""Definition of compute by source; for kernel sources it is the union of all kernels that are not
communication."""
ALL_KERNELS = "compute and hidden communication: union of all kernels that are not communication"


# ---- one run -------------------------------------------------------------------------------------


def dataset_table(dataset: Dataset, causes: Causes | None = None, with_changes: bool = True) -> str:
    """The terminal's text on one run: title, answer, causes, tables, footer.

    with_changes: print below each cause what to change.
    """
    if causes is None:
        lines = [dataset_answer(dataset), *_stories(dataset)]
    else:
        lines = [causes.title, *_stories(dataset), "", *_causes(causes, with_changes)]
    lines += ["", _title(dataset)]
    account, ops = account_of(dataset.first), _operation_rows(dataset)
    lines += ["", *aligned([("", account.statistic, "of step", "ranks"), *account_rows(dataset)])]
    if phases := phase_rows(dataset):
        lines += ["", *aligned(phases)]
    if account.recorded_text and (ops or kernels_by_class(dataset)):
        lines += ["", account.recorded_text]
    if ops:
        lines += ["", *aligned([("", "mean", "exposed"), *ops])]
    measures = [*_measure_rows(dataset, RATE_ROWS), *_measure_rows(dataset, DEVICE_ROWS)]
    if measures:
        lines += ["", *aligned([("", "median", "ranks", ""), *measures])]
    for rows in (kernels_by_class(dataset), kernels_by_name(dataset), operators(dataset)):
        if rows:
            lines += ["", *kernel_table(rows, account.recorded_ms)]
    if queue := queue_text(dataset):
        lines += ["", queue]
    lines += ["", *_footer(dataset)]
    return "\n".join(lines)


def kernel_table(rows: list[KernelTimeRow], step_ms: float) -> list[str]:
    """Time, share of the step, number of launches or calls, and what operators achieve."""
    has_operators = any(row.is_operator for row in rows)
    cells: list[tuple[str, ...]] = [
        ("operators", "time", "of step", "calls", "mean", "achieved", "of attainable")
        if has_operators
        else ("kernels", "time", "of step", "launches", "mean", "")
    ]
    for row in rows:
        share = percent(row.time_ms / step_ms) if step_ms else "n/a"
        mean = f"{number(1e3 * row.time_ms / row.count)} us" if row.count else "n/a"
        line = (
            elided(row.title, MAX_OPERATOR),
            quantity(row.time_ms, "ms"),
            share,
            count_text(row.count),
            mean,
        )
        attained = "" if row.of_attainable is None else percent(row.of_attainable)
        cells.append((*line, row.achieved, attained) if has_operators else (*line, ""))
    return aligned(cells)


def _title(dataset: Dataset) -> str:
    first = dataset.first
    num_steps = sum(run.num_judged for run in dataset.runs)
    steps = f"{num_steps} step{'s' if num_steps != 1 else ''}"
    if len(dataset.runs) > 1:
        steps += f" of {len(dataset.runs)} runs"
    parts = [dataset.label, device_text(first), precision(first), steps, f"source: {dataset.source}"]
    return "   ".join(part for part in parts if part)


def precision(judged: Run) -> str:
    """'bf16', or '' if run.json does not tell it."""
    training = (judged.noted.config or {}).get("training")
    value = training.get("precision") if isinstance(training, dict) else None
    return value if isinstance(value, str) else ""


def _stories(dataset: Dataset) -> list[str]:
    """Lines on how the runs ended, which come before their numbers."""
    if len(dataset.runs) == 1:
        return dataset.first.story
    return [f"run {i}: {line}" for i, judged in enumerate(dataset.runs) for line in judged.story]


def _causes(causes: Causes, with_changes: bool) -> Iterator[str]:
    if not causes.listed:
        yield from textwrap.wrap(causes.empty_text, 100)
    for place, cause in enumerate(causes.listed, start=1):
        yield f"{place}. {cause.headline}"
        if with_changes:
            yield from textwrap.wrap(
                f"change: {cause.change}", 100, initial_indent="   ", subsequent_indent="     "
            )
    for note in causes.notes:
        yield from ["", *textwrap.wrap(note, 100)]
    if with_changes and causes.listed:
        yield "   (aorta why RUN adds the evidence, where to look, and how to check each change)"


def account_rows(dataset: Dataset) -> list[tuple[str, ...]]:
    """Rows that add up to the last one, the step."""
    account = account_of(dataset.first)
    several = len(account.ranks) > 1
    rows = [
        (
            CELLS[row.name].title,
            _ms(row.mean_ms),
            percent(row.share),
            f"{number(row.least_ms)} to {number(row.most_ms)}" if several else "",
        )
        for row in account.rows()
        if row.share >= LEAST_SHOWN
    ]
    smaller_ms = sum(row.mean_ms for row in account.rows() if row.share < LEAST_SHOWN)
    if smaller_ms >= LEAST_SHOWN / 10 * account.mean_step_ms > 0:
        rows.append(("smaller parts", _ms(smaller_ms), percent(smaller_ms / account.mean_step_ms), ""))
    by_rank = account.step_ms.mean(axis=1)
    spread = f"{number(float(by_rank.min()))} to {number(float(by_rank.max()))}" if several else ""
    if account.step_ms.size:
        middle = account.spread
        of_rank = f"{spread}   of a rank: " if several else ""
        spread = f"{of_rank}median {number(middle.median)}, p95 {number(middle.p95)}"
    return [*rows, ("step", _ms(account.mean_step_ms or None), "", spread)]


def phase_rows(dataset: Dataset) -> list[tuple[str, ...]]:
    """Phases of the host, which add up to the step, each with its memory and the line that most of it is in,
    below their heading; of the first run."""
    rows = [row for row in phases_of(dataset.first) if row.share >= LEAST_SHOWN]
    if not rows:
        return []
    several, has_bytes = len(dataset.first.ranks) > 1, any(row.bytes is not None for row in rows)
    word = account_of(dataset.first).statistic
    head = (f"phase ({counted(rows[0].num_steps, 'step')})", word, "of step", "ranks")
    found: list[tuple[str, ...]] = [(*head, *(["memory"] if has_bytes else []), "most of it in")]
    for row in rows:
        cells = row.title, _ms(row.ms), percent(row.share), rank_range(row) if several else ""
        memory = ("" if row.bytes is None else byte_text(row.bytes),) if has_bytes else ()
        found.append((*cells, *memory, row.at))
    return found


def rank_range(row: PhaseRow) -> str:
    """'12.3 to 25.7'"""
    return f"{number(min(row.by_rank_ms))} to {number(max(row.by_rank_ms))}"


def _operation_rows(dataset: Dataset) -> list[tuple[str, ...]]:
    """Mean time of each operation in a step, and how much of it is exposed; none of one operation alone."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    looked = looked_at(dataset.first)
    for op in operations(dataset.statistics, "comm_ms"):
        comm, exposed = (looked.mean_of(of_operation(name, op)) for name in ("comm_ms", "exposed_ms"))
        if comm:
            rows.append((comm, (op, _ms(comm), "n/a" if exposed is None else _ms(exposed))))
    ordered = [row for _, row in sorted(rows, key=lambda row: -row[0])[:MAX_OPS]]
    return ordered if len(rows) > 1 else []


def _measure_rows(dataset: Dataset, rows: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, ...]]:
    """Work, memory and telemetry, with the least and the greatest rank. Where model FLOPs are known and the
    peak is not, the reason stands in the place of MFU."""
    for title, metric, unit in rows:
        name = title.replace("GPU", "rank") if dataset.source == "host" else title  # which has none
        statistic = statistic_beside_step(dataset, metric)
        if statistic is None or statistic.median is None:
            work = dataset.statistics.get("model_tflops_per_gpu")
            if metric == "mfu" and work is not None and work.median is not None:
                yield (name, "n/a", "", why_missing(dataset, metric))
            continue
        spread = ""
        if len(dataset.first.ranks) > 1 and statistic.min is not None and statistic.max != statistic.min:
            spread = f"{quantity(statistic.min, unit)} to {quantity(statistic.max, unit)}"
        yield (
            f"{name}, mean" if is_of_mean_step(dataset, metric) else name,
            quantity(statistic.median, unit),
            "" if metric in PER_TIME else spread,
            _limit_text(dataset, metric),
        )


def _limit_text(dataset: Dataset, metric: str) -> str:
    """'of 140 GiB', 'of 2, which 2 ranks share; other processes had 0.51'; '' of other metrics, and where
    nobody knows."""
    if metric == CORES and (cores := usable_cores(dataset.first.noted)):
        shared = f", which {cores.num_ranks} ranks share" if cores.num_ranks > 1 else ""
        others_had = cores.others if (had := cores_had(dataset.first)) is None else had.others
        others = "" if others_had is None else f"; other processes had {number(others_had)}"
        return f"of {cores.num}{shared}{others}"
    limit = memory_limit_bytes(dataset.first.noted) if metric == "device_memory_bytes" else None
    return "" if limit is None else f"of {quantity(limit, 'bytes')}"


def _footer(dataset: Dataset) -> Iterable[str]:
    """Lines below the tables: warnings, the spread over ranks, what was left out, definitions."""
    step = account_of(dataset.first).spread
    if step.median and step.p95 and step.p95 > WIDE_SPREAD * step.median:
        yield f"warning: step times vary widely: p95 is {times(step.p95 / step.median)} the median"
    num_steps = min(run.num_judged for run in dataset.runs)
    if num_steps < 10:
        effect = "p95 is close to the longest" if num_steps > 1 else "median and p95 are that step's"
        yield f"warning: only {counted(num_steps, 'step')} judged: {effect}"
    if (peak := mfu_text(dataset)) != "":
        yield peak
    if dataset.source in TRACE_SOURCES and len(dataset.runs) == 1:
        yield _all_that_was_read(dataset.first)
    for place, judged in enumerate(dataset.runs):
        run_text = f"run {place}: " if len(dataset.runs) > 1 else ""
        for line in _footer_of_run(judged):
            yield run_text + line
    yield from remarks(dataset)
    yield COMPUTE_OF_SOURCE.get(dataset.source, ALL_KERNELS)
    yield DEFINITIONS


def _all_that_was_read(run: Run) -> str:
    """The totals, from the least rank to the greatest; the overlap of each rank's."""
    totals = list(run.totals.values())
    parts = []
    for name in ("span", "compute", "comm", "hidden"):
        values = [value for total in totals if (value := total[f"{name}_ms"]) is not None]
        if values:
            parts.append(f"{name} {_range(values, number)} ms")
    shares = [
        100 * t["hidden_ms"] / t["comm_ms"] for t in totals if t["comm_ms"] and t["hidden_ms"] is not None
    ]
    if shares:
        parts[-1] += f" ({_range(shares, '{:.2f}'.format)} % of comm)"
    return f"whole trace: {', '.join(parts)}"


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    least, greatest = text(min(values)), text(max(values))
    return least if least == greatest else f"{least} to {greatest}"


def _footer_of_run(run: Run) -> Iterable[str]:
    host_bound = host_bound_text([run])
    if host_bound:
        yield host_bound
    if run.num_warmup:
        rule = WARMUP_SHORT if run.warmup_rule == WARMUP_RULE else run.warmup_rule
        yield f"warm-up: {run.num_warmup} of {run.num_steps} steps left out ({rule})"
    yield from _lacking_comm(run)
    reasons: dict[str, list[str]] = {}
    for name, reason in missing(run).items():
        if name in ALWAYS_EXPECTED or (name in run.not_measured and name not in MEASURES):
            reasons.setdefault(reason, []).append(name.removesuffix("_ms"))
    for reason, names in reasons.items():
        yield f"not measured: {', '.join(names)} ({reason})"
    for source, other_run in run.other_sources.items():
        yield f"{source}: {other_run.num_steps} steps kept apart, see other_sources in summary.json"
    for note in run.notes:
        yield note if note.startswith(("note: ", "warning: ")) else f"note: {note}"


def _lacking_comm(judged: Run) -> Iterable[str]:
    """Timed steps of which communication is not known; remarks() says how many were timed."""
    num_known = int((~np.isnan(judged.values("comm_ms"))).all(axis=0).sum())
    num = int(timed_steps(judged).sum())
    if 0 < num_known < num:
        only = " that were timed" if num < judged.num_judged else ""
        yield (
            f"comm and overlap are known for {num_known} of these {num} steps{only};"
            " in the others some collective was not timed"
        )


# ---- two runs ------------------------------------------------------------------------------------


def differences_list(comparison: Comparison) -> str:
    """Differences in configuration, a line each."""
    settings = comparison.differences
    if not settings:
        known = comparison.is_described
        return "same configuration: no setting, version or device differs" if known else ""
    sides = (elided(setting, MAX_SETTING) for setting in (comparison.reference, comparison.candidate))
    body = [("different settings", *sides, "")]
    body += [
        (f"{setting.group}: {setting.name}", *_told_apart(setting.reference, setting.candidate), "")
        for setting in settings[:MAX_DIFFERENCES]
    ]
    lines = aligned(body, left=True)
    if len(settings) > MAX_DIFFERENCES:
        lines.append(f"and {len(settings) - MAX_DIFFERENCES} more in summary.json")
    return "\n".join(lines)


def _told_apart(*sides: str | None) -> list[str]:
    """Both values, long ones from a little before where they differ."""
    texts = ["not set" if side is None else side.replace("\n", " ") for side in sides]
    first = len(os.path.commonprefix(texts)) - BEFORE_DIFFERENCE
    if first > 0 and max(map(len, texts)) > MAX_SETTING:
        texts = [f"...{text[first:]}" for text in texts]
    return [text if len(text) <= MAX_SETTING else text[: MAX_SETTING - 3] + "..." for text in texts]


def comparison_lines(comparison: Comparison) -> list[str]:
    """The change taken apart, what else changed, and what to know of it: less than a screen."""
    apart = taken_apart(comparison.decomposition, comparison.reference, comparison.candidate)
    lines = [*apart, *_also_changed(comparison)]
    notes = comparison.notes[:SHORT_NOTES]
    left = len(comparison.notes) - len(notes)
    more = f"; {counted(left, 'more note')}, every metric and both reports: --long" if left else ""
    return [*lines, "", *(f"note: {note}" for note in notes), f"{comparison.scope}{more}"]


def taken_apart(apart: Decomposition | None, reference: str, candidate: str) -> list[str]:
    """Table of a change by cells and by phases; [] where it is not taken apart."""
    if apart is None:
        return []
    sides = [elided(label, MAX_LABEL) for label in (reference, candidate)]
    net = ", without cores taken" if apart.is_net else ""
    head = f"typical step{net}"
    body = [(head, *sides, "change", LEVEL, "")]
    body += [
        _part_row(part, CELLS[part.name].title if part.name in CELLS else part.name, "")
        for part in parts_shown(apart)
    ]
    body.append(_part_row(apart.step, "step, the sum", ""))
    if apart.phases:
        body.append(("", "", "", "", "", ""))
        body.append(("the same by phase", "", "", "", "", "most of it in"))
        least_ms = LEAST_SHOWN * max(apart.step.reference_ms, apart.step.candidate_ms)
        body += [
            _part_row(phase.part, phase.title, phase.line)
            for phase in apart.phases
            if max(phase.part.reference_ms, phase.part.candidate_ms) >= least_ms
        ]
    return [*aligned(body), *([f"times are of {apart.of_work}"] if apart.of_work else [])]


def _part_row(part: Part, title: str, line: str) -> tuple[str, ...]:
    return (
        title,
        _ms(part.reference_ms),
        _ms(part.candidate_ms),
        quantity(part.difference_ms, "ms", sign=True),
        interval_text(part.interval, minus="-"),
        line,
    )


def parts_shown(apart: Decomposition) -> list[Part]:
    """The parts that are more than little on either side, and the sum of the others."""
    step = apart.step
    longest = max(step.reference_ms, step.candidate_ms)
    shown = [
        part for part in apart.parts if max(part.reference_ms, part.candidate_ms) >= LEAST_SHOWN * longest
    ]
    reference_ms = step.reference_ms - sum(part.reference_ms for part in shown)
    candidate_ms = step.candidate_ms - sum(part.candidate_ms for part in shown)
    if max(reference_ms, candidate_ms) <= 1e-6 * longest:
        return shown
    return [*shown, Part("smaller parts", reference_ms, candidate_ms, candidate_ms - reference_ms, None)]


def _also_changed(comparison: Comparison) -> list[str]:
    """Collectives and kernels that are called, the largest change first."""
    kernels = {name for name, _, _ in compared_kernels(comparison)}
    called = [
        (kernel_name(name) if name in kernels else row_name(metric.name), metric)
        for name, metric in comparison.metrics.items()
        if metric.verdict in CALLED
        and metric.ratio
        and name != comparison.main
        and (metric_key(name).operation or name in kernels)
        and metric_key(name).name not in ("comm_ms", "kernel_count", "kernel_name_count")
    ]
    called.sort(key=lambda one: -abs(one[1].difference or 0.0) if one[1].unit == "ms" else 0.0)
    rows = [
        (elided(name, MAX_KERNEL), *_comparison_row(name, metric, comparison.matters)[1:])
        for name, metric in called[:SHORT_ROWS]
    ]
    if not rows:
        return []
    more = [f"and {len(called) - SHORT_ROWS} more: --long"] if len(called) > SHORT_ROWS else []
    return ["", *aligned([("also changed", "", "", "ratio", LEVEL, ""), *rows]), *more]


def comparison_table(comparison: Comparison) -> str:
    """The long form: every metric with its medians, their ratio with its interval, the verdict."""
    reference, candidate = (
        elided(label, MAX_LABEL) for label in (comparison.reference, comparison.candidate)
    )
    body: list[tuple[str, ...]] = [("", reference, candidate, "ratio", f"{LEVEL} interval", "verdict")]
    body += [
        _comparison_row(name, comparison.metrics[key], comparison.matters)
        for name, key in _compared(comparison)
    ]
    lines = [f"{comparison.candidate} against {comparison.reference}", "", *aligned(body)]
    reasons: dict[str, list[str]] = {}
    for name, key in _compared(comparison):
        if comparison.metrics[key].reason:
            reasons.setdefault(comparison.metrics[key].reason, []).append(name.replace(", ", " "))
    if reasons:
        lines += ["", *(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())]
    lines += _kernel_rows(comparison, body[0])
    apart = comparison.decomposition
    lines += ["", *taken_apart(apart, comparison.reference, comparison.candidate)]
    lines += [] if apart is None else [*apart.notes, apart.estimator]
    lines += ["", *(f"note: {note}" for note in comparison.notes)]
    lines.append(comparison.scope)
    return "\n".join(lines)


def _compared(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Name and key of the rows shown: the main ones, and what is judged per operation."""
    metrics = comparison.metrics
    rates = [
        (name, key)
        for name, key, _ in RATE_ROWS
        if (row := metrics.get(key)) is not None and None not in (row.reference, row.candidate)
    ]
    if comparison.work is not None:
        yield from rates
    for name, key in (*ROWS, ("overlap ratio", "overlap_ratio")):
        if key in metrics:
            yield name, key
    if comparison.work is None:
        yield from rates
    if comparison.decomposition is None:
        for name in PER_STEP:
            key = f"{name}_per_step"
            yield f"{name} / step", key
    for op in operations(metrics, "count"):
        for word, kind in OP_ROWS:
            key = of_operation(kind, op)
            row = metrics.get(key)
            if row is None or (row.reference is None and row.candidate is None):
                continue
            if kind == "duration_ms" and of_operation("transfer_ms", op) in metrics:
                continue
            if kind in ("count", "bytes") and row.verdict != "different":
                continue
            yield f"{op} {word}", key


def _comparison_row(name: str, metric: MetricComparison, matters: float) -> tuple[str, ...]:
    unit = "" if metric.unit in ("tokens/s", "samples/s") else metric.unit  # the row's name has it
    interval = metric.interval
    return (
        name,
        quantity(metric.reference, unit),
        quantity(metric.candidate, unit),
        "n/a" if metric.ratio is None else f"{metric.ratio:.3f}",
        "" if interval is None else f"[{interval.low:.3f}, {interval.high:.3f}]",
        verdict_text(metric, matters),
    )


def verdict_text(metric: MetricComparison, matters: float) -> str:
    """The verdict in words: 'same within 3 %', but 'same' for counts."""
    is_within = metric.verdict == "same" and metric.unit not in ("", "bytes")
    return f"same within {100 * matters:g} %" if is_within else metric.verdict


def _kernel_rows(comparison: Comparison, head: tuple[str, ...]) -> list[str]:
    """Rows of kernels, by class and by name, that took more or less time."""
    rows = [
        (
            *_comparison_row(elided(kernel_name(name), MAX_KERNEL), metric, comparison.matters)[:-1],
            "   ".join(filter(None, (verdict_text(metric, comparison.matters), launches))),
        )
        for name, metric, launches in compared_kernels(comparison)
    ]
    return ["", *aligned([("kernels", *head[1:]), *rows])] if rows else []


# ---- names and columns, for pictures and the page too --------------------------------------------


def row_name(metric: str) -> str:
    """Name of a row in tables and pictures: step, overlap ratio, compute / step, all_gather transfer."""
    kind, op = metric_key(metric).name, metric_key(metric).operation
    if kind in KERNEL_WORDS:
        return f"{op}{KERNEL_WORDS[kind]}"
    if op:
        return f"{op} {dict((key, word) for word, key in OP_ROWS).get(kind, kind)}"
    if kind.endswith("_per_step"):
        return f"{kind.removesuffix('_per_step')} / step"
    names = {key: name for name, key in ROWS} | {key: name for name, key, _ in (*RATE_ROWS, *DEVICE_ROWS)}
    return names.get(kind, kind.removesuffix("_ms").replace("_", " "))


def elided(label: str, max_letters: int) -> str:
    """Long label with its middle left out: runs may differ at either end."""
    if len(label) <= max_letters:
        return label
    half = (max_letters - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


def device_text(judged: Run) -> str:
    """'2 x NVIDIA H200', or the number of ranks alone where the device is not known."""
    names, num = device_names(judged), len(judged.ranks)
    return f"{num} x {names}" if names else counted(num, "rank")


def device_names(judged: Run) -> str:
    """Names of the devices, each once; '' if run.json does not tell them."""
    names = dict.fromkeys(str(row["name"]) for row in judged.noted.devices if row.get("name"))
    return " / ".join(names)


def aligned(rows: Sequence[tuple[str, ...]], *, left: bool = False) -> list[str]:
    """Names to the left, numbers to the right (texts to the left), remarks last and free."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:-1], widths[1:], strict=True):
            cells.append(cell.ljust(width) if left else cell.rjust(width))
        lines.append("   ".join([*cells, row[-1]]).rstrip())
    return lines


def _ms(value: float | None) -> str:
    return quantity(value, "ms")
