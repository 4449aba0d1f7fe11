"""Comparison of overlap strategies for a shape: the best, its distance from the bounds, and why."""

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from aorta.programs.execute.comparison.families import Family, first_families, later_families
from aorta.programs.execute.comparison.session import StrategySession
from aorta.programs.execute.comparison.waterfall import Measured, pipeline_bound_ms, waterfall
from aorta.programs.execute.problem import Problem
from aorta.programs.execute.rounds import Floats, Leg, Middle, median_of, middle
from aorta.programs.execute.strategies.base import Strategy, StrategyParts
from aorta.programs.execute.strategies.chunked import Chunked
from aorta.programs.execute.strategies.copy_engine import GatherByCopy, ReduceByCopy
from aorta.programs.execute.strategies.serial import Serial
from aorta.programs.lint.one_rank import lint

SCREENING_ROUNDS = 6
PARTS_ROUNDS = 10
"""Rounds of measurements that only explain: slices, slices beside the other kind, host and device level."""
MOST_REPEATS = 6
COPIES_ALONE = "copy engine alone"
SETTINGS = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "TORCH_NCCL_HIGH_PRIORITY")
SETTING_PREFIXES = ("NCCL_", "RCCL_", "TORCH_SYMM_MEM_", "TORCH_NCCL_")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A median over rounds with its 95 % interval."""

    value: float
    low: float
    high: float


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with its best settings. Times in ms, slowest rank of each round."""

    family: str
    name: str
    settings: dict[str, int | str]
    note: str
    time_ms: Figure
    """The host is ahead of the device."""
    time_host_level_ms: Figure
    """The host begins to submit when the device could begin to work."""
    exposed_ms: float
    """time_ms over the multiply alone."""
    time_over_gemm: float
    """time_ms as a multiple of the multiply alone."""
    efficiency: Figure | None
    """(serial - time) / (serial - bound), with the comparison's bound_ms: above 1 where a strategy moves its
    bytes faster than the collective. None: serial and bound are within noise of each other."""
    transport: str
    """Carrier of the bytes."""
    transport_ms: float | None
    """The least time in which that transport alone was seen to carry all of them: its own slices, the
    comparison's collective or the comparison's copies, whichever apply."""
    own_bound_ms: float | None
    """max(transport_ms, the multiply alone, whole or in its slices, whichever is less)."""
    time_over_own_bound: float | None
    efficiency_of_own_bound: Figure | None
    """(serial - time) / (serial - own_bound_ms)."""
    pipeline_bound_ms: float | None
    """Least time of any order of its slices, from transport_ms: max + min / S, less where a part of the
    multiply needs no communication. None: the operator cannot be taken apart."""
    share_of_pipeline_bound: float | None
    """pipeline_bound_ms / time_ms."""
    own_comm_ms: float | None
    """Milliseconds of its communication alone, all slices."""
    own_gemm_ms: float | None
    false_edges: int | None
    """False edges that lint finds in its program."""
    waterfall_ms: dict[str, float] | None
    """Sums to time_host_level_ms."""
    not_measured: dict[str, str]
    host_late_rounds: int


class StrategyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one shape; every strategy's output was checked bit for bit."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    ranks: int
    device: str
    versions: dict[str, str]
    environment: dict[str, str]
    rounds: int
    serial_ms: Figure
    comm_ms: Figure
    gemm_ms: Figure
    copy_engine_ms: Figure | None
    """The bytes alone by copy engines and flags, one piece per peer."""
    bound_ms: float
    """max(comm, gemm), each alone in one piece, the collective of `serial`."""
    rows: list[StrategyRow]
    """Best first, serial among them."""
    unavailable: dict[str, str]
    screening_ms: dict[str, float]
    """Median of SCREENING_ROUNDS of every alternative that was tried."""
    best: str
    verdict: str


def compare(
    problem: Problem,
    device: torch.device,
    tiles: Sequence[int],
    streams: Sequence[int],
    num_rounds: int = 30,
    only: Callable[[str], bool] = lambda family: True,
    session: StrategySession | None = None,
) -> StrategyComparison:
    """Tries all families (those whose name `only` accepts), then measures the best of each in turns.

    Collective over the default process group; every rank gets the same answer.
    """
    if session is None:
        session = StrategySession(problem, device, max(streams))
        try:
            return compare(problem, device, tiles, streams, num_rounds, only, session)
        finally:
            session.close()
    serial = session.build([Family("serial", [Serial])])["serial"][0]
    families = [f for f in first_families(problem.op, tiles, streams, device.type == "cuda") if only(f.name)]
    finalists, screened = _screened(session, session.build(families))
    programs = [s for f, s in finalists.items() if isinstance(s, Chunked) and "send_recv" not in f]
    if programs:
        best = min(programs, key=lambda strategy: screened[strategy.label])
        later = [family for family in later_families(session.bench, best) if only(family.name)]
        later_strategies, more_screened = _screened(session, session.build(later))
        finalists, screened = finalists | later_strategies, screened | more_screened
    finalists = {"serial": serial, **finalists}
    return _Final(session, finalists, num_rounds).comparison(screened)


def _screened(
    session: StrategySession, built: Mapping[str, list[Strategy]]
) -> tuple[dict[str, Strategy], dict[str, float]]:
    """The fastest of each family, and the median of all."""
    members = [strategy for strategies in built.values() for strategy in strategies]
    if not members:
        return {}, {}
    legs = [Leg(str(number), strategy.submit) for number, strategy in enumerate(members)]
    times = session.measure(legs, SCREENING_ROUNDS)
    medians = {id(s): float(np.median(times.slowest(str(number)))) for number, s in enumerate(members)}
    finalists = {family: min(group, key=lambda s: medians[id(s)]) for family, group in built.items()}
    finalist_ids = {id(strategy) for strategy in finalists.values()}
    for strategy in members:
        if id(strategy) not in finalist_ids:
            strategy.close()
    return finalists, {strategy.label: medians[id(strategy)] for strategy in members}


class _Final:
    """The last rounds and what follows from them."""

    def __init__(self, session: StrategySession, finalists: Mapping[str, Strategy], num_rounds: int) -> None:
        self.session = session
        self.finalists = finalists
        self.num_rounds = num_rounds
        self.parts = {family: strategy.parts() for family, strategy in finalists.items()}
        self.copies = self._copies()
        serial = finalists["serial"]
        assert isinstance(serial, Serial)
        serial_legs = [Leg("comm", serial.communicate), Leg("gemm", serial.multiply)]
        serial_legs += [Leg("copies", self.copies)] if self.copies is not None else []
        serial_legs += [Leg(f"{family}/ahead", strategy.submit) for family, strategy in finalists.items()]
        self.times = session.measure(serial_legs, num_rounds)
        self.ms = self._measured_apart()

    def _copies(self) -> Callable[[], None] | None:
        """The bytes alone by copy engines, where a strategy uses them."""
        if all(strategy.transport != "copy engine" for strategy in self.finalists.values()):
            return None
        gathers = self.session.problem.gathers
        one_piece = Family(COPIES_ALONE, [lambda b: GatherByCopy(b, 1) if gathers else ReduceByCopy(b, 1)])
        built = self.session.build([one_piece]).get(COPIES_ALONE)
        return built[0].communication() if built else None

    def _measured_apart(self) -> dict[str, Floats]:
        """Per round, what explains the times: family/level, and /comm, /gemm, /comm_beside, /gemm_beside of
        those that can be taken apart."""
        level = [
            Leg(f"{family}/level", strategy.submit, host_ahead=False)
            for family, strategy in self.finalists.items()
        ]
        parts_of = {family: parts for family, parts in self.parts.items() if parts is not None}
        slices = [Leg(f"{family}/comm", parts.comm) for family, parts in parts_of.items()]
        slices += [Leg(f"{family}/gemm", parts.gemm) for family, parts in parts_of.items()]
        times = self.session.measure([*level, *slices], PARTS_ROUNDS)
        contended_legs = []
        for family, parts in parts_of.items():
            comm, gemm = (float(np.median(times.slowest(f"{family}/{kind}"))) for kind in ("comm", "gemm"))
            contended_legs.append(Leg(f"{family}/comm_beside", repeated(parts.beside_gemm, comm, gemm)))
            contended_legs.append(Leg(f"{family}/gemm_beside", repeated(parts.beside_comm, gemm, comm)))
        times_ms = {leg.name: times.slowest(leg.name) for leg in (*level, *slices)}
        if contended_legs:
            contended = self.session.measure(contended_legs, PARTS_ROUNDS)
            times_ms |= {leg.name: contended.slowest(leg.name) for leg in contended_legs}
        return times_ms

    def comparison(self, screened: Mapping[str, float]) -> StrategyComparison:
        problem, device = self.session.problem, self.session.device
        rows = sorted((self._row(family) for family in self.finalists), key=lambda row: row.time_ms.value)
        return StrategyComparison(
            op=problem.op,
            m=problem.m,
            n=problem.n,
            k=problem.k,
            dtype=str(problem.dtype).removeprefix("torch."),
            ranks=problem.num_ranks,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            versions=versions(),
            environment=environment(),
            rounds=self.num_rounds,
            serial_ms=_figure(median_of(self.times.slowest("serial/ahead"))),
            comm_ms=_figure(median_of(self.times.slowest("comm"))),
            gemm_ms=_figure(median_of(self.times.slowest("gemm"))),
            copy_engine_ms=self._figure_of("copies"),
            bound_ms=max(self._median("comm"), self._median("gemm")),
            rows=rows,
            unavailable=self.session.unavailable,
            screening_ms={label: round(ms, 6) for label, ms in screened.items()},
            best=_clear_best(rows).family,
            verdict=_verdict(rows),
        )

    def _row(self, family: str) -> StrategyRow:
        strategy, parts = self.finalists[family], self.parts[family]
        time = median_of(self.times.slowest(f"{family}/ahead"))
        not_measured = {}
        efficiency = self._efficiency(family)
        if efficiency is None:
            not_measured["efficiency"] = "serial and the bound are within noise of each other"
        transport = self._transport_ms(family)
        gemm = self._least("gemm", f"{family}/gemm")
        assert gemm is not None
        own_bound = None if transport is None else max(transport, gemm)
        own_efficiency = None if own_bound is None else self._efficiency_of(family, own_bound)
        if own_bound is None:
            missing = ("transport_ms", "own_bound_ms", "time_over_own_bound", "efficiency_of_own_bound")
            not_measured |= dict.fromkeys(missing, "its transport was not measured alone")
        elif own_efficiency is None:
            not_measured["efficiency_of_own_bound"] = "serial and its bound are within noise of each other"
        bound = None
        if parts is not None:
            assert transport is not None
            bound = pipeline_bound_ms(transport, gemm, parts.exposed_comm, parts.exposed_gemm)
        if parts is None:
            apart_columns = ("pipeline_bound_ms", "own_comm_ms", "own_gemm_ms", "waterfall_ms")
            not_measured |= dict.fromkeys(apart_columns, "it cannot be taken apart")
        program = strategy.program if isinstance(strategy, Chunked) else None
        if program is None:
            not_measured["false_edges"] = "it is not a host program"
        return StrategyRow(
            family=family,
            name=strategy.name,
            settings=strategy.settings,
            note=strategy.note,
            time_ms=_figure(time),
            time_host_level_ms=_figure(median_of(self.ms[f"{family}/level"])),
            exposed_ms=time.value - self._median("gemm"),
            time_over_gemm=time.value / self._median("gemm"),
            efficiency=efficiency,
            transport=strategy.transport,
            transport_ms=transport,
            own_bound_ms=own_bound,
            time_over_own_bound=None if own_bound is None else time.value / own_bound,
            efficiency_of_own_bound=own_efficiency,
            pipeline_bound_ms=bound,
            share_of_pipeline_bound=None if bound is None else bound / time.value,
            own_comm_ms=None if parts is None else self._median(f"{family}/comm"),
            own_gemm_ms=None if parts is None else self._median(f"{family}/gemm"),
            false_edges=None if program is None else len(lint(program).false_edges),
            waterfall_ms=None if parts is None else self._waterfall(family, parts),
            not_measured=not_measured,
            host_late_rounds=self.times.late[f"{family}/ahead"],
        )

    def _efficiency(self, family: str) -> Figure | None:
        columns = {"serial": "serial/ahead", "comm": "comm", "gemm": "gemm", "time": f"{family}/ahead"}
        rounds = {name: self.times.slowest(leg) for name, leg in columns.items()}
        gain = middle(rounds, lambda m: m["serial"] - max(m["comm"], m["gemm"]))
        if gain.low <= 0:
            return None
        return _figure(
            middle(rounds, lambda m: (m["serial"] - m["time"]) / (m["serial"] - max(m["comm"], m["gemm"])))
        )

    def _efficiency_of(self, family: str, bound_ms: float) -> Figure | None:
        """Against a bound that was not measured in the same rounds."""
        rounds = {"serial": self.times.slowest("serial/ahead"), "time": self.times.slowest(f"{family}/ahead")}
        if middle(rounds, lambda m: m["serial"] - bound_ms).low <= 0:
            return None
        return _figure(middle(rounds, lambda m: (m["serial"] - m["time"]) / (m["serial"] - bound_ms)))

    def _transport_ms(self, family: str) -> float | None:
        """A bound must not be above what was seen, so the least of what carries the same bytes alike."""
        transport_leg = {"collective": "comm", "copy engine": "copies"}.get(self.finalists[family].transport)
        return self._least(f"{family}/comm", *([] if transport_leg is None else [transport_leg]))

    def _least(self, *legs: str) -> float | None:
        """The least median of those that were measured."""
        return min((self._median(leg) for leg in legs if self._is_measured(leg)), default=None)

    def _is_measured(self, leg: str) -> bool:
        return leg in self.ms or leg in self.times.ms

    def _figure_of(self, leg: str) -> Figure | None:
        return _figure(median_of(self.times.slowest(leg))) if leg in self.times.ms else None

    def _waterfall(self, family: str, parts: StrategyParts) -> dict[str, float]:
        comm_slices = self._median(f"{family}/comm")
        collective = self.finalists[family].transport == "collective"
        return waterfall(
            Measured(
                time=self._median(f"{family}/level"),
                time_host_ahead=self._median(f"{family}/ahead"),
                comm=self._median("comm") if collective else comm_slices,
                gemm=self._median("gemm"),
                comm_slices=comm_slices,
                gemm_slices=self._median(f"{family}/gemm"),
                comm_beside=self._median(f"{family}/comm_beside"),
                gemm_beside=self._median(f"{family}/gemm_beside"),
                exposed_comm=parts.exposed_comm,
                exposed_gemm=parts.exposed_gemm,
            ),
            parts.model,
        )

    def _median(self, leg: str) -> float:
        return float(np.median(self.ms[leg] if leg in self.ms else self.times.slowest(leg)))


def versions() -> dict[str, str]:
    """Versions of torch and of the libraries that communicate and multiply."""
    version_of: dict[str, str] = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        version_of["cuda"] = torch.version.cuda
    if torch.version.hip:
        version_of["hip"] = torch.version.hip
    if torch.cuda.is_available() and dist.is_nccl_available():
        version_of["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return version_of


def environment() -> dict[str, str]:
    """Variables that change what is measured."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in SETTINGS or name.startswith(SETTING_PREFIXES)
    }


def _clear_best(rows: Sequence[StrategyRow]) -> StrategyRow:
    """The fastest, or serial where nothing is clearly faster."""
    serial = next(row for row in rows if row.family == "serial")
    return rows[0] if rows[0].time_ms.high < serial.time_ms.low else serial


def _verdict(rows: Sequence[StrategyRow]) -> str:
    serial = next(row for row in rows if row.family == "serial")
    best = _clear_best(rows)
    if best is serial:
        return f"overlap loses here: nothing is clearly faster than serial, {serial.time_ms.value:.3f} ms"
    gain = 100 * (1 - best.time_ms.value / serial.time_ms.value)
    text = f"best: {best.family} ({_settings(best)}), {gain:.0f} % less time than serial"
    losers = [row.family for row in rows if row.time_ms.low > serial.time_ms.high]
    return f"{text}; slower than serial: {', '.join(losers)}" if losers else text


def _settings(row: StrategyRow) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.settings.items()) or "no settings"


def repeated(submit: Callable[[int], None], of_ms: float, other_ms: float) -> Callable[[], None]:
    """The other kind often enough to go on for as long as the measured one; the same count on all ranks
    that have the same times."""
    times = min(int(of_ms / max(other_ms, 1e-6)) + 2, MOST_REPEATS)
    return lambda: submit(times)


def _figure(middle: Middle) -> Figure:
    return Figure(value=middle.value, low=middle.low, high=middle.high)
