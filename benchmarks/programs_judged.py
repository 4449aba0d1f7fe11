"""What programs.py measured, judged: arithmetic on its JSON, without a GPU and without torch.

A run is read from its folder or from the one small file that `--pack` makes of it: times in steps of 0.1 us;
timelines of rank 0 only; of a comparison without the alternatives that were tried before its last rounds; one
line per section. Runs of several folders with the same number of queues become one.

The simulator is judged as it is, and with what the tiles of one S say about the device. A multiply that fills
the device and the all-gather of the next tile become ready at the same moment, when the all-gather of this
tile ends. Whichever is first has the device: if the multiply is, the all-gather waits for all of it
(comm_entry 1). Times of single rounds therefore fall into steps, one per race that was won. The calibration
takes from the tiles of CALIBRATED_TILES alone: the share of races lost, the time of an edge, and how much a
multiply slows down beside communication. Pairs are judged with and without that S.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aorta.programs.language.emit import emit_named
from aorta.programs.language.ir import Communicate, Gemm, Program, UserOp
from aorta.programs.simulator import Costs, Machine, duration_us, simulate

FACTORIZED = "factorized"
SINGLE_HOISTS = ("developed", "join_hoisted")
HOISTED = (*SINGLE_HOISTS, "both_hoisted")
Interval = tuple[float, float]
HOIST_REGAINS = 0.8
DIGITS = 4
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


def judged(folder: Path, simulated: bool = True) -> str:
    """The verdicts on a folder, or on the file into which it was packed, as text.

    simulated: also what the simulator says, which takes some seconds.
    """
    lines: list[str] = []
    runs = runs_of(folder)
    if not runs:
        return f"{folder} holds no queues_*.json"
    orders = {run["queues"]: s for run in runs for s in run["sections"] if s["name"] == "orders"}
    for queues, section in orders.items():
        lines += [f"{queues} queues, {section['op']} {section['m']},{section['k']},{section['n']}"]
        lines += serial_lines(section["ms"]) + hoist_lines(section["ms"])
    if simulated:
        lines += race_lines(orders) + tau_lines(orders)
    for run in runs:
        for section in run["sections"]:
            if section["name"] == "graphs":
                lines += graph_lines(section["rows"])
            if section["name"] == "strategies":
                lines += strategy_lines(section)
            if section["name"] == "threads":
                lines += thread_lines(section["rows"])
        for failure in run["failed"]:
            error = failure["error"].strip().splitlines()[-1]
            lines.append(
                f"{run['queues']} queues: {failure['section']} failed on rank {failure['rank']}: {error}"
            )
        lines += [f"{run['queues']} queues: skipped {what}" for what in run["skipped"]]
    return "\n".join(lines)


def serial_lines(ms: dict[str, list[float]]) -> list[str]:
    """Fork and join in the loop against what S tiles cost without overlap.

    One stream: the same tiles on one stream, without any edge between streams (serial + S x cost per tile).
    Chain: the same tiles with as many edges, each tile made to follow the one before. Sum: one stream, and
    the cost of as many edges around empty kernels.
    """
    lines = [
        "  fork and join in the loop - the same S tiles without overlap, us:"
        " on one stream; as a chain of edges; one stream + edges alone"
    ]
    held: dict[str, list[bool]] = {}
    names = sorted(
        (n for n in ms if n.startswith(f"{FACTORIZED}/") and configuration(n)[0] > 1), key=configuration
    )
    for name in names:
        tiles, streams = configuration(name)
        suffix = name.removeprefix(FACTORIZED)
        one = f"seq/S{tiles}"
        if one not in ms:
            continue
        compared = {"one stream": [(1, name), (-1, one)]}
        if f"chain{suffix}" in ms:
            compared["chain"] = [(1, name), (-1, f"chain{suffix}")]
        if f"edges{suffix}" in ms:
            edges = [(-1, f"edges{suffix}"), (1, f"no_edges/S{tiles}")]
            compared["sum"] = [(1, name), (-1, one), *edges]
        texts = []
        for kind, terms in compared.items():
            middle, (low, high) = combined(ms, terms)
            held.setdefault(kind, []).append(low <= 0 <= high)
            verdict = "equal" if low <= 0 <= high else "differs"
            texts.append(f"{kind} {1e3 * middle:+7.1f} [{1e3 * low:+.1f}, {1e3 * high:+.1f}] {verdict}")
        share = 100 * combined(ms, compared["one stream"])[0] / float(np.median(ms[one]))
        per_tile = (float(np.median(ms[one])) - float(np.median(ms["serial"]))) / tiles
        lines.append(
            f"    S {tiles:2d} n {streams}: {'; '.join(texts)}  ({share:+.1f} % of one stream,"
            f" where a tile costs {1e3 * per_tile:.1f})"
        )
    counts = [f"{kind} {sum(equal)} of {len(equal)}" for kind, equal in held.items()]
    lines.append("    equal: " + ", ".join(counts))
    return lines


def hoist_lines(ms: dict[str, list[float]]) -> list[str]:
    """Where the best order gains more than three times its interval: what one hoist regains of it."""
    lines = [
        "  gain of the best order over fork and join in the loop; share that the better single hoist regains"
    ]
    shares = []
    for name in sorted((n for n in ms if n.startswith(f"{FACTORIZED}/")), key=configuration):
        tiles, streams = configuration(name)
        if tiles == 1:
            continue
        suffix = name.removeprefix(FACTORIZED)
        gains = {
            order: combined(ms, [(1, name), (-1, order + suffix)])
            for order in (*SINGLE_HOISTS, "both_hoisted")
            if order + suffix in ms
        }
        if not gains:
            continue
        best = max(gains, key=lambda order: gains[order][0])
        gain, (low, high) = gains[best]
        single = max((o for o in SINGLE_HOISTS if o in gains), key=lambda o: gains[o][0], default=None)
        clear = gain > 3 * (high - low) / 2
        if clear and single is not None:
            shares.append(gains[single][0] / gain)
        regained = (
            "-" if single is None or not clear else f"{100 * gains[single][0] / gain:.0f} % by {single}"
        )
        lines.append(
            f"    S {tiles:2d} n {streams}: {1e3 * gain:+8.1f} us [{1e3 * low:+.1f}, {1e3 * high:+.1f}]"
            f" by {best}; {regained if clear else 'not above three intervals'}"
        )
    if shares:
        enough = sum(share >= HOIST_REGAINS for share in shares)
        lines.append(
            f"    the better single hoist regains {100 * min(shares):.0f} % or more of every gain above three"
            f" intervals: {enough} of {len(shares)} rows at or above {100 * HOIST_REGAINS:.0f} %"
        )
    else:
        lines.append("    no gain is above three intervals")
    return lines


def graph_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["captured graphs against the order that lint derives"]
    for row in rows:
        if "error" in row:
            lines.append(f"  {row['op']} {row['order']}: {row['error']}")
            continue
        equal = row["unexpected"] == row["absent"] == 0
        replay = f"; replay {np.median(row['replay_ms']):.3f} ms" if "replay_ms" in row else ""
        differs = f"{row['unexpected']} not predicted, {row['absent']} missing"
        lines.append(
            f"  {row['op']} {row['order']}: {'same reachability' if equal else differs}"
            f" ({row['nodes']} nodes, {row['edges']} edges; lint: {row['false_edges_of_lint']} false){replay}"
        )
    return lines


def thread_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["threads and gloo against the simulator, slices of 20 ms"]
    for row in rows:
        measured = float(np.median(row["ms"]))
        error = 100 * (row["predicted_ms"] / measured - 1)
        lines.append(
            f"  {row['op']} {row['order']:13s} {measured:7.1f} ms,"
            f" predicted {row['predicted_ms']:7.1f} ({error:+.1f} %)"
        )
    return lines


def strategy_lines(section: dict[str, Any]) -> list[str]:
    found = section["comparison"]
    # The tables of results/ keep neither the shape's name nor the verdict in words.
    name, verdict = section.get("shape", ""), found.get("verdict", "")
    lines = [f"{found['op']} {name} {found['m']},{found['k']},{found['n']}: {verdict}"]
    gemm = found["gemm_ms"]["value"]
    copies = found.get("copy_engine_ms")
    lines.append(
        f"  multiply {gemm:.3f} ms, collective {found['comm_ms']['value']:.3f} ms"
        + ("" if copies is None else f", copy engine alone {copies['value']:.3f} ms")
    )
    lines.append(
        f"  {'':34s} {'ms':>8s}  x gemm     eta (95 %)           x own bound  own eta  of pipeline bound"
    )
    for row in found["rows"]:
        time, eta, own_eta = row["time_ms"]["value"], row["efficiency"], row.get("efficiency_of_own_bound")
        over, share = row.get("time_over_own_bound"), row.get("share_of_pipeline_bound")
        lines.append(
            f"  {row['family']:34s} {time:8.3f}  {time / gemm:6.2f}"
            + (
                "  -".ljust(23)
                if eta is None
                else f"  {eta['value']:6.2f} [{eta['low']:5.2f}, {eta['high']:5.2f}]"
            )
            + (f"{'-':>12s}" if over is None else f"{over:12.2f}")
            + (f"{'-':>9s}" if own_eta is None else f"{own_eta['value']:9.2f}")
            + (f"{'-':>9s}" if share is None else f"{100 * share:8.0f} %")
        )
    lines += [f"  not available: {name}: {reason}" for name, reason in found.get("unavailable", {}).items()]
    return lines


def pack(folders: Sequence[Path], file: Path, note: str) -> None:
    """Write the runs of these folders into one small file."""
    runs = merged([run for folder in folders for run in runs_of(folder)])
    lines = ",\n".join(run_text(run) for run in runs)
    made, date = "benchmarks/programs.py", time.strftime("%Y-%m-%d")
    head = {"made": made, "date": date, "note": note, "ms": f"rounded to {DIGITS} digits"}
    text = msgspec.json.encode(head).decode()[:-1] + ',"runs":[\n' + lines + "\n]}\n"
    file.write_text(text)
    print(f"{file}: {len(text) / 1e3:.0f} kB, {len(runs)} runs")


def runs_of(path: Path) -> list[dict[str, Any]]:
    """One per number of hardware queues, fewest first; empty where there are none."""
    if path.is_file():
        found = msgspec.json.decode(path.read_bytes())["runs"]
    else:
        found = [msgspec.json.decode(file.read_bytes()) for file in sorted(path.glob("queues_*.json"))]
    return sorted(found, key=lambda run: run["queues"])


def merged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run per number of queues, with the sections of all."""
    found: dict[int, dict[str, Any]] = {}
    for run in runs:
        kept = found.setdefault(run["queues"], run | {key: [] for key in ("sections", "skipped", "failed")})
        for key in ("sections", "skipped", "failed"):
            kept[key] = kept[key] + run[key]
    return [found[queues] for queues in sorted(found)]


def trimmed(section: dict[str, Any]) -> dict[str, Any]:
    match section["name"]:
        case "strategies":
            left_out = ("screening_ms", "environment", "versions")
            kept = {key: value for key, value in section["comparison"].items() if key not in left_out}
            return section | {"comparison": kept}
        case "timelines":
            return section | {"of_rank": section["of_rank"][:1]}
    return section


def run_text(run: dict[str, Any]) -> str:
    """A run with each section on a line of its own, so that a difference can be read."""
    sections = ",\n".join(
        msgspec.json.encode(rounded(trimmed(section))).decode() for section in run["sections"]
    )
    rest = {key: value for key, value in run.items() if key != "sections"}
    return msgspec.json.encode(rest).decode()[:-1] + ',"sections":[\n' + sections + "\n]}"


def rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, DIGITS)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list():
            return [rounded(item) for item in value]
    return value


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


def configuration(name: str) -> tuple[int, int]:
    """(tiles, streams) of order/S8/n4."""
    _, tiles, streams = name.split("/")
    return int(tiles[1:]), int(streams[1:])


def combined(ms: dict[str, list[float]], terms: Sequence[tuple[int, str]]) -> tuple[float, Interval]:
    """Sum of signed medians with its 95 % interval; rounds are drawn together."""
    drawn = draws(min(len(ms[name]) for _, name in terms))
    values = sum(sign * np.median(np.array(ms[name])[drawn], axis=1) for sign, name in terms)
    low, high = np.percentile(values, (2.5, 97.5))
    return sum(sign * float(np.median(ms[name])) for sign, name in terms), (float(low), float(high))


def bootstrap(values: Any) -> Interval:
    low, high = np.percentile(np.median(values[draws(len(values))], axis=1), (2.5, 97.5))
    return float(low), float(high)


def draws(num: int) -> Any:
    return np.random.default_rng(0).integers(0, num, (1000, num))


def kendall_tau_b(
    x: Sequence[float],
    y: Sequence[float],
    intervals: Sequence[Interval],
    groups: Sequence[Any],
    tie: float = 1e-6,
) -> tuple[float, int] | None:
    """(tau-b, pairs) over pairs of one group whose intervals of x do not overlap; predictions within tie
    are ties."""
    agree = disagree = ties = 0
    for i in range(len(x)):
        for j in range(i):
            (low, high), (other_low, other_high) = intervals[i], intervals[j]
            if groups[i] != groups[j] or (low <= other_high and other_low <= high):
                continue
            if abs(y[i] - y[j]) <= tie * max(abs(y[i]), abs(y[j])):
                ties += 1
            elif (x[i] > x[j]) == (y[i] > y[j]):
                agree += 1
            else:
                disagree += 1
    pairs = agree + disagree + ties
    if agree + disagree == 0:
        return None
    return (agree - disagree) / float(np.sqrt((agree + disagree) * pairs)), pairs
