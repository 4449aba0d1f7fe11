"""The simulator against measured orders: as it is, and with what the tiles of one S say about the device.

A multiply that fills the device and the all-gather of the next tile become ready at the same moment, when
the all-gather of this tile ends. Whichever is first has the device: if the multiply is, the all-gather waits
for all of it (comm_entry 1). Times of single rounds therefore fall into steps, one per race that was won.
The calibration takes from the tiles of CALIBRATED_TILES alone: the share of races lost, the time of an edge,
and how much a multiply slows down beside communication. Pairs are judged with and without that S.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pipelining_numbers import FACTORIZED, HOISTED, bootstrap, configuration, kendall_tau_b

from aorta.programs.language.emit import emit_named
from aorta.programs.language.ir import Communicate, Gemm, Program, UserOp
from aorta.programs.simulator import Costs, Machine, duration_us, simulate

CALIBRATED_TILES = 4
ENOUGH_QUEUES = 6
"""A queue for each of four workers, the caller and the process group."""
EDGES_PER_TILE = 4
RACERS = {
    "hoisted orders": HOISTED,
    "high priority": ("priority",),
    "multiplies leave multiprocessors": ("carved",),
}
NUM_SEEDS = 15
Sections = Mapping[int, Mapping[str, Any]]
"""What orders_section wrote, by number of queues."""
Predict = Callable[[int, str], float | None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of the device, from tiles of one S."""

    comm_late: float
    """Share of races that the multiply wins."""
    wait_us: Mapping[int, float]
    """Of an edge, by number of queues."""
    compute_slowdown: float


def tau_lines(orders: Sections) -> list[str]:
    """Kendall's tau-b of predicted against measured times, over pairs whose intervals do not overlap."""
    labels = [
        (queues, name)
        for queues, section in orders.items()
        for name in sorted(section["ms"])
        if name.partition("/")[0] in (FACTORIZED, *HOISTED)
    ]
    if len(labels) < 3:
        return []
    lines = _tau_of("plain", orders, labels, lambda queues, name: plain_ms(orders[queues], name, queues))
    found = calibration(orders)
    if found is None:
        return [*lines, f"  not calibrated: needs S {CALIBRATED_TILES} and {ENOUGH_QUEUES} queues"]
    waits = ", ".join(f"{wait:.2f} at {queues} queues" for queues, wait in found.wait_us.items())
    lines.append(
        f"  calibrated on S {CALIBRATED_TILES}: the multiply wins {100 * found.comm_late:.0f} % of the races;"
        f" an edge takes {waits} us; a multiply beside communication {found.compute_slowdown:.2f} times"
    )
    calibrated: Predict = lambda queues, name: calibrated_ms(orders[queues], name, queues, found)  # noqa: E731
    return lines + _tau_of("calibrated", orders, labels, calibrated)


def race_lines(orders: Sections) -> list[str]:
    """Where rounds lie between the time of no race won and that of all won, by S."""
    lines = ["races that the next all-gather wins, %, mean over rounds (0: serial)"]
    for queues, section in orders.items():
        ms = section["ms"]
        tiles_of = sorted({configuration(name)[0] for name in ms if name.partition("/")[0] in HOISTED})
        for title, kinds in RACERS.items():
            lost = {tiles: _lost_races(ms, tiles, kinds) for tiles in tiles_of}
            texts = [
                f"S {tiles}: {100 * (1 - share):.0f}" for tiles, share in lost.items() if share is not None
            ]
            if texts:
                lines.append(f"  {queues} queues, {title}: {', '.join(texts)}")
    return lines if len(lines) > 1 else []


def plain_ms(section: Mapping[str, Any], name: str, queues: int) -> float | None:
    """From slices alone and how they disturb each other; None where these were not measured."""
    ms, (tiles, _) = section["ms"], configuration(name)
    comm, gemm = _slice_us(ms, "comm", tiles), _slice_us(ms, "gemm", tiles)
    beside = _slice_us(ms, "comm_beside", tiles), _slice_us(ms, "gemm_beside", tiles)
    if comm is None or gemm is None or beside[0] is None or beside[1] is None:
        return None
    slowdowns = max(1.0, beside[0] / comm), max(1.0, beside[1] / gemm)
    costs = Costs(comm_us=comm, gemm_us=gemm, comm_slowdown=slowdowns[0], compute_slowdown=slowdowns[1])
    return _simulated_ms(_program(section, name), costs, Machine(num_queues=queues))


def calibration(orders: Sections) -> Calibration | None:
    """None where no run has the tiles and the queues for it."""
    lost, wait_us, slowdowns = [], {}, []
    for queues, section in orders.items():
        ms = section["ms"]
        wait_us[queues] = _wait_us(ms)
        share = _lost_races(ms, CALIBRATED_TILES, HOISTED)
        gemm, beside = (_slice_us(ms, kind, CALIBRATED_TILES) for kind in ("gemm", "gemm_beside"))
        if queues >= ENOUGH_QUEUES and share is not None and gemm is not None and beside is not None:
            lost.append(share)
            slowdowns.append(max(1.0, beside / gemm))
    waits = {queues: wait for queues, wait in wait_us.items() if wait is not None}
    if not lost or len(waits) < len(orders):
        return None
    return Calibration(float(np.mean(lost)), waits, float(np.mean(slowdowns)))


def calibrated_ms(section: Mapping[str, Any], name: str, queues: int, found: Calibration) -> float | None:
    """Median over NUM_SEEDS draws of who wins the races."""
    tiles, _ = configuration(name)
    comm, gemm = (_slice_us(section["ms"], kind, tiles) for kind in ("comm", "gemm"))
    if comm is None or gemm is None:
        return None
    program = _program(section, name)
    costs = Costs(comm_us=comm, gemm_us=gemm, compute_slowdown=found.compute_slowdown)
    wait_us = found.wait_us[queues]
    times = [
        _simulated_ms(
            program,
            costs,
            Machine(
                num_queues=queues,
                stream_order=streams_by_launch(program),
                comm_entry=1.0,
                wait_us=wait_us,
                comm_late=found.comm_late,
                late_us=wait_us + 1.0,  # anything above an edge lets the multiply go first
                seed=seed,
            ),
        )
        for seed in range(NUM_SEEDS)
    ]
    return float(np.median(times))


def streams_by_launch(program: Program, rank: int = 0) -> tuple[str, ...]:
    """Streams in the order in which they first launch a kernel, the caller's first.

    For Machine.stream_order, on a device that gives queue k mod Q to the k-th stream that launches since the
    device was idle, and none to a stream for its records and waits.
    """
    launched = {program.main_stream(): None}
    for step in program.unroll(rank):
        if isinstance(step.op, Communicate):
            launched[step.stream if step.op.work is None else str(step.op.lane)] = None
        elif isinstance(step.op, Gemm | UserOp):
            launched[step.stream] = None
    return tuple(launched)


def _tau_of(title: str, orders: Sections, labels: Sequence[tuple[int, str]], predict: Predict) -> list[str]:
    rows = []
    for queues, name in labels:
        predicted = predict(queues, name)
        if predicted is not None:
            values = np.array(orders[queues]["ms"][name])
            rows.append((queues, name, float(np.median(values)), predicted, bootstrap(values)))

    def tau(chosen: Sequence[Any], alike: Callable[[Any], Any] = lambda row: None) -> str:
        measured, predicted, intervals = ([row[at] for row in chosen] for at in (2, 3, 4))
        found = kendall_tau_b(measured, predicted, intervals, [alike(row) for row in chosen])
        return "not defined" if found is None else f"{found[0]:.2f} over {found[1]} pairs"

    others = [row for row in rows if configuration(row[1])[0] != CALIBRATED_TILES]
    lines = [
        f"simulator, {title}: tau-b {tau(rows)} of all (order, S, n, queues);"
        f" {tau(others)} without S {CALIBRATED_TILES};"
        f" {tau(rows, lambda row: (row[0], configuration(row[1])))} of orders with S, n and queues alike"
    ]
    for queues in orders:
        mine = [row for row in rows if row[0] == queues]
        error = np.median([abs(row[3] / row[2] - 1) for row in mine]) if mine else np.nan
        lines.append(f"  {queues} queues: tau-b {tau(mine)}; median error {100 * error:.1f} %")
    return lines


def _wait_us(ms: Mapping[str, list[float]]) -> float | None:
    """What an edge costs fork and join in the loop, over slices alone; 0 where that is nothing."""
    name = f"{FACTORIZED}/S{CALIBRATED_TILES}/n{CALIBRATED_TILES}"
    comm, gemm = (_slice_us(ms, kind, CALIBRATED_TILES) for kind in ("comm", "gemm"))
    if name not in ms or comm is None or gemm is None:
        return None
    tile_us = 1e3 * float(np.median(ms[name])) / CALIBRATED_TILES
    return max(0.0, tile_us - comm - gemm) / EDGES_PER_TILE


def _lost_races(ms: Mapping[str, list[float]], tiles: int, kinds: Sequence[str]) -> float | None:
    """Mean over rounds of where they lie between all races won and none won, for S tiles on more than one
    stream; all won: the communications, one after the other, and the last multiply."""
    comm, gemm = (_slice_us(ms, kind, tiles) for kind in ("comm", "gemm"))
    names = [name for name in ms if name.partition("/")[0] in kinds and configuration(name)[0] == tiles]
    names = [name for name in names if configuration(name)[1] > 1]
    if comm is None or gemm is None or not names or tiles < 2:
        return None
    shares = []
    for name in names:
        none_won = float(np.median(ms[f"{FACTORIZED}/S{tiles}/n{configuration(name)[1]}"]))
        longer, shorter = max(comm, gemm), min(comm, gemm)
        all_won = (tiles * longer + shorter) / 1e3
        shares.append(np.clip((np.array(ms[name]) - all_won) / (none_won - all_won), 0, 1).mean())
    return float(np.mean(shares))


def _slice_us(ms: Mapping[str, list[float]], kind: str, tiles: int) -> float | None:
    key = f"{kind}/S{tiles}"
    return 1e3 * float(np.median(ms[key])) / tiles if key in ms else None


def _program(section: Mapping[str, Any], name: str) -> Program:
    tiles, streams = configuration(name)
    return emit_named(name.partition("/")[0], op=section["op"], num_tiles=tiles, num_streams=streams)


def _simulated_ms(program: Program, costs: Costs, machine: Machine) -> float:
    return duration_us(simulate(program, costs, machine)) / 1e3
