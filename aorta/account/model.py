"""Data model of a report: every output (summary.json, table, pictures, page) is made from it.

Report > Dataset (one label) > Run (one folder or trace set) > arrays [rank, step]. The arrays hold sums only;
spans and collectives of single steps stay on disk and are read again with Run.records.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.cause import Cause
from aorta.records.schema import NOTHING_NOTED, CallSites, RunRecord, StepRecord
from aorta.records.stacks import Stacks
from aorta.records.table import StepTable
from aorta.records.workers import WorkerChunk
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.types import Source

if TYPE_CHECKING:  # readers of traces take long to import
    from aorta.traces.inventory import Inventory

Value = TypeVar("Value")
P = ParamSpec("P")

DAMAGED = "damaged or missing"
"""Begins what is said of a damaged run before all its numbers."""
MOST_DAMAGED = 4
"""Damaged files, and missing ranks, that it names."""

Progress = Callable[[str, int, int], None]
"""Called with the name of what is being read, the number of parts read, and the number of all parts."""

Verdict = Literal["better", "worse", "different", "same", "cannot tell", "not judged"]
"""Verdict on the candidate. different: the metric changed, but neither direction is better. same: within what
matters, whatever the rest of the interval."""

Direction = Literal["lower", "higher", "neither"]
"""Direction in which a metric gets better."""


class Statistic(msgspec.Struct, frozen=True):
    """A metric over the judged steps; of several runs, the mean of the runs' numbers (min, max: the
    least and the greatest)."""

    median: float | None
    """Median over ranks of each rank's median over steps."""
    p95: float | None
    """Median over ranks of each rank's 95th percentile over steps."""
    min: float | None
    """Least of the ranks' medians."""
    max: float | None


class CollectiveKind(msgspec.Struct, frozen=True):
    """Collectives of one kind in a run: same operation, size, type and group size.

    Arrays are [rank, step], of the steps whose details every rank kept. Times are means over the
    collectives of a step, NaN where it has none or one was not measured.
    """

    op: str
    bytes: int | None
    """Bytes of each call; None if an operation has many sizes, which then form one kind."""
    dtype: str
    num_ranks: int | None
    stream: str
    """Stream that they ran on, as in CollectiveRecord."""
    count: Floats
    """NaN in every step of a rank that never has this kind."""
    duration_ms: Floats
    """Time from a rank's own start to its end, waiting for late ranks included."""
    wait_ms: Floats
    """Part of the duration until the last rank arrived; NaN where ranks were not matched."""
    transfer_ms: Floats


class CollectiveRow(msgspec.Struct, frozen=True):
    """A CollectiveKind in the judged steps.

    Times are the mean over those of a step, then each rank's median over steps, then the median over
    ranks.
    """

    op: str
    bytes: int | None
    dtype: str
    num_ranks: int | None
    stream: str
    count_per_step: float
    """Calls of one rank in a step, the mean over the judged steps whose details were kept."""
    duration_ms: float | None
    duration_min_ms: float | None
    """The least of the ranks' medians, as duration_max_ms the greatest."""
    duration_max_ms: float | None
    wait_ms: float | None
    transfer_ms: float | None
    busbw_gb_s: float | None
    """Bus bandwidth from transfer_ms if known, else from duration_ms."""


NamedSpan = tuple[float, float, str]
"""Start and end in ms from the start of the step's window, and a name."""


class CallWaits(msgspec.Struct, frozen=True):
    """The matched collectives of one rank, in order of their starts."""

    start_ns: Ints
    """Starts on the rank's own clock."""
    wait_ms: Floats
    """Time until the last rank of the group arrived."""

    def wait_ms_of(self, start_ns: int) -> float | None:
        """The wait of the collective that starts then, up to rounding; None where it was not matched."""
        place = int(np.searchsorted(self.start_ns, start_ns))
        neighbours = [i for i in (place - 1, place) if 0 <= i < len(self.start_ns)]
        nearest = min(neighbours, key=lambda i: abs(int(self.start_ns[i]) - start_ns), default=None)
        if nearest is None or abs(int(self.start_ns[nearest]) - start_ns) > ROUNDING_NS:
            return None
        return float(self.wait_ms[nearest])


ROUNDING_NS = 3
"""Tolerance for a start that was converted to milliseconds and back."""


class Arrivals(msgspec.Struct, frozen=True):
    """Ranks that came last to collectives of all ranks of a group. Arrays are [rank, step]."""

    num_last: NDArray[np.integer[Any]]
    """Collectives in which the rank came last, by more than the clocks may be off."""
    num_judged: NDArray[np.integer[Any]]
    """Collectives of the rank that were matched on all ranks of their group."""
    caused_ms: Floats
    """Time that the rank cost each of the others: their mean wait, summed over the collectives in which it
    came last."""
    exposed_ms: Floats
    """Waits of the rank that nothing hides; NaN where they are not known."""
    waits: dict[int, CallWaits]
    """Per rank."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one attempt, or of the whole run. The parts add up to elapsed_s."""

    attempt: int | None
    """None: all attempts."""
    elapsed_s: float
    """From the attempt's start to the start of the next one; of the last one to its end."""
    counted_s: float
    """In steps that count: done once, or for the last time."""
    redone_s: float
    """In steps that were done again later."""
    start_up_s: float
    """Before the first step."""
    checkpoint_s: float
    evaluation_s: float
    """Between steps and in announced pauses."""
    hang_s: float
    """From the last step to the end of an attempt that hung."""
    restart_s: float
    """From the end of an attempt to the start of the next one."""
    other_s: float
    """From the last step to the end of an attempt that did not hang: the step that was lost, closing."""
    num_counted: int
    num_redone: int


class Run(msgspec.Struct, frozen=True):
    """The steps of one run that every rank recorded, by one source, with the warm-up told apart once it is
    judged."""

    label: str
    path: Path
    """The folder or file that was read."""
    source: Source
    ranks: list[int]
    global_step: Ints
    """Global step of each column of every metric."""
    start_unix_ns: Ints
    """[rank, step]: start of the step's window."""
    metrics: MutableMapping[str, Floats]
    """[rank, step]; NaN where it was not measured. Of a large run read from a file when they are asked for,
    and read only. aorta.account.metrics.METRICS, and per operation comm_ms.<op>, exposed_ms.<op>,
    duration_ms.<op>, wait_ms.<op>, transfer_ms.<op>, busbw_gb_s.<op>, count.<op>, bytes.<op>."""
    num_collectives: Ints
    """[rank, step]"""
    host_bound: Floats
    """[rank, step]: 1, 0, or NaN where it is not known."""
    has_details: Flags
    """[step]: every rank kept segments and collectives of it."""
    has_collectives: Flags
    """[step]: every rank kept its collectives; lines of kernel records have segments more rarely."""
    left_out: Flags
    """[step]: the overhead left it out, so that the source has no times of its own in it."""
    totals: dict[int, dict[str, float | int | None]]
    """Per rank the fields of aorta.timeline.types.Total, over everything that was read."""
    collectives: list[CollectiveKind]
    records: Callable[[int], Iterator[StepRecord]]
    """Reads one rank's records again, one at a time, of this source, in order of the file."""
    record: RunRecord | None
    """run.json; None where there is none (traces)."""
    not_measured: dict[str, str]
    notes: list[str]
    """Notes that a reader must know: left-out lines, missing run.json, quality of a trace."""
    story: list[str] = msgspec.field(default_factory=list)
    """Lines on how the run ended and was restarted, shown before any number; empty for traces and for a
    run that simply finished."""
    damage: str | None = None
    """First line of the story of a run of which only what is left could be read."""
    goodput: list[Goodput] = msgspec.field(default_factory=list)
    """Time that counted and time that did not: of all attempts together, then of each. Empty for traces."""
    clock_offset_ns: dict[int, int] = msgspec.field(default_factory=dict)
    """Per rank what is added to its times to bring the ranks together; empty where nothing was."""
    clock_residual_us: float | None = None
    """Largest disagreement of the ranks' clocks then, by the ends of collectives; None if unknown."""
    arrivals: Arrivals | None = None
    """Who came last to collectives; None if ranks were not matched."""
    kernels: Callable[[int], Iterator[tuple[int, list[NamedSpan]]]] | None = None
    """Reads one rank's kernels again, step by step: the global step, and the kernels in its window that are
    not communication. None where the source does not name kernels."""
    inventories: "Sequence[Inventory]" = ()
    """Of the ranks of a trace, where operators were asked for."""
    possible_comm_ms: dict[str, float] = msgspec.field(default_factory=dict)
    """CommEvidence.possible_ms (aorta.account.load.evidence)."""
    updates: bool = False
    """Whether a trace has kernels of an optimizer."""
    libraries: frozenset[str] = frozenset()
    """What runs the program of a trace, as its ranges tell: ddp, server."""
    optimizers: tuple[str, ...] = ()
    """Of a trace, the one in which its hosts are longest first."""
    host_parts: Mapping[str, Floats] = msgspec.field(default_factory=dict)
    """[rank, step]: columns of account/load/rank/host.py; empty where records do not tell."""
    stacks: Callable[[int], Stacks] | None = None
    """Reads the stacks that were sampled in one rank's process; empty where none were."""
    workers: Callable[[int], list[WorkerChunk]] | None = None
    """Reads what the workers of one rank's DataLoaders did; empty where nobody looked."""
    sites: Callable[[int], CallSites | None] | None = None
    """Reads who issues the collectives of one rank; None where nobody looked."""
    columns: Callable[[int], Iterator[StepTable]] | None = None
    """Reads the numbers of one rank's records again, many records at a time; None where records must do."""
    other_sources: dict[str, "Run"] = msgspec.field(default_factory=dict)
    """The same run seen by another source, for other steps or the same; never mixed in."""

    num_warmup: int = 0
    """Steps at the beginning that are not judged (aorta.account.judge.judged), 0 of a run as it was read."""
    warmup_rule: str = ""
    """The rule in words."""
    statistics: dict[str, Statistic] = msgspec.field(default_factory=dict)
    """Per metric over the judged steps; of a run as it was read empty, as collective_rows."""
    collective_rows: list[CollectiveRow] = msgspec.field(default_factory=list)
    """Collectives of the judged steps, those that take most time first."""
    part_of: "Run | None" = None
    """Of which these are some of the steps; None where they are all."""
    _results: dict[Any, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "_results", {})  # a changed copy has results of its own

    @property
    def noted(self) -> RunRecord:
        """run.json; of a run without, one in which nothing is noted."""
        return self.record or NOTHING_NOTED

    @property
    def whole(self) -> "Run":
        """With all steps that were read."""
        return self.part_of or self

    @property
    def num_steps(self) -> int:
        """With the warm-up."""
        return len(self.global_step)

    @property
    def num_judged(self) -> int:
        return self.num_steps - self.num_warmup

    @property
    def judged_steps(self) -> slice:
        """Columns of the judged steps in every array."""
        return slice(self.num_warmup, None)

    def values(self, metric: str) -> Floats:
        """[rank, step] of the judged steps."""
        return self.metrics[metric][:, self.judged_steps]

    def mean_of(self, metric: str) -> float | None:
        """Over ranks and judged steps that have it; None where none has."""
        return self._mean(self.metrics, metric)

    def mean_of_host(self, part: str) -> float | None:
        """The same of a column of what the host did."""
        return self._mean(self.host_parts, part)

    def _mean(self, arrays: Mapping[str, Floats], name: str) -> float | None:
        values = arrays[name][:, self.judged_steps] if name in arrays else np.zeros(0)
        return float(np.nanmean(values)) if np.isfinite(values).any() else None


def once_of_run(compute: Callable[Concatenate[Run, P], Value]) -> Callable[Concatenate[Run, P], Value]:
    """The function, whose result for a run (and what else it is given) the run keeps: outputs ask again."""

    @wraps(compute)
    def kept(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> Value:
        key = (compute, *args, *kwargs.values())
        if key not in run._results:
            run._results[key] = compute(run, *args, **kwargs)
        result: Value = run._results[key]
        return result

    return kept


class Dataset(msgspec.Struct, frozen=True):
    """The runs that share a label: usually one, or several of the same job."""

    label: str
    runs: list[Run]
    statistics: dict[str, Statistic]
    """Per metric over all runs; those of the run where there is one. Names are those of Run.metrics,
    whatever leads."""

    @property
    def source(self) -> Source:
        """Source of the steps, the same for all runs of a dataset."""
        return self.runs[0].source

    @property
    def first(self) -> Run:
        """The run that pictures and timelines show."""
        return self.runs[0]


class ConfidenceInterval(msgspec.Struct, frozen=True, array_like=True):
    """A 95 % interval."""

    low: float
    high: float


class MetricComparison(msgspec.Struct, frozen=True):
    """Comparison of one metric of the candidate with the reference."""

    name: str
    reference: float | None
    candidate: float | None
    ratio: float | None
    """candidate / reference of steps taken together, so that it may differ from that of the medians."""
    interval: ConfidenceInterval | None
    """Interval of the ratio, on a log scale. None for what may be 0, and where it would tell nothing."""
    verdict: Verdict
    reason: str
    """Why it is not judged, or what to know about the verdict; may be ''."""
    unit: str
    """ms, GB/s, bytes, or '' (a ratio or a count)."""
    direction: Direction = msgspec.field(name="better")
    difference: float | None
    """candidate - reference, in unit."""
    difference_interval: ConfidenceInterval | None
    p_value: float | None
    """p-value of this metric alone."""
    p_adjusted: float | None
    """Of parts of the step, after allowing for all of them (Holm); of the main metric as p_value."""


class Part(msgspec.Struct, frozen=True):
    """A part of the typical step of both sides, in ms."""

    name: str
    """A cell of the account, or step: each ms of a step is in one cell."""
    reference_ms: float
    candidate_ms: float
    difference_ms: float
    interval: ConfidenceInterval | None
    """Interval of the difference."""


class PhaseChange(msgspec.Struct, frozen=True):
    title: str
    part: Part
    line: str
    """Of the program, where most of the phase is; '' where it is not known."""


class StepWork(msgspec.Struct, frozen=True):
    """Tokens of a step per GPU, which are not the same on both sides."""

    reference: float
    candidate: float

    @property
    def ratio(self) -> float:
        """candidate / reference"""
        return self.candidate / self.reference


class Decomposition(msgspec.Struct, frozen=True):
    """Sources of the change that is judged, by cell of the account. They add up to it exactly."""

    step: Part
    parts: list[Part]
    estimator: str
    """What the numbers are of, in words."""
    notes: list[str]
    of_work: str = ""
    """The work for which the candidate's times are given, if the work of a step differs."""
    phases: list[PhaseChange] = []
    """The same step by what the host does; they add up to it, too."""
    is_net: bool = False
    """Without the time in which others had the cores, which the ratio allows for."""


class SettingDifference(msgspec.Struct, frozen=True):
    """A setting, version, device or environment variable; None where a side lacks it."""

    group: str
    """config, model, layout, versions, devices, environment, variables or run."""
    name: str
    reference: str | None
    candidate: str | None


class Comparison(msgspec.Struct, frozen=True):
    reference: str
    candidate: str
    headline: str
    """The answer in one line."""
    scope: str
    """Scope of the verdict: these two runs only, or runs like these."""
    differences: list[SettingDifference]
    """Settings that differ, the most telling first."""
    metrics: dict[str, MetricComparison]
    num_judged: int
    """Metrics that have a verdict by their noise."""
    decomposition: Decomposition | None
    notes: list[str]
    """Differing sources, few steps, method."""
    main: str = "step_ms"
    """The metric that answers the question: work per time where the work of a step differs."""
    work: StepWork | None = None
    """Work of a step on both sides if it differs; None if it is the same, or unknown."""
    matters: float = 0.03
    """The smallest change that matters, as a part."""
    is_described: bool = True
    """Every run has its run.json: what is not among the differences is the same."""


class WhatIfLine(msgspec.Struct, frozen=True):
    """A change, and what a replay of the traced steps says of it."""

    change: str
    """The change in the words of aorta why --if."""
    step_ms: float
    """Step without the change."""
    predicted_ms: float
    interval_ms: tuple[float, float]
    next_text: str
    """The longest part of the critical path then."""


class WhatIfs(msgspec.Struct, frozen=True):
    """What-ifs of a run, the largest gain first."""

    lines: list[WhatIfLine]
    empty_text: str = ""
    """Why there is none."""
    command: str = ""
    note: str = ""
    """What is missing of the traces; '' where nothing is."""


class Causes(msgspec.Struct, frozen=True):
    """Causes of a run, the largest first."""

    listed: list[Cause]
    unexplained_ms: dict[str, float] = {}
    """By cell of the account that holds a loss, what no cause takes of the mean step; the largest first."""
    cannot_tell: list[str] = []
    """Sentences that stand for what contradicts itself: mistakes of aorta's."""
    no_loss: list[str] = []
    """Sentences of what takes time, and no change mends in the usual step."""
    leaves_cores: bool = False
    """One of these is of cores that the program itself leaves out, maybe for a reason."""
    empty_text: str = ""
    """Text to show if there is none."""
    whatifs: WhatIfs | None = None
    """What-ifs of the run's traces; None if it has none."""
    title: str = ""
    """'RUN: a step takes 138 ms (mean of 60 judged steps, ...)'"""
    notes: list[str] = []
    """What no cause explains, and what lies outside of the judged steps, in sentences."""

    @property
    def late_rank(self) -> int | None:
        """The rank that the others wait for most."""
        return next((cause.rank for cause in self.listed if cause.is_waited_for), None)


class Report(msgspec.Struct, frozen=True):
    datasets: dict[str, Dataset]
    """Datasets by label, in the order given."""
    comparison: Comparison | None
    summary: dict[str, Any]
    """Content of summary.json."""
    causes: dict[str, Causes] = msgspec.field(default_factory=dict)
    """Causes by label; empty if the report was made without looking for them."""

    @property
    def reference(self) -> Dataset | None:
        return self.datasets[self.comparison.reference] if self.comparison else None

    @property
    def candidate(self) -> Dataset | None:
        return self.datasets[self.comparison.candidate] if self.comparison else None
