"""How a trace is read, and cut where it marks no steps: by a kernel that begins each, or by what repeats.

The device's own sequence of kernels is cut. A step begins with its first kernel, and holds the work that
starts before the next step begins.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.timeline.arrays import Ints
from aorta.timeline.intervals import distinct
from aorta.timeline.overlap import on_compute_stream
from aorta.timeline.types import Kind
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.model import RankTrace, listed_names

if TYPE_CHECKING:
    from aorta.traces.sources import Source


FEWEST_STEPS = 3
"""Fewest repetitions that make a period."""
REPEATS = 0.95
"""Share of the kernels whose name must come again a period later for the period to be clear."""
AS_GOOD = 0.01
"""Difference of that share within which the shorter of two periods is taken."""
MOST_PERIODS = 64
"""Candidates for the period that are tried."""
OPTIMIZER = re.compile(r"adam|sgd|lamb(?!da)|optimizer|multi_tensor", re.IGNORECASE)
"""Kernels of optimizers: what repeats with them is a step, whatever else the trace holds."""
WHOLE = 0.95
"""Share of a usual step's kernels that the last one needs to count."""


@dataclass(frozen=True, slots=True)
class StepRule:
    """The user's choice of how a trace without marks is cut into steps."""

    kernel: str | None = None
    """Part of the name of the kernel that begins a step; None: what repeats clearly, if anything does."""
    period: int | None = None
    """Kernels of the compute stream in a step; with `kernel`: occurrences of it in a step (None: 1)."""
    is_off: bool = False
    """True: the whole window is one step, whatever repeats or is marked."""


def with_steps(trace: RankTrace, rule: StepRule) -> RankTrace:
    """The trace, cut into steps where it has no marks or the rule asks for it.

    Unchanged where nothing repeats clearly. Raises TraceError where the rule asks for what is not there.
    """
    is_asked = rule.kernel is not None or rule.period is not None
    if rule.is_off:
        return _cut(trace, [], "") if trace.steps else trace
    if trace.steps and not is_asked:
        return trace
    order = _compute_kernels(trace)
    name = trace.timeline.name[order].astype(np.int64)
    if rule.kernel is not None:
        starts = _places_of(trace, name, rule.kernel)[:: rule.period or 1]
        rule_text = f"a kernel with {rule.kernel!r} in its name" + (
            f", each {rule.period}." if rule.period else ""
        )
    else:
        period = rule.period or _period_of_steps(trace, name)
        if period is None:
            return trace
        if rule.period is not None and len(name) < 2 * period:
            raise TraceError(
                f"the trace has {len(name)} kernels on its compute stream: no period of {period}"
            )
        starts = _starts(trace, order, name, period)
        rule_text = f"what repeats after {period} kernels of the compute stream"
    if len(starts) < 2:
        raise TraceError(f"no step can be cut out by {rule_text}: it is there {len(starts)} times")
    last = len(name) - int(starts[-1]) >= WHOLE * float(np.median(np.diff(starts)))
    begins = trace.timeline.start_ms[order[starts]].tolist()
    edges = [*begins, trace.timeline.window_ms[1]] if last else begins
    return _cut(trace, edges, f"the trace marks no steps; {len(edges) - 1} were cut out by {rule_text}")


def _period_of_steps(trace: RankTrace, name: Ints) -> int | None:
    """The clear period, where it is one of steps.

    Layers repeat too, but in a model that does more: where kernels come more seldom than the period
    does, only an optimizer's that come in each prove it a step.
    """
    period = clear_period(name)
    if period is None:
        return None
    kernels, counts = np.unique(name, return_counts=True)
    in_each = counts >= len(name) // period - 1
    names = trace.timeline.names
    updates = (OPTIMIZER.search(names[i]) for i in kernels[in_each].tolist())
    return period if in_each.all() or any(updates) else None


def clear_period(name: Ints) -> int | None:
    """Number of kernels after which the sequence of names repeats; None where that is not clear.

    The candidates are distances between the same rare kernel: a step has some that come once in it. Layers
    repeat within a step, but less exactly than steps do.
    """
    num = len(name)
    if num < 2 * FEWEST_STEPS:
        return None
    votes: dict[int, int] = {}
    order = np.argsort(name, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(name[order])) + 1):
        if len(places) >= FEWEST_STEPS:
            gaps, counts = np.unique(np.diff(places), return_counts=True)
            for gap, count in zip(gaps.tolist(), counts.tolist(), strict=True):
                votes[gap] = votes.get(gap, 0) + count * gap  # steps that it covers
    candidates = sorted((gap for gap in votes if FEWEST_STEPS * gap <= num), key=lambda gap: -votes[gap])[
        :MOST_PERIODS
    ]
    shares = {gap: float((name[gap:] == name[:-gap]).mean()) for gap in candidates}
    best = max(shares.values(), default=0.0)
    if best < REPEATS or len(distinct(name)) < 2:
        return None
    return min(gap for gap, share in shares.items() if share >= best - AS_GOOD)


def _compute_kernels(trace: RankTrace) -> NDArray[np.intp]:
    """Kernels of the compute stream in order of their starts."""
    line = trace.timeline
    chosen = np.flatnonzero((line.kind != Kind.COPY) & on_compute_stream(line))
    return chosen[np.argsort(line.start_ms[chosen], kind="stable")]


def _places_of(trace: RankTrace, name: Ints, text: str) -> Ints:
    """Places in order of the kernels with this text in their names."""
    names = trace.timeline.names
    matching = [i for i, kernel_name in enumerate(names) if text in kernel_name]
    places: Ints = np.flatnonzero(np.isin(name, matching)).astype(np.int64)
    if len(places) == 0:
        usual = sorted({names[i] for i in name.tolist()})
        raise TraceError(
            f"no kernel of the compute stream has {text!r} in its name; it has {listed_names(usual)}"
        )
    return places


def _starts(trace: RankTrace, order: NDArray[np.intp], name: Ints, period: int) -> Ints:
    """Places in order of the kernels that begin a step.

    Every period-th one where the capture is of whole periods. Else that of the kernel which comes once in
    each period and has the longest idle time before it: between steps the device waits for the host.
    """
    line = trace.timeline
    regular = np.arange(0, len(name), period, dtype=np.int64)
    if len(name) % period == 0 and (name[regular] == name[0]).all():
        return regular
    start, end = line.start_ms[order], line.end_ms[order]
    idle = np.zeros(len(order))
    idle[1:] = np.maximum(start[1:] - np.maximum.accumulate(end)[:-1], 0.0)
    counts = np.bincount(name)
    num_steps = len(name) / period
    best, longest = regular, -1.0
    for kernel in np.flatnonzero(np.abs(counts - num_steps) <= 1).tolist():
        places = np.flatnonzero(name == kernel)
        if len(places) >= 2 and np.abs(np.diff(places) - period).max() <= 0.1 * period:
            idle_before_ms = float(np.median(idle[places]))
            if idle_before_ms > longest:
                best, longest = places.astype(np.int64), idle_before_ms
    return best


def _cut(trace: RankTrace, edges: list[float], note: str) -> RankTrace:
    """The trace with steps between the edges; without edges it has none, and loses those that it had."""
    line = trace.timeline
    step = np.searchsorted(np.array(edges), line.start_ms, side="right").astype(np.int64) - 1
    step[(step < 0) | (step >= len(edges) - 1)] = -1
    if not edges:
        step[:] = -1
    windows = list(pairwise(edges))
    collectives = []
    for collective in trace.collectives:
        position = int(np.searchsorted(edges, collective.start_ms, side="right")) - 1
        number = position if 0 <= position < len(windows) else None
        collectives.append(msgspec.structs.replace(collective, step=number))
    notes = (*trace.quality.notes, note) if note else trace.quality.notes
    return replace(
        trace,
        steps=[replace(line.select(step == i), step=i, window_ms=window) for i, window in enumerate(windows)],
        collectives=collectives,
        launch_step=step,
        quality=msgspec.structs.replace(trace.quality, notes=notes, truncated_steps=()),
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of how runs and traces are read. Travels to other processes."""

    rules: Sequence[CommRule] = COMM_RULES
    steps: StepRule = StepRule()
    operators: bool = False
    """Read who launched each kernel, too: a second reading of a trace."""
    strict: bool = True
    """Refuse a run with damaged or missing files, instead of reading what is left."""

    @no_garbage_collection()  # a trace is 1e5 objects and more, none of which refers to itself
    def read(self, source: "Source", rank: int) -> RankTrace:
        """Trace of one rank, cut into steps."""
        return with_steps(source.read(rank, rules=self.rules), self.steps)
