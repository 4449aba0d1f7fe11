"""Comparison of overlap strategies for one shape: which is fastest, and how far it is from its bounds.

compare() tries the alternatives of every family in a few rounds, then measures the fastest of each family,
serial among them, in turns. Every strategy's result was checked bit for bit before it was timed.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from aorta.device.backend import backend_of
from aorta.device.environment import collect_environment, collect_versions
from aorta.programs.execute.problem import Problem
from aorta.programs.execute.session import Family, Make, StrategySession
from aorta.programs.execute.strategies import Chunked, FusedGather, FusedScatter, Serial, Strategy
from aorta.programs.execute.timing import Figure, Leg, figure_of, median_of
from aorta.programs.language.emit import ORDERS
from aorta.programs.lint.one_rank import lint

SCREENING_ROUNDS = 6
"""Rounds in which all alternatives of a family compete."""
LEVEL_ROUNDS = 10
"""Rounds in which the host does not submit ahead of the device; they explain a time and decide nothing."""
HEAD = ("strategy", "settings", "ms", "95 %", "x multiply", "efficiency", "host level")


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with its best settings. Times in ms, of the slowest rank of each round."""

    family: str
    name: str
    settings: dict[str, int | str]
    note: str
    time_ms: Figure
    """Time where the host submits ahead of the device, as in a training step that the device bounds."""
    time_host_level_ms: Figure
    """Time where the host begins to submit only when the device could begin to work."""
    time_over_gemm: float
    """time_ms as a multiple of the multiply alone."""
    efficiency: Figure | None
    """(serial - time) / (serial - bound), with the comparison's bound_ms: above 1 where a strategy moves its
    bytes faster than the collective. None: serial and bound are within noise of each other."""
    false_edges: int | None
    """Number of false edges that lint finds in its program."""
    not_measured: dict[str, str]
    """Field that is None -> reason."""


class StrategyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one shape; every strategy's output was checked bit for bit."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    ranks: int
    device: str
    versions: dict[str, str | None]
    environment: dict[str, str]
    rounds: int
    serial_ms: Figure
    comm_ms: Figure
    gemm_ms: Figure
    bound_ms: float
    """max(comm, gemm), each alone in one piece, the collective of `serial`."""
    rows: list[StrategyRow]
    """Rows by time, the best first; serial is among them."""
    unavailable: dict[str, str]
    best: str
    verdict: str


def compare(
    problem: Problem,
    device: torch.device,
    tiles: Sequence[int],
    streams: Sequence[int],
    num_rounds: int = 30,
) -> StrategyComparison:
    """Try all families, then measure the fastest of each in turns.

    Collective over the default process group; every rank gets the same comparison.
    """
    session = StrategySession(problem, device, max(streams))
    try:
        serial = session.build([Family("serial", [Serial])])["serial"][0]
        assert isinstance(serial, Serial)
        families = program_families(problem.op, tiles, streams)
        if backend_of(device).is_device:
            families += fused_families(problem.op)
        finalists = _fastest(session, session.build(families))
        return _FinalRounds(session, serial, finalists, num_rounds).comparison()
    finally:
        session.close()


def program_families(op: str, tiles: Sequence[int], streams: Sequence[int]) -> list[Family]:
    """Host programs over the process group: four orders, breadth, and for a gather rings and pairs."""
    families = [
        Family(order, [_chunked(order, s, n) for s in tiles for n in streams if n <= s]) for order in ORDERS
    ]
    # One worker that issues all communication first: forks and joins cannot serialise it.
    breadth = [_chunked("both_hoisted", s, 1, tile_order="breadth") for s in tiles if s > 1]
    families.append(Family("breadth", breadth))
    if op == "ag_gemm":
        several = [(s, n) for s in tiles for n in streams if 1 < n <= s]
        for comm in ("ring", "pairwise"):
            members = [_chunked("both_hoisted", s, n, comm=comm) for s, n in several]
            families.append(Family(f"{comm} send_recv", members))
    return families


def fused_families(op: str) -> list[Family]:
    """torch's own operators over symmetric memory; they need GPUs that reach each other."""
    fused: dict[str, Make] = {"ag_gemm": FusedGather, "gemm_rs": FusedScatter}
    return [Family("torch fused", [fused[op]])] if op in fused else []


def _chunked(order: str, tiles: int, streams: int, **options: str) -> Make:
    return lambda bench: Chunked(bench, order, tiles, streams, **options)  # type: ignore[arg-type]


def _fastest(session: StrategySession, built: Mapping[str, list[Strategy]]) -> dict[str, Strategy]:
    """The fastest of each family, by a few rounds."""
    members = [strategy for strategies in built.values() for strategy in strategies]
    if not members:
        return {}
    legs = [Leg(str(number), strategy.submit) for number, strategy in enumerate(members)]
    times = session.measure(legs, SCREENING_ROUNDS)
    medians = {id(s): float(np.median(times.slowest(str(number)))) for number, s in enumerate(members)}
    return {family: min(group, key=lambda s: medians[id(s)]) for family, group in built.items()}


class _FinalRounds:
    """The last rounds, of the fastest of each family, and the comparison that follows from them."""

    def __init__(
        self, session: StrategySession, serial: Serial, others: Mapping[str, Strategy], num_rounds: int
    ) -> None:
        self.session = session
        self.finalists: dict[str, Strategy] = {"serial": serial, **others}
        self.num_rounds = num_rounds
        legs = [Leg("comm", serial.communicate), Leg("gemm", serial.multiply)]
        legs += [Leg(f"{family}/ahead", strategy.submit) for family, strategy in self.finalists.items()]
        self.times = session.measure(legs, num_rounds)
        level = [
            Leg(family, strategy.submit, host_ahead=False) for family, strategy in self.finalists.items()
        ]
        self.level_times = session.measure(level, LEVEL_ROUNDS)

    def comparison(self) -> StrategyComparison:
        problem, device = self.session.problem, self.session.device
        rows = sorted((self._row(family) for family in self.finalists), key=lambda row: row.time_ms.value)
        return StrategyComparison(
            op=problem.op,
            m=problem.m,
            n=problem.n,
            k=problem.k,
            dtype=str(problem.dtype).removeprefix("torch."),
            ranks=problem.num_ranks,
            device=backend_of(device).name(device),
            versions=collect_versions(),
            environment=collect_environment(),
            rounds=self.num_rounds,
            serial_ms=median_of(self.times.slowest("serial/ahead")),
            comm_ms=median_of(self.times.slowest("comm")),
            gemm_ms=median_of(self.times.slowest("gemm")),
            bound_ms=max(self._median("comm"), self._median("gemm")),
            rows=rows,
            unavailable=self.session.unavailable,
            best=_clear_best(rows).family,
            verdict=_verdict(rows),
        )

    def _row(self, family: str) -> StrategyRow:
        strategy = self.finalists[family]
        time, gemm_ms = median_of(self.times.slowest(f"{family}/ahead")), self._median("gemm")
        not_measured = {}
        efficiency = self._efficiency(family)
        if efficiency is None:
            not_measured["efficiency"] = "serial and the bound are within noise of each other"
        program = strategy.program if isinstance(strategy, Chunked) else None
        if program is None:
            not_measured["false_edges"] = "it is not a host program"
        return StrategyRow(
            family=family,
            name=strategy.name,
            settings=strategy.settings,
            note=strategy.note,
            time_ms=time,
            time_host_level_ms=median_of(self.level_times.slowest(family)),
            time_over_gemm=time.value / gemm_ms,
            efficiency=efficiency,
            false_edges=None if program is None else len(lint(program).false_edges),
            not_measured=not_measured,
        )

    def _efficiency(self, family: str) -> Figure | None:
        """Gain over serial as a share of the most possible; None where serial is within noise of the bound,
        the longer of comm and gemm."""
        columns = {"serial": "serial/ahead", "comm": "comm", "gemm": "gemm", "time": f"{family}/ahead"}
        rounds = {name: self.times.slowest(leg) for name, leg in columns.items()}

        def most(medians: Mapping[str, float]) -> float:
            return medians["serial"] - max(medians["comm"], medians["gemm"])

        if figure_of(rounds, most).low <= 0:
            return None
        return figure_of(rounds, lambda medians: (medians["serial"] - medians["time"]) / most(medians))

    def _median(self, leg: str) -> float:
        return float(np.median(self.times.slowest(leg)))


def _clear_best(rows: Sequence[StrategyRow]) -> StrategyRow:
    """The fastest row, or serial where nothing is clearly faster."""
    serial = next(row for row in rows if row.family == "serial")
    return rows[0] if rows[0].time_ms.high < serial.time_ms.low else serial


def _verdict(rows: Sequence[StrategyRow]) -> str:
    serial = next(row for row in rows if row.family == "serial")
    best = _clear_best(rows)
    if best is serial:
        return f"overlap loses here: nothing is clearly faster than serial, {serial.time_ms.value:.3f} ms"
    gain = 100 * (1 - best.time_ms.value / serial.time_ms.value)
    settings = ", ".join(f"{key} {value}" for key, value in best.settings.items()) or "no settings"
    text = f"best: {best.family} ({settings}), {gain:.0f} % less time than serial"
    losers = [row.family for row in rows if row.time_ms.low > serial.time_ms.high]
    return f"{text}; slower than serial: {', '.join(losers)}" if losers else text


def comparison_text(comparison: StrategyComparison) -> str:
    """Verdict and a table with a row per strategy; a dash where nothing was measured (the JSON says why)."""
    alone = f"communication alone {_ms(comparison.comm_ms)}   multiply alone {_ms(comparison.gemm_ms)}"
    lines = [
        f"{comparison.op}   M {comparison.m}  N {comparison.n}  K {comparison.k}   {comparison.dtype}"
        f"   {comparison.ranks} x {comparison.device}"
        f"   {comparison.rounds} rounds, slowest rank",
        comparison.verdict,
        f"serial {_ms(comparison.serial_ms)}   {alone}   bound {comparison.bound_ms:.3f} ms",
        "efficiency: of the bound above",
        "",
        *_aligned([HEAD, *map(_table_row, comparison.rows)]),
    ]
    if comparison.unavailable:
        lines += ["", "not available"]
        lines += [f"  {name}: {reason}" for name, reason in comparison.unavailable.items()]
    notes = dict.fromkeys(f"{row.family}: {row.note}" for row in comparison.rows if row.note)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _table_row(row: StrategyRow) -> tuple[str, ...]:
    return (
        row.family,
        " ".join(f"{key}={value}" for key, value in row.settings.items()),
        f"{row.time_ms.value:.3f}",
        f"{row.time_ms.low:.3f}..{row.time_ms.high:.3f}",
        f"{row.time_over_gemm:.2f}",
        _share(row.efficiency),
        f"{row.time_host_level_ms.value:.3f}",
    )


def _share(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:.2f}"


def _ms(figure: Figure) -> str:
    return f"{figure.value:.3f} ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first two columns, which hold words, to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
