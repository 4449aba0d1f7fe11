"""What the host did in each step, apart from one another: columns that causes are made from.

Spans of the host nest (a collection of garbage within a backward pass): each ms counts for the innermost
kind. What lies behind the body of a step delays the next one and has columns of its own.
"""

import numpy as np

from aorta.account.metrics import CORES
from aorta.account.rows import ratio
from aorta.records.schema import HOST_KINDS, HostKind
from aorta.records.table import HostSpans, StepTable
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.row_intervals import (
    NONE,
    RowIntervals,
    clip,
    concat,
    intersect,
    lengths_ms,
    subtract,
    union,
)

PREFIX = "host."
AFTER = ".after"
IDLE = "host.idle."
"""Device idle while the host did this; OTHER: in the body, while it did none of the kinds."""
BETWEEN = "between_steps"
"""Behind the body, in none of the kinds."""
OTHER = "other"
BEHIND_UPDATE = "host.behind_update"
"""ms from the end of the last optimizer to the end of the window."""
BYTES = "host.optimizer_bytes"
BEHIND_WAITS = "host.behind_waits"
"""ms by which the device would be ahead at its last collective, had no rank been late; of matched ranks."""
BEHIND_EXPOSED = "host.behind_exposed"
"""The same, had exposed communication taken no time."""
CPU = "host.use.cpu"
"""ms of a core that the thread which trains had, in the whole window."""
READY = "host.use.ready"
"""ms in which it was ready to run and others had the cores."""
FAULTS, SYSTEM = "host.use.faults", "host.use.system"
"""Its minor faults in the window, and ms of CPU time in the system; of recorded steps alone."""
INNERMOST_FIRST: tuple[HostKind, ...] = (
    "garbage_collection",
    "synchronisation",
    "checkpoint",
    "data",
    "pause",
    "optimizer",
    "backward",
)
NEVER_IDLE: frozenset[HostKind] = frozenset(("synchronisation", "backward"))
"""Kinds in which the device does not idle: it works while the host waits for it, and backward is the work. A
wait has a column of idle device all the same: what it costs behind it."""
UNTIL_BACKWARD, UNTIL_UPDATE = "host.until.backward", "host.until.update"
"""ms from the step's start to the start of its last backward pass, and of its first optimizer."""
LOOPS = "host.loops_of_waits"
"""ms from the first to the last of many waits in a row."""
IDLE_BEHIND = "host.idle.behind_update"
"""Of idle OTHER, what comes behind the last optimizer."""
LOOP = 8
"""Waits in a row, from which on they are a loop over many values."""
REASON = "host_spans."
"""Start of the names in not_measured of kinds that a source does not see."""


def host_metrics(block: StepTable) -> dict[str, Floats]:
    """Columns of the lines of one source, NaN in those that do not tell.

    host.<kind>: ms in the body without exposed communication; host.<kind>.after: ms behind it;
    host.between_steps: ms behind it in no span and without exposed communication;
    host.idle.<kind>: ms of idle device, where the line has segments and there is a device, also for BETWEEN
    and OTHER; host.use.*: what the thread had of the cores, CORES: its process. A kind for which lines give
    a reason (host_spans.<kind> in not_measured) has no columns.
    """
    window_ms = block.numbers("step_ms")
    is_noted = block.has("host_spans")
    if window_ms is None or not is_noted.any():
        return _use(block)
    metrics: dict[str, Floats] = {}
    is_noted &= np.isfinite(window_ms)
    between_ms = block.numbers("between_steps_ms")
    body_ms = window_ms - (0.0 if between_ms is None else np.fmax(between_ms, 0.0))
    num = len(block)
    no_time = np.zeros(num)
    on_device = block.source != "host"
    exposed, busy, has_segments = _segments(block, is_noted)
    unseen = {name.removeprefix(REASON) for name in set().union(*block.reasons) if name.startswith(REASON)}
    tells_idle = is_noted & has_segments & on_device
    host_spans = block.host_spans()
    plain = _plain_rows(host_spans, is_noted & ~has_segments)
    inside_ms, after_ms = _plain_sums(host_spans, plain, body_ms, window_ms)
    is_sparse = is_noted & ~plain
    rows = np.flatnonzero(tells_idle)
    left = subtract(union(RowIntervals(rows, no_time[rows], window_ms[rows])), busy)
    waits, loops = NONE, _loops_of_waits(host_spans, is_noted)
    none, no_idle = (np.where(is_known, 0.0, np.nan) for is_known in (is_noted, tells_idle))
    covered = NONE
    for kind in INNERMOST_FIRST:
        if kind in unseen:
            continue
        idles = kind not in NEVER_IDLE and bool(tells_idle.any())
        of_kind = _of_kind(host_spans, kind, is_sparse)
        in_body_ms, behind_ms = (none + sums[:, HOST_KINDS.index(kind)] for sums in (inside_ms, after_ms))
        if not len(of_kind):
            metrics[f"{PREFIX}{kind}"] = in_body_ms
            metrics[f"{PREFIX}{kind}{AFTER}"] = behind_ms
            if idles:
                metrics[f"{IDLE}{kind}"] = no_idle
            continue
        of_kind = union(of_kind)
        waits = of_kind if kind == "synchronisation" else waits
        spans = subtract(of_kind, covered)  # without what an inner kind has
        covered = union(concat(covered, of_kind))
        inside = clip(spans, no_time, body_ms)
        metrics[f"{PREFIX}{kind}"] = in_body_ms + lengths_ms(
            inside if on_device else subtract(inside, exposed), num
        )
        metrics[f"{PREFIX}{kind}{AFTER}"] = behind_ms + lengths_ms(clip(spans, body_ms, window_ms), num)
        if idles:
            metrics[f"{IDLE}{kind}"] = no_idle + lengths_ms(intersect(left, spans), num)
            left = subtract(left, spans)
    windows = RowIntervals(np.flatnonzero(is_sparse), *_windows(is_sparse, window_ms))
    tails = subtract(clip(union(windows), body_ms, window_ms), covered)
    seen = [HOST_KINDS.index(kind) for kind in INNERMOST_FIRST if kind not in unseen]
    rest_ms = np.where(plain, window_ms - body_ms - after_ms[:, seen].sum(axis=1), 0.0)
    metrics[f"{PREFIX}{BETWEEN}"] = (
        none + np.maximum(rest_ms, 0.0) + lengths_ms(subtract(tails, exposed), num)
    )
    if tells_idle.any():
        behind = clip(left, body_ms, window_ms)
        metrics[f"{IDLE}{BETWEEN}"] = no_idle + lengths_ms(behind, num)
        left = subtract(left, behind)
        behind_waits_ms = np.maximum(_behind_waits(left, waits, num), lengths_ms(intersect(left, loops), num))
        if "synchronisation" not in unseen:
            metrics[f"{IDLE}synchronisation"] = no_idle + behind_waits_ms
        metrics[f"{IDLE}{OTHER}"] = no_idle + np.maximum(lengths_ms(left, num) - behind_waits_ms, 0.0)
        metrics[LOOPS] = no_idle + lengths_ms(loops, num)
    passes = _of_kind(host_spans, "backward", is_noted)
    if len(passes):
        metrics[UNTIL_BACKWARD] = _of_each_row(np.maximum, passes.row, passes.start, num)
    updates = _of_kind(host_spans, "optimizer", is_noted)
    if len(updates):
        ends = _of_each_row(np.maximum, updates.row, updates.end, num)
        metrics[UNTIL_UPDATE] = _of_each_row(np.minimum, updates.row, updates.start, num)
        metrics[BEHIND_UPDATE] = np.maximum(window_ms - ends, 0.0)
        if tells_idle.any():
            rest = subtract(left, loops)
            behind_ms = lengths_ms(clip(rest, np.where(np.isfinite(ends), ends, window_ms), window_ms), num)
            metrics[IDLE_BEHIND] = np.where(np.isfinite(ends), no_idle + behind_ms, np.nan)
    num_bytes = np.where(is_noted, host_spans.optimizer_bytes, np.nan)
    if np.isfinite(num_bytes).any():
        metrics[BYTES] = num_bytes
    return metrics | _use(block)


def reason_name(name: str) -> str:
    """The name that a run has for a name in a record's not_measured: the last part, or host.<kind>."""
    return f"{PREFIX}{name[len(REASON) :]}" if name.startswith(REASON) else name.rpartition(".")[2]


def _plain_rows(spans: HostSpans, rows: Flags) -> Flags:
    """Those of the rows in which each span is over before the next one starts."""
    plain = rows.copy()
    plain[spans.row[spans.meets]] = False
    return plain


def _plain_sums(spans: HostSpans, plain: Flags, body_ms: Floats, window_ms: Floats) -> tuple[Floats, Floats]:
    """[row, kind]: ms in the body of plain rows, and behind it; intervals need no arithmetic there."""
    chosen = plain[spans.row] & (spans.kind >= 0)
    row, shape = spans.row[chosen], (len(plain), len(HOST_KINDS))
    start, end = spans.start_ms[chosen], spans.end_ms[chosen]
    place = row * shape[1] + spans.kind[chosen]
    body_ms, window_ms = body_ms[row], window_ms[row]

    def sums(low: Floats, high: Floats) -> Floats:
        lengths = np.maximum(np.clip(end, low, high) - np.clip(start, low, high), 0.0)
        return np.bincount(place, lengths, plain.size * shape[1]).reshape(shape).astype(np.float64)

    return sums(np.zeros(len(row)), body_ms), sums(body_ms, window_ms)


def _windows(is_noted: Flags, window_ms: Floats) -> tuple[Floats, Floats]:
    """Starts and ends of the windows of noted lines."""
    ends = window_ms[is_noted]
    return np.zeros(len(ends)), ends


def _use(block: StepTable) -> dict[str, Floats]:
    """Columns that no line has are left out."""
    step_ms, process_ms = block.numbers("step_ms"), block.numbers("host_use.process_ms")
    columns = {
        CPU: block.numbers("host_use.cpu_ms"),
        READY: block.numbers("host_use.ready_ms"),
        FAULTS: block.numbers("host_use.faults"),
        SYSTEM: block.numbers("host_use.system_ms"),
        CORES: None if step_ms is None or process_ms is None else ratio(process_ms, step_ms),
    }
    return {name: np.maximum(values, 0.0) for name, values in columns.items() if values is not None}


def _behind_waits(left: RowIntervals, waits: RowIntervals, num_rows: int) -> Floats:
    """ms of `left`, idle time that is nothing else's, that the waits of the same row cost. Both are
    normalised.

    The host would be ahead by as much as it has waited so far: idle time uses that up as it comes.
    """
    used_ms = np.zeros(num_rows)
    if not len(left) or not len(waits):
        return used_ms
    waited_ms, idle_ms = waits.end - waits.start, left.end - left.start
    waited_before, idle_before = (np.concatenate(([0.0], np.cumsum(ms))) for ms in (waited_ms, idle_ms))
    # The wait of the row that began last before each end of idle time; width keeps rows apart.
    width = 2 * max(float(np.abs(times).max()) for times in (waits.start, waits.end, left.end)) + 1
    place = np.searchsorted(waits.row * width + waits.start, left.row * width + left.end, side="right") - 1
    since_start = np.minimum(left.end - waits.start[place], waited_ms[place])
    waited = waited_before[place] + since_start - waited_before[np.searchsorted(waits.row, left.row)]
    waited = np.where((place >= 0) & (waits.row[place] == left.row), waited, 0.0)
    idle = idle_before[1:] - idle_before[np.searchsorted(left.row, left.row)]
    # used = min(used + idle, waited), from one stretch of idle time to the next
    room = waited - idle
    apart = left.row * (np.ptp(room) + 1)
    least = np.minimum.accumulate(room - apart) + apart
    is_last = np.append(left.row[1:] != left.row[:-1], True)
    used_ms[left.row[is_last]] = (idle + np.minimum(0.0, least))[is_last]
    return used_ms


def _loops_of_waits(spans: HostSpans, is_noted: Flags) -> RowIntervals:
    """From the first to the last of LOOP or more waits with no other span between: the host reads values one
    by one and cannot come ahead between them, so that the device idles for these waits alone."""
    is_wait = (spans.kind == HOST_KINDS.index("synchronisation")) & is_noted[spans.row]
    begins = is_wait & ~(np.append(False, is_wait[:-1]) & (np.diff(spans.row, prepend=-1) == 0))
    waits = np.flatnonzero(is_wait)
    if not len(waits):
        return NONE
    first = np.flatnonzero(begins[waits])
    last = np.append(first[1:], len(waits)) - 1
    is_loop = last - first + 1 >= LOOP
    first, last = waits[first[is_loop]], waits[last[is_loop]]
    return union(RowIntervals(spans.row[first], spans.start_ms[first], spans.end_ms[last]))


def carry_waits(metrics: dict[str, Floats], global_step: Ints) -> None:
    """Let the next step's idle time use up what a step's own leaves of its waits: the host is ahead across
    steps. Rows are in order of steps."""
    behind, other = (metrics.get(f"{IDLE}{name}") for name in ("synchronisation", OTHER))
    if behind is None or other is None or len(global_step) < 2:
        return
    waited = metrics[f"{PREFIX}synchronisation"] + metrics[f"{PREFIX}synchronisation{AFTER}"]
    unused = np.fmax(waited - behind, 0.0)
    more = np.minimum(np.where(np.diff(global_step) == 1, unused[:-1], 0.0), other[1:])
    behind[1:] += more
    other[1:] -= more


def _of_kind(spans: HostSpans, kind: HostKind, is_noted: Flags) -> RowIntervals:
    chosen = (spans.kind == HOST_KINDS.index(kind)) & is_noted[spans.row]
    return RowIntervals(spans.row[chosen], spans.start_ms[chosen], spans.end_ms[chosen])


def _of_each_row(of: np.ufunc, row: Ints, values: Floats, num: int) -> Floats:
    """[row]: the largest or least of its values, NaN where it has none. Rows are in order."""
    result = np.full(num, np.nan)
    first = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    result[row[first]] = of.reduceat(values, first)
    return result


def _segments(block: StepTable, is_noted: Flags) -> tuple[RowIntervals, RowIntervals, Flags]:
    """Exposed communication, whatever is active, and which lines kept their segments."""
    segments = block.segments()
    is_busy = np.array([bool(active) for active in segments.sets], dtype=bool)
    is_exposed = is_busy & np.array(
        [not {"compute", "copy"} & {*active} for active in segments.sets], dtype=bool
    )
    spans = RowIntervals(segments.row, segments.start_ms, segments.end_ms)
    is_counted = is_noted[segments.row]
    exposed, busy = (
        union(spans.chosen(is_counted & of_set[segments.active])) for of_set in (is_exposed, is_busy)
    )
    return exposed, busy, block.has("active_segments") & is_noted
