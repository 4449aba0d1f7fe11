"""The account of a run: where every millisecond of a step went, on every rank, once.

A step of a rank is cut into cells that exclude each other and add up to it. What the device does comes
first: computing, communicating, copying, in this order. Time in which it does nothing goes to what the host
did meanwhile, the most specific first (HOST_ORDER). On a CPU the host is the device. Aggregates are means
over the judged steps and the ranks, so that they add up as well. Whatever an output says about the parts of
a step comes from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

import numpy as np

from aorta.account.judge.contradictions import Limits, in_cells, please_report
from aorta.account.judge.judged import UNLIKE, UsualStep, looked_at, statistic, usual_step
from aorta.account.judge.outside import gaps_of, outside_of
from aorta.account.judge.overhead import Instrument, instrument_of
from aorta.account.load.rank.host import (
    AFTER,
    BEHIND_EXPOSED,
    BEHIND_WAITS,
    BETWEEN,
    CPU,
    IDLE,
    PREFIX,
    READY,
)
from aorta.account.load.waits import is_one_group
from aorta.account.model import Run, Statistic, once_of_run
from aorta.account.numbers import quantity
from aorta.account.rows import positive, ratio
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.types import Source

CellGroup = Literal["work", "communication", "copies", "host", "unknown"]


class Cell(NamedTuple):
    title: str
    meaning: str
    group: CellGroup


CELLS: dict[str, Cell] = {
    "compute": Cell("compute", "the device computes, and nothing else", "work"),
    "hidden": Cell("hidden communication", "the device computes and communicates at once", "work"),
    "transfer": Cell("transfer", "communication alone, after the last rank has come", "communication"),
    "wait": Cell("waiting for ranks", "communication alone, before the last rank has come", "communication"),
    "communication": Cell(
        "communication", "communication alone; waiting and transfer are not split", "communication"
    ),
    "copy": Cell("copies", "the device copies, and nothing else", "copies"),
    "garbage_collection": Cell("garbage collection", "Python collects garbage", "host"),
    "checkpoint": Cell("checkpoint", "the program saves a checkpoint", "host"),
    "data": Cell("data", "the host waits for the next batch", "host"),
    "pause": Cell("pause", "the program evaluates, or has announced a pause", "host"),
    "optimizer": Cell("optimizer", "Optimizer.step runs on the host", "host"),
    "between_steps": Cell("between steps", "between two step bodies, and none of the above", "host"),
    "synchronisation": Cell("synchronisation", "the host waits for the device, then launches anew", "host"),
    "launch": Cell("launches", "the host runs and has nothing queued on the device", "host"),
    "blocked": Cell("blocked", "the host's thread sleeps, in no call that is known", "host"),
    "core_taken": Cell("core taken", "the host's thread is ready to run, and others have the cores", "host"),
    "idle": Cell("idle", "the device does nothing; what the host does is not known", "host"),
    "instrument": Cell("aorta itself", "a recorded step takes longer by that, idle or on a CPU", "unknown"),
    "unrecorded": Cell(
        "longer unrecorded steps", "the run's steps take longer than those recorded by that", "unknown"
    ),
    "not_measured": Cell("not measured", "what the source has no times of", "unknown"),
}
"""Cells in the order in which they are shown."""
HOST_ORDER = ("garbage_collection", "checkpoint", "data", "pause", "optimizer", "between_steps")
"""Of idle time, the first that holds has it; synchronisation, blocked, core taken and launches follow."""
LOSSES = tuple(name for name, cell in CELLS.items() if cell.group not in ("work", "unknown"))
IDLE_CELLS = tuple(name for name, cell in CELLS.items() if cell.group == "host")
BUSY = 0.9
"""Of a step, from which on a device is."""
EXPOSED_CELLS = ("transfer", "wait", "communication")
HOST_PARTS = ("garbage_collection", "checkpoint", "data", "pause")
"""Kinds of spans of the host that are losses as a whole."""
SPAN_KINDS = (*HOST_PARTS, "optimizer")
INFLATED = ("between_steps", "compute", "blocked", "core_taken")
"""Cells of a CPU that recording makes longer, the first first."""
MAY_SLEEP = ("checkpoint", "data", "pause", "synchronisation")
"""Spans in which the host's thread may sleep."""
LARGE_SHARE = 0.1
"""Of the run's wall time outside of judged steps, from which on it is said."""
NO_HOST = "the source does not show what the host does"


@dataclass(frozen=True, slots=True)
class AccountRow:
    """A cell over the judged steps, in ms of a step."""

    name: str
    mean_ms: float
    share: float
    """Of the step."""
    least_ms: float
    """Mean over steps of the rank that has least."""
    most_ms: float


@dataclass(frozen=True, slots=True)
class Account:
    """Cells of the judged steps, [rank, step] in ms. Where few of these were recorded, cells of the recorded
    ones, made as long as the run's usual step."""

    ranks: list[int]
    global_step: Ints
    step_ms: Floats
    cells: dict[str, Floats]
    """Only cells that hold some time, or could. They add up to step_ms."""
    tails: dict[str, Floats]
    """The part of a cell that lies behind the step's body: it delays the next step."""
    exposed: "Exposed | None"
    """Exposed communication taken apart, and what of it delays the step."""
    gap_ms: float
    """What recording may have made these steps longer by, whichever cell it is in: no cause is smaller."""
    between_ms: Floats
    """Between step bodies and in no span that is known, whatever the device does then."""
    knows_host: bool
    on_device: bool
    num_judged: int
    """Judged steps of the run; more than there are columns where some were not timed, or left out."""
    gaps_ms: Floats = field(default_factory=lambda: np.zeros(0))
    """Of all judged steps, whether their times were taken or not: mean over ranks of the time after one until
    the next one began, which is in no step: an evaluation, a pause. NaN where no step came next."""
    gap_step: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The global steps behind which gaps_ms are."""
    judged_ms: float = 0.0
    """All judged steps together, mean over ranks."""
    longest_ms: float = 0.0
    """The longest judged step of any rank, whether its times were taken or not."""
    outside: dict[str, float] = field(default_factory=dict)
    """Means over ranks of the run's wall time in ms, by OUTSIDE_WORDS; judged: the judged steps. Empty where
    the run's wall time is not known."""
    usual: UsualStep | None = None
    """That the cells were brought to; None where they are of steps as they were."""
    spread: Statistic = field(default_factory=lambda: statistic(np.zeros((0, 0))))
    """Median and p95 of the steps that mean_step_ms is of, for texts beside it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why cells are not there."""
    contradiction: str = ""
    """Why none can be told, though the source has times: a mistake of aorta's."""

    @property
    def mean_step_ms(self) -> float:
        return float(self.step_ms.mean()) if self.step_ms.size else 0.0

    @property
    def statistic(self) -> Literal["mean", "median"]:
        """What mean_step_ms is of the judged steps; where few were recorded, as their usual step is told."""
        return "mean" if self.usual is None else self.usual.statistic

    @property
    def own_step_ms(self) -> float:
        """The mean step without what aorta itself takes of it."""
        return self.mean_step_ms - self.mean_ms("instrument")

    @property
    def recorded_ms(self) -> float:
        """The mean step as it was recorded, of which tables of kernels and collectives are."""
        return self.mean_step_ms if self.usual is None else self.usual.recorded_ms

    @property
    def is_of_others(self) -> bool:
        """The recorded steps are no usual ones."""
        usual = self.usual
        return usual is not None and abs(usual.recorded_ms - usual.ms) >= UNLIKE * usual.ms

    @property
    def recorded_text(self) -> str:
        """What tables that are of the recorded steps as they were are of; '' where these are usual ones."""
        steps = (
            f"{self.step_ms.shape[1]:,} recorded steps of {quantity(self.recorded_ms, 'ms')}, as they were"
        )
        return f"Operations and kernels are of {steps}." if self.is_of_others else ""

    @property
    def is_measured(self) -> bool:
        """Device and communication have times."""
        return "compute" in self.cells

    def mean_ms(self, *names: str) -> float:
        """Of one cell, or the sum of several; 0 of a cell that is not there."""
        return float(sum(self.cells[name].mean() for name in names if name in self.cells))

    def by_rank_ms(self, *names: str) -> Floats:
        """[rank]: means over steps."""
        zero = np.zeros(len(self.ranks))
        return sum((self.cells[name].mean(axis=1) for name in names if name in self.cells), start=zero)

    def share(self, *names: str) -> float:
        step = self.mean_step_ms
        return self.mean_ms(*names) / step if step > 0 else 0.0

    @property
    def comm_ms(self) -> float:
        return self.mean_ms("hidden", *EXPOSED_CELLS)

    @property
    def wall_ms(self) -> float:
        """Of the run; 0 where it is not known."""
        return sum(self.outside.values())

    @property
    def limits(self) -> Limits:
        """What a sentence on these steps may say."""
        gaps = self.gaps_ms[np.isfinite(self.gaps_ms)]
        of_ranks = self.step_ms.mean(axis=1) if self.step_ms.size else np.zeros(1)
        return Limits(
            float(of_ranks.max()),
            max(self.longest_ms, float(self.step_ms.max(initial=0.0)), float(gaps.max(initial=0.0))),
            len(self.ranks) > 1
            and any(self.cells[name].any() for name in EXPOSED_CELLS if name in self.cells),
        )

    def rows(self) -> list[AccountRow]:
        """A row for each cell with time in it, in the order of CELLS."""
        step = self.mean_step_ms
        rows = []
        for name in CELLS:
            if name in self.cells and self.cells[name].any():
                by_rank = self.by_rank_ms(name)
                mean = float(by_rank.mean())
                share = mean / step if step > 0 else 0.0
                rows.append(AccountRow(name, mean, share, float(by_rank.min()), float(by_rank.max())))
        return rows


@once_of_run
def account_of(judged: Run) -> Account:
    """Made once for a run. Of a run of many ranks and steps the last steps (looked_at)."""
    looked = looked_at(judged)
    columns = looked.judged_steps
    host = Host(looked, columns)
    step = host.metric("step_ms")
    compute, exposed = (host.metric(name) for name in ("compute_ms", "exposed_ms"))
    apart = exposed_of(looked)
    on_device, between = looked.source != "host", np.zeros_like(step)
    tails: dict[str, Floats] = {}
    instrument, usual = instrument_of(judged, looked), usual_step(judged)
    if usual is not None:
        instrument = instrument._replace(ms=min(instrument.ms, max(usual.recorded_ms - usual.ms, 0.0)))
    reasons = {"instrument": instrument.why_not} if instrument.why_not else {}
    cells: dict[str, Floats] = {}
    is_known = np.isfinite(compute) & np.isfinite(exposed) & np.isfinite(step)
    step, unknown = positive(step), np.zeros_like(step)
    if is_known.any():
        # Estimated and rounded parts may exceed the step by a little.
        compute, exposed = (np.where(is_known, positive(values), 0.0) for values in (compute, exposed))
        busy = compute + exposed
        scale = np.divide(step, busy, out=np.ones_like(step), where=busy > step)
        compute, exposed = compute * scale, exposed * scale
        rest = np.where(is_known, positive(step - compute - exposed), 0.0)
        idle = np.where(np.isfinite(host.metric("idle_ms")), rest, 0.0)
        unknown += rest - idle
        if looked.source == "events":
            bound = np.where(
                looked.host_bound[:, columns] == 1, positive(host.metric("starved_bound_ms")), 0.0
            )
            starved = np.minimum(bound, compute)
            compute, idle = compute - starved, idle + starved
        hidden = np.minimum(positive(host.metric("hidden_ms")), compute)
        if apart is not None:
            cells |= {
                "transfer": apart.transfer_ms * scale,
                "wait": apart.wait_ms * scale,
                "communication": apart.unsplit_ms * scale,
            }
        between = positive(host.metric("between_steps_ms") - sum(host.tail(kind) for kind in SPAN_KINDS))
        noted = host.part(f"{PREFIX}{BETWEEN}")
        between = between if noted is None else np.where(np.isfinite(noted), positive(noted), between)
        if on_device:
            cells |= {"compute": compute - hidden, "hidden": hidden}
            cells |= _of_device(host, idle, between, instrument)
            _late_by_recording(cells, instrument.ms)
        else:
            cells |= _of_cpu(host, compute - hidden + idle, between, step, exposed, instrument.ms)
            cells["hidden"] = hidden
            tails = {kind: np.minimum(host.tail(kind), cells[kind]) for kind in SPAN_KINDS}
            tails["between_steps"] = cells["between_steps"]
        if not looked.host_parts and "idle" in cells:
            reasons |= dict.fromkeys(IDLE_CELLS[:-1], looked.not_measured.get("host_spans", NO_HOST))
    unknown += np.where(is_known, 0.0, step)
    if unknown.any():
        cells["not_measured"] = unknown
        reasons["compute"] = looked.not_measured.get("compute_ms", f"not given by source {looked.source}")
    part = None if usual is None else _as_usual(cells, usual, looked.source, _usual_ready_ms(judged, usual))
    if part is None:
        usual = None
    else:
        step, between = np.sum([*cells.values()], axis=0), part * between
        tails = {kind: part * ms for kind, ms in tails.items()}
        apart = None if apart is None else apart.shortened(part)
    wrong = in_cells(step, cells)
    if wrong is not None:
        reasons["compute"] = please_report("where a step's time went", wrong)
        cells, tails, between = {"not_measured": step}, {}, np.zeros_like(step)
    return Account(
        ranks=looked.ranks,
        global_step=looked.global_step[columns],
        step_ms=step,
        cells={name: cells[name] for name in CELLS if name in cells},
        tails=tails,
        exposed=apart,
        gap_ms=instrument.gap_ms,
        between_ms=between,
        knows_host=bool(looked.host_parts),
        on_device=on_device,
        num_judged=judged.num_judged,
        gaps_ms=gaps_of(judged),
        gap_step=judged.global_step[judged.judged_steps],
        judged_ms=float(positive(judged.values("step_ms")).sum() / len(looked.ranks)),
        longest_ms=float(positive(judged.values("step_ms")).max(initial=0.0)),
        outside=outside_of(judged),
        usual=usual,
        spread=statistic(step if usual is None else judged.values("step_ms")[:, _is_in(judged, usual)]),
        reasons=reasons,
        contradiction=reasons["compute"] if wrong is not None else "",
    )


def is_device_busy(judged: Run) -> bool:
    """For so much of a step that who waits for it waits for its work, and loses nothing."""
    account = account_of(judged)
    return account.on_device and account.share("compute", "hidden", *EXPOSED_CELLS) >= BUSY


class Host:
    """What the records of a run tell of its host, in some columns; 0 where they do not."""

    def __init__(self, run: Run, columns: slice) -> None:
        self.parts: Mapping[str, Floats] = run.host_parts
        self._run, self._columns = run, columns

    def metric(self, name: str) -> Floats:
        """NaN where it was not measured."""
        shape = self._run.metrics["step_ms"].shape
        values = self._run.metrics[name] if name in self._run.metrics else np.full(shape, np.nan)
        return values[:, self._columns]

    def part(self, name: str) -> Floats | None:
        """A column of aorta.account.load.rank.host; None where no line has it."""
        return self.parts[name][:, self._columns] if name in self.parts else None

    def span(self, kind: str) -> Floats:
        """In the step's body."""
        values = self.part(f"{PREFIX}{kind}")
        return np.zeros_like(self.metric("step_ms")) if values is None else positive(values)

    def tail(self, kind: str) -> Floats:
        """Behind the body."""
        return self.span(f"{kind}{AFTER}")

    @property
    def num_kernels(self) -> Floats | None:
        """Kernels and copies of a step; None where nobody counted them."""
        counts = [self.metric(name) for name in self._run.metrics if name.startswith("kernel_count.")]
        return positive(np.sum(counts, axis=0)) if counts else None

    @property
    def use(self) -> tuple[Floats, Floats] | None:
        """Of the cores, by the thread that trains: ms that it ran, ms that it was ready to run while others
        had them. None where more than half of the steps lack either."""
        columns = [self.part(name) for name in (CPU, READY)]
        present = [
            positive(values) for values in columns if values is not None and np.isnan(values).mean() <= 0.5
        ]
        return (present[0], present[1]) if len(present) == 2 else None

    def asleep(self, between: Floats) -> Floats:
        """Of a step on a device, what the host's thread slept in no span in which it may, whatever the device
        did meanwhile. between: between step bodies."""
        asleep = np.zeros_like(between)
        if self.use is not None:
            # Backward passes are launched by a thread of autograd, for which this one sleeps.
            launching = sum(self.use, start=self.span("backward"))
            waits = sum((self.span(kind) + self.tail(kind) for kind in MAY_SLEEP), start=between)
            rest = positive(self.metric("step_ms")) - launching - waits
            asleep = np.where(launching > 0, positive(rest), 0.0)
        return asleep


def _of_device(host: Host, idle: Floats, between: Floats, instrument: Instrument) -> dict[str, Floats]:
    """Idle device, by what the host did meanwhile. A wait of the host for the device costs the idle time
    behind it, but no more than the wait itself, since the host would have been ahead by that much. Where the
    host's thread neither works nor asks for a core, nor is in a span in which it may sleep, it is blocked."""
    cells: dict[str, Floats] = {}
    left = _give(cells, "copy", positive(host.metric("exposed_copy_ms")), idle)
    if not host.parts:
        return cells | {"idle": _give_instrument(cells, instrument, left)}
    unusual = positive(left - np.median(left, axis=1, keepdims=True))
    for kind in (*HOST_ORDER, "synchronisation"):
        span = between if kind == "between_steps" else host.span(kind) + host.tail(kind)
        left = _give(cells, kind, _idle_meanwhile(host.part(f"{IDLE}{kind}"), span, unusual), left)
    use = host.use
    if use is not None:
        cpu, ready = use
        launching = cpu + ready + host.span("backward")
        left = _give(cells, "blocked", host.asleep(between), left)
        part = ratio(ready, launching, 0.0)
        left = _give(cells, "core_taken", left * part, left)
    return cells | {"launch": _give_instrument(cells, instrument, left)}


def _give_instrument(cells: dict[str, Floats], instrument: Instrument, left: Floats) -> Floats:
    """Take what recording costs from what nothing else explains: that is where it runs."""
    if not instrument.ms > 0:
        return left
    return _give(cells, "instrument", np.full_like(left, instrument.ms), left)


def _late_by_recording(cells: dict[str, Floats], ms: float) -> None:
    """What of it a rank has no launches for, it waits for the others, which recording makes as much later."""
    if ms > 0 and "wait" in cells:
        own = cells["instrument"]
        more = np.minimum(ms - own, cells["wait"])
        cells["instrument"], cells["wait"] = own + more, cells["wait"] - more


def _is_in(judged: Run, usual: UsualStep) -> Flags:
    """[judged step]: the usual one is of it."""
    return np.isin(judged.global_step[judged.judged_steps], usual.global_step)


def _usual_ready_ms(judged: Run, usual: UsualStep) -> float | None:
    """READY of a usual step, which is known of every step, recorded or not; None where it is not."""
    ready = judged.host_parts.get(READY) if judged.source == "host" else None
    if ready is None:
        return None
    ready = ready[:, judged.judged_steps].mean(axis=0)
    known = ready[np.isfinite(ready)]
    usual_of = np.median if usual.statistic == "median" else np.mean
    return float(usual_of(known)) if 2 * len(known) > len(ready) else None


def _as_usual(
    cells: dict[str, Floats], usual: UsualStep, source: Source, ready_ms: float | None
) -> float | None:
    """Make the cells of recorded steps add up to the usual step; the part of each that is left, None where
    the steps stay as they were. What recording costs goes where it is known to be, and what others have the
    cores for is left as much as usual (ready_ms). Of all else by which they are longer nobody knows where it
    is: each cell gives in proportion, but for what kernel records say that the device computes, which takes
    as long in every step. What they are shorter by is a cell of its own."""
    kept = ("compute", "hidden") if source == "kernels" else ()
    kept_ms = sum(float(cells[name].mean()) for name in kept if name in cells)
    left = {name: ms for name, ms in cells.items() if name not in (*kept, "instrument")}
    left_ms = sum(float(ms.mean()) for ms in left.values())
    more_ms = usual.ms - kept_ms - left_ms
    if not left_ms > 0 or more_ms <= -left_ms:
        return None  # the device computed longer in recorded steps than a usual one takes
    cells.pop("instrument", None)
    taken_ms = float(left["core_taken"].mean()) if "core_taken" in left else 0.0
    less_ms = min(max(taken_ms - (taken_ms if ready_ms is None else ready_ms), 0.0), max(-more_ms, 0.0))
    if less_ms > 0:
        left["core_taken"] = left["core_taken"] * (1 - less_ms / taken_ms)
        left_ms, more_ms = left_ms - less_ms, more_ms + less_ms
    if more_ms > 0:
        cells["unrecorded"] = np.full_like(next(iter(cells.values())), more_ms)
        return 1.0
    part = 1 + more_ms / left_ms
    cells |= {name: part * ms for name, ms in left.items()}
    return part


def _inflated(cells: dict[str, Floats], ms: float) -> None:
    """Take what recording costs a step on a CPU out of the cells that it makes longer, as INFLATED has them:
    it runs behind the step's body, then beside the program's code; a thread of it that holds the interpreter
    makes the program's sleep or wait for a core."""
    if not ms > 0:
        return
    instrument = np.zeros_like(cells["compute"])
    for name in INFLATED:
        if name in cells:
            taken = np.minimum(cells[name], ms - instrument)
            cells[name], instrument = cells[name] - taken, instrument + taken
    cells["instrument"] = instrument


def _give(cells: dict[str, Floats], name: str, ms: Floats, left: Floats) -> Floats:
    """Make a cell of ms, as far as there is time left; what is left then."""
    cells[name] = np.minimum(ms, left)
    return positive(left - cells[name])


def _of_cpu(
    host: Host, own: Floats, between: Floats, step: Floats, exposed: Floats, instrument_ms: float
) -> dict[str, Floats]:
    """own: the step without communication. Time in which the thread neither ran nor asked for a core is
    blocked, as far as no part that is known may hold it."""
    cells: dict[str, Floats] = {}
    left = own
    for kind in SPAN_KINDS:
        left = _give(cells, kind, host.span(kind) + host.tail(kind), left)
    use = host.use
    if use is not None:
        cpu, ready = use
        # Of what the thread cannot have slept there, as much as of the step; and at least what of its wait
        # for a core does not fit into the rest of the step.
        awake = positive(between - positive(step - exposed - cpu - ready))
        part = ratio(ready, cpu + ready, 0.0)
        taken = np.maximum(awake * part, ready - positive(step - between))
        between = between - np.clip(taken, 0.0, between)
    left = _give(cells, "between_steps", between, left)
    if use is not None:
        known = own - left
        asleep = np.where(cpu > 0, positive(step - exposed - cpu - ready - known), 0.0)
        left = _give(cells, "blocked", asleep, left)
        awake = own - cells["blocked"]
        part = ratio(left, awake, 0.0)
        left = _give(cells, "core_taken", ready * part, left)
    cells["compute"] = left
    _inflated(cells, instrument_ms)
    return cells


def _idle_meanwhile(idle: Floats | None, span: Floats, unusual: Floats) -> Floats:
    """Idle device while the host was in spans. Where a step's segments were not kept: as much of the span as
    in the steps that have both, and at least what the device idles longer than usual; all of it where no
    step has both."""
    if idle is None:
        return span
    is_measured = np.isfinite(idle) & (span > 0)
    ratio = float(idle[is_measured].sum() / span[is_measured].sum()) if is_measured.any() else 1.0
    estimate = np.maximum(ratio * span, np.minimum(span, unusual))
    return np.where(np.isnan(idle), estimate, idle)


# -- exposed communication: waiting for ranks, transfer, or not split -------------------------------------


@dataclass(frozen=True, slots=True)
class Exposed:
    """[rank, step] in ms. exposed = wait + transfer + unsplit, in every step of every rank."""

    wait_ms: Floats
    """Before the last rank had come."""
    transfer_ms: Floats
    """After it."""
    unsplit_ms: Floats
    """Where arrivals are not known."""
    caused_ms: Floats
    """Waiting of each of the others for the rank; 0 where nobody knows for whom."""
    lost_ms: Floats
    """The part of wait_ms that delays its rank: the rest of it waits for its own host as well, which has not
    launched what comes next, so that the device would idle if no rank were late."""
    lost_moving_ms: Floats
    """[step]: the part of transfer, and of what may be transfer, that delays the step: as of lost_ms, of the
    rank that it delays least where all ranks communicate with each other."""
    is_split: bool
    """Waiting is known in some step."""

    def shortened(self, part: float) -> "Exposed":
        """Of steps in which it takes that part."""
        times = {one.name: part * getattr(self, one.name) for one in fields(self) if one.name != "is_split"}
        return replace(self, **times)

    @property
    def lost_to_ms(self) -> Floats:
        """Of caused_ms, what delays the others."""
        waited, lost = self.wait_ms.sum(axis=0), self.lost_ms.sum(axis=0)
        return self.caused_ms * ratio(lost, waited, 0.0)

    @property
    def idle_waits_ms(self) -> Floats:
        """Waiting in which the rank has nothing queued behind it: launches that come late, too."""
        return self.wait_ms - self.lost_ms


@once_of_run
def exposed_of(run: Run) -> Exposed | None:
    """None where overlap was not measured, or nothing is exposed."""
    name = "exposed_ms"
    if name not in run.metrics:
        return None
    exposed = positive(run.values(name))
    if not exposed.any():
        return None
    known = run.values("exposed_wait_ms") if "exposed_wait_ms" in run.metrics else exposed * np.nan
    is_known, wait = np.isfinite(known), np.minimum(positive(known), exposed)
    num_ranks = len(run.ranks)
    caused = np.zeros_like(exposed)
    if num_ranks > 1 and is_known.any():
        caused = _blame(run, exposed, wait) / (num_ranks - 1)
    rest = exposed - wait
    # Of a broadcast no arrivals tell the wait; what all exposure delays, but for what is no wait, waits do.
    all_of_it = _lost(run, exposed, BEHIND_EXPOSED)
    lost = np.maximum(_lost(run, wait, BEHIND_WAITS), np.minimum(all_of_it - rest, wait))
    moving = np.clip(all_of_it - lost, 0.0, rest)
    is_limited = run.source != "host" and run.mean_of_host(BEHIND_EXPOSED) is not None
    is_coupled = is_limited and is_one_group(run.collectives, num_ranks)
    return Exposed(
        wait,
        np.where(is_known, rest, 0.0),
        np.where(is_known, 0.0, rest),
        caused,
        lost,
        moving.min(axis=0) if is_coupled else moving.mean(axis=0),
        bool(is_known.any()),
    )


def _lost(judged: Run, ms: Floats, behind: str) -> Floats:
    """The part of ms that delays its rank, as a column of its host tells. What the host waits for the device
    itself, on other ranks' account, is lost too.

    Steps whose collectives were learned do not say when those were launched: as large a share is lost in them
    as in the rank's steps that do.
    """
    parts = judged.host_parts
    if judged.source == "host" or behind not in parts:
        return ms
    ahead = parts[behind][:, judged.judged_steps]
    for name in (f"{PREFIX}synchronisation", f"{PREFIX}synchronisation{AFTER}"):
        if name in parts:
            ahead = ahead + positive(parts[name][:, judged.judged_steps])
    is_known = ~np.isnan(ahead)
    lost = np.minimum(ahead, ms)
    known_ms = ms.sum(axis=1, where=is_known)
    share = ratio(lost.sum(axis=1, where=is_known), known_ms, 1.0)
    return np.where(is_known, lost, ms * share[:, None])


def has_point_to_point(judged: Run) -> bool:
    return any(kind.op in POINT_TO_POINT for kind in judged.collectives)


def _blame(judged: Run, exposed: Floats, wait: Floats) -> Floats:
    """[rank, step]: waiting of all others for it. What matched collectives tell belongs to who arrived last;
    the rest, as of a broadcast, which leaves its source when it likes, to the rank that is least exposed."""
    least = np.zeros_like(exposed)
    least[np.argmin(exposed, axis=0), np.arange(exposed.shape[1])] = 1.0
    blamed: Floats = least * wait.sum(axis=0)
    arrivals = judged.arrivals
    if arrivals is not None:
        caused, matched = (
            values[:, judged.judged_steps] for values in (arrivals.caused_ms, arrivals.exposed_ms)
        )
        matched = np.where(np.isfinite(matched), np.minimum(positive(matched), exposed), wait)
        by_arrival = ratio(caused, np.broadcast_to(caused.sum(axis=0), caused.shape), 0.0)
        is_matched = arrivals.num_judged[:, judged.judged_steps].sum(axis=0) > 0
        blamed += np.where(is_matched, by_arrival - least, 0.0) * matched.sum(axis=0)
    return blamed
