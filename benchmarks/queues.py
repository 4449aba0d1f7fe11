"""Queue workloads on GPUs: every one at full size, and what the harness says held against other evidence.

    python benchmarks/queues.py --output FOLDER                                   # one GPU
    torchrun --nproc_per_node 2 benchmarks/queues.py --output FOLDER [--budget-s 130]
    python benchmarks/queues.py truth --output queue_truth.json           # is the probe of queues right?
    python benchmarks/queues.py waiting --output waiting_streams.csv      # what streams that wait cost

The first form has parts, each written to FOLDER/queues_<GPUs>.json as soon as it is done:

modes       a GPU-bound workload under the three sync modes, in turn: throughput of each, and how much of the
            time the device had no piece of work
overlap     hidden time of comms_compute_overlap by Kineto, and of the same iterations by the harness's pieces
            (2 ranks or more)
capacity    40 streams, more than torch's pool: all distinct, results correct
switch      queue switch overhead
workloads   every workload at a few stream counts

Needs torch, numpy and msgspec. Intervals by scipy are null where it is missing; iteration times are in the
file.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import choose, part_of  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from aorta.account.results.schema import Document, Metric, Point, write_document  # noqa: E402
from aorta.device.ranks import Ranks, choose_device, process_group, ranks_from_environment  # noqa: E402
from aorta.queues.catalogue import SYNC_MODES, SyncMode  # noqa: E402
from aorta.queues.harness.iterate import PointPlan, WorkloadBench, set_up  # noqa: E402
from aorta.queues.harness.measure import document, measure_point, refusal  # noqa: E402
from aorta.queues.harness.metrics import switch_metrics  # noqa: E402
from aorta.queues.harness.pieces import Window, concurrency  # noqa: E402
from aorta.queues.harness.scaling import scalings  # noqa: E402
from aorta.queues.options import read_options  # noqa: E402
from aorta.queues.workload import ITERATION  # noqa: E402
from aorta.queues.workloads import find, workloads  # noqa: E402
from aorta.timeline.intervals import intersect, length_ms, union  # noqa: E402
from aorta.timeline.statistics import median_interval  # noqa: E402
from aorta.timeline.types import Kind  # noqa: E402
from aorta.traces.kineto import read_kineto  # noqa: E402

CALLS = ("sync", "async")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Part = Literal["modes", "overlap", "capacity", "switch", "workloads"]
TIMEOUT = timedelta(seconds=90)
"""Of collectives: a rank that fails alone leaves the others waiting."""
BLOCK_MS = 150.0
WARMUP_ROUNDS = 3
GRAPHS = {f"{name}_graphs": name for name in ("tiny_kernel_stress", "graph_subgraphs")}
"""Workloads that are run with captured graphs, too: launched one by one, the host sets their pace."""
Flags = dict[str, str | bool]
PARTS: tuple[Part, ...] = ("modes", "overlap", "capacity", "switch", "workloads")


def evaluation() -> None:
    parser = argparse.ArgumentParser(description="Every workload at full size, beside other evidence.")
    parser.add_argument("--output", type=Path, default=Path("artifacts/queues"), help="folder")
    parser.add_argument("--budget-s", type=float, default=130.0, help="after which nothing new is started")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", help="default: all")
    parser.add_argument("--streams", default="4,1,16,8", help="in this order, where workloads can")
    parser.add_argument("--point-s", type=float, default=0.5, help="of timed iterations at a point")
    parser.add_argument("--modes-s", type=float, default=15.0, help="for the comparison of sync modes")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS, help="of the overlap part")
    parser.add_argument("--size", choices=["small", "full"], help="default: full on a GPU")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    ranks = ranks_from_environment()
    ranks.device = choose_device(given.device, ranks)
    with process_group(ranks, None, TIMEOUT):
        run = Run(given, ranks)
        parts: dict[Part, Callable[[], None]] = {
            "modes": run.modes, "overlap": run.overlap, "capacity": run.capacity, "switch": run.switch,
            "workloads": run.workloads,
        }  # fmt: skip
        for name in given.parts:
            run.part(name, parts[name])
        status = run.finish()
    sys.exit(status)


class Run:
    """One run of the script on one rank; rank 0 prints and writes."""

    def __init__(self, given: argparse.Namespace, ranks: Ranks) -> None:
        self.given, self.ranks = given, ranks
        self.size: Any = given.size or ("small" if ranks.device.type == "cpu" else "full")
        self.began_s = time.monotonic()
        self.path = given.output / f"queues_{ranks.world_size}x{ranks.device.type}.json"
        self.result: dict[str, Any] = {"command": sys.argv, "size": self.size, "failures": {}}

    def part(self, name: str, work: Callable[[], None]) -> None:
        self.say(f"== {name} ({self.elapsed_s():.0f} s)")
        with self.recorded(name):
            work()
        self.write()

    @contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """What fails on all ranks alike is written down, and the rest goes on."""
        failure = ""
        try:
            yield
        except Exception as error:
            failure = traceback.format_exc()
            print(f"{name}: rank {self.ranks.rank}: {error!r}", file=sys.stderr, flush=True)
        failures = [one for one in self.ranks.gather(failure) if one]
        if failures:
            self.result["failures"][name] = failures[0]

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def is_late(self) -> bool:
        """The same on every rank."""
        return bool(max(self.ranks.gather(self.elapsed_s())) > self.given.budget_s)

    def say(self, line: str) -> None:
        if self.ranks.is_first:
            print(line, flush=True)

    def write(self) -> None:
        if self.ranks.is_first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(msgspec.json.format(msgspec.json.encode(self.result), indent=1))

    def finish(self) -> int:
        self.result["elapsed_s"] = self.elapsed_s()
        self.write()
        for name in self.result["failures"]:
            self.say(f"FAILED {name}: see failures in {self.path}")
        self.say(f"{self.elapsed_s():.0f} s   wrote {self.path}")
        return 1 if self.result["failures"] else 0

    def plan(
        self, name: str, streams: int, options: dict[str, str | bool] | None = None, **more: Any
    ) -> PointPlan:
        workload = find(name)
        return PointPlan(workload, read_options(workload.Options, options or {}), streams, self.size, **more)

    # ---- sync modes ------------------------------------------------------------------------------

    def modes(self) -> None:
        """The same GPU-bound workload under each mode in turn: short blocks in rotated order, the first
        rounds thrown away while clocks and power settle."""
        with set_up(self.plan("large_gemm_only", 4), self.ranks) as bench:
            each_ms = bench.run(3, "per_iteration").iteration_ms[-1]
            each_ms = max(self.ranks.gather(each_ms))
            num = max(int(BLOCK_MS / each_ms), 3)
            rounds = max(self.ranks.gather(self._rounds(num * each_ms)))
            rates: dict[SyncMode, list[float]] = {mode: [] for mode in SYNC_MODES}
            for turn in range(WARMUP_ROUNDS + rounds):
                for place in range(len(SYNC_MODES)):
                    mode = SYNC_MODES[(turn + place) % len(SYNC_MODES)]
                    self.ranks.barrier()
                    rates[mode].append(1e3 * num / bench.run(num, mode).device_ms)
            idle = {mode: self._idle(bench, mode) for mode in SYNC_MODES}
        reference = np.array(rates["per_iteration"][WARMUP_ROUNDS:])
        rows = {}
        for mode, some in rates.items():
            middle, low, high = median_interval(np.array(some[WARMUP_ROUNDS:]) / reference)
            rows[mode] = {
                "iterations_per_s": some,
                "over_per_iteration": [middle, low, high],
                "agrees_within_2_pct": agreement(low, high, 0.02),
                "idle_share": idle[mode],
            }
        mine = {
            "iteration_ms": each_ms, "per_block": num, "rounds": rounds, "warmup_rounds": WARMUP_ROUNDS,
            "modes": rows,
        }  # fmt: skip
        self.result["modes"] = self.ranks.gather(mine)
        self.say(f"iterations of {each_ms:.1f} ms, {num} a block, {rounds} rounds after {WARMUP_ROUNDS}")
        for rank, one in enumerate(self.result["modes"]):
            for mode in SYNC_MODES:
                row = one["modes"][mode]
                middle, low, high = row["over_per_iteration"]
                rate = np.median(row["iterations_per_s"][WARMUP_ROUNDS:])
                self.say(
                    f"  rank {rank} {mode:14s} {rate:8.2f} /s   {middle:.4f} of per_iteration [{low:.4f}, "
                    f"{high:.4f}]   within 2 %: {row['agrees_within_2_pct']}   "
                    f"idle {100 * row['idle_share']:.2f} %"
                )

    def _rounds(self, block_ms: float) -> int:
        """As many as the time allows, a whole number of rotations."""
        affordable = int(1e3 * self.given.modes_s / (block_ms * len(SYNC_MODES))) - WARMUP_ROUNDS
        return max(affordable // len(SYNC_MODES), 2) * len(SYNC_MODES)

    def _idle(self, bench: WorkloadBench, mode: SyncMode) -> float:
        found = concurrency(bench.run_pieces(6, mode=mode), Window([], {}))
        assert found is not None
        return found.idle_share

    # ---- hidden time -----------------------------------------------------------------------------

    def overlap(self) -> None:
        """Harness and Kineto on the same iterations of comms_compute_overlap."""
        if self.ranks.world_size < 2 or self.ranks.device.type == "cpu":
            self.say("  needs 2 GPUs")
            return
        self.result["overlap"] = []
        for asynchronous in (call == "async" for call in self.given.calls):
            for collective in COLLECTIVES:
                if self.is_late():
                    self.say("  out of time")
                    return
                with self.recorded(f"overlap {collective}"):
                    self._overlap_of(collective, asynchronous)

    def _overlap_of(self, collective: str, asynchronous: bool) -> None:
        options: Flags = {
            "collective": collective, "num_coll": "4", "async_op": asynchronous, "real_collectives": True,
        }  # fmt: skip
        if self.size == "full":
            options["comm_size"] = "256M"
        plan = self.plan("comms_compute_overlap", 2, options, piece_iterations=0)
        with set_up(plan, self.ranks) as bench:
            bench.run(5)
            mine = compared(bench)
        gathered = self.ranks.gather(
            {"collective": collective, "async_op": asynchronous, "rank": self.ranks.rank, **mine}
        )
        self.result["overlap"] += gathered
        for row in gathered:
            self.say(
                f"  {collective:15s} {'async' if asynchronous else 'sync ':5s} rank {row['rank']}"
                f"   kernels: comm {row['kineto_comm_ms']:.3f} hidden {row['kineto_hidden_ms']:.3f} ms"
                + f"   pieces {shown_error(row)}"
                + ("" if row["num_kernels"] == row["num_pieces"] else "   KERNELS DO NOT MATCH PIECES")
            )

    # ---- all workloads ---------------------------------------------------------------------------

    def workloads(self) -> None:
        names = self.given.workloads or [*workloads(), *GRAPHS]
        points: list[Point] = []
        done: set[tuple[str, int]] = set()
        self.result["not_run"] = []
        # Every workload at one stream count before any of them at the next: time may run out.
        for asked in (int(part) for part in self.given.streams.split(",")):
            for name in names:
                kind = find(GRAPHS.get(name, name))
                count = min(max(asked, kind.min_streams), kind.max_streams)
                if (name, count) in done:
                    continue
                done.add((name, count))
                if self.is_late():
                    self.result["not_run"].append(f"{name} {count}")
                    continue
                with self.recorded(f"{name} {count}"):
                    self._point(name, count, points)
        self.result["points"] = msgspec.to_builtins(points)
        self.result["scaling"] = msgspec.to_builtins(scalings(points))
        if self.result["not_run"]:
            self.say(f"  out of time for {', '.join(self.result['not_run'])}")
        if self.ranks.is_first and points:
            write_document(self.path.with_name(f"{self.path.stem}_points.json"), self._document(points), True)

    def _point(self, name: str, count: int, points: list[Point]) -> None:
        options: Flags = {"graphs": True} if name in GRAPHS else {}
        plan = self.plan(
            GRAPHS.get(name, name),
            count,
            options,
            warmup=3,
            budget_s=self.given.point_s,
            piece_iterations=8,
            leg_rounds=10,
        )
        if reason := refusal(plan, self.ranks.device.type, self.ranks.world_size):
            self.say(f"  {name:22s} {count:3d}   skipped: {reason}")
            return
        began_s = time.monotonic()
        point = measure_point(plan, self.ranks, switch=False)
        points.append(point)
        metrics = point.metrics

        def shown(metric: str) -> str:
            found = metrics.get(metric)
            return "     n/a" if found is None or found.value is None else f"{found.value:8.3g}"

        launch_bound = "  launch-bound" if any(run.launch_bound for run in point.ranks) else ""
        self.say(
            f"  {name:22s} {count:3d}   {shown('units_per_s')} {metrics['units_per_s'].unit:14s} "
            f"p50 {shown('latency_p50_ms')} ms   at a time {shown('achieved_concurrency')}"
            f"   {point.status}   {time.monotonic() - began_s:.1f} s{launch_bound}"
        )
        if point.status == "failed":
            self.say(f"      {point.reason}")

    def _document(self, points: Sequence[Point]) -> Document:
        return msgspec.structs.replace(document(points, self.ranks), scaling=scalings(points))

    # ---- more streams than torch's pool ----------------------------------------------------------

    def capacity(self) -> None:
        if self.ranks.device.type == "cpu":
            self.say("  needs a GPU")
            return
        with set_up(self.plan("tiny_kernel_stress", 40), self.ranks) as bench:
            handles = {bench.streams.raw(stream).cuda_stream for stream in range(40)}  # type: ignore[attr-defined]
            bench.run(5)
            check = bench.workload.validate_correctness()
        self.result["capacity"] = {"distinct": len(handles), "ok": check.ok, "check": check.detail}
        correct = "correct" if check.ok else "WRONG"
        self.say(f"  40 streams, {len(handles)} distinct, {correct}: {check.detail}")

    def switch(self) -> None:
        """Queue switch overhead at a few stream counts, on rank 0."""
        found = {}
        for count in (2, 4, 8, 16) if self.ranks.is_first else ():
            cost = switch_metrics(self.ranks.device, count)["queue_switch_us"]
            found[count] = msgspec.to_builtins(cost)
            self.say(f"  around {count:2d} streams: {number(cost)}")
        self.result["switch"] = found


def number(metric: Metric) -> str:
    """A metric with its interval, or why there is none."""
    if metric.value is None:
        return f"not measured: {metric.reason}"
    ends = metric.interval
    return f"{metric.value:.4g} {metric.unit}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")


JUDGED, LEAD = 12, 3
"""Iterations: judged, and passed over because the profiler misses kernels at its start."""


def compared(bench: WorkloadBench) -> dict[str, Any]:
    """Communication and its hidden part per iteration: by Kineto's kernels, and by pieces between events."""
    judged = profiled(bench, JUDGED)
    pieces = concurrency(judged.window, Window([], {}))
    assert pieces is not None
    assert pieces.comm_ms is not None
    assert pieces.hidden_ms is not None
    found: dict[str, Any] = {
        "num_pieces": sum(piece.name.startswith("comm") for piece in judged.window.pieces),
        "raw_comm_ms": pieces.comm_ms,
        "raw_hidden_ms": pieces.hidden_ms,
        **kernels_of(judged),
    }
    for name in ("comm", "hidden"):
        off_ms = found[f"raw_{name}_ms"] - found[f"kineto_{name}_ms"]
        found[f"raw_{name}_error_of_comm_pct"] = 100 * off_ms / found["kineto_comm_ms"]
    judged.path.unlink(missing_ok=True)
    return found


class Profiled(NamedTuple):
    window: Window
    began_unix_ns: int
    path: Path


def profiled(bench: WorkloadBench, iterations: int) -> Profiled:
    """Timed pieces and the trace of the same iterations."""
    with tempfile.NamedTemporaryFile(suffix=f".rank{bench.ranks.rank}.json", delete=False) as file:
        path = Path(file.name)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.run(LEAD, "per_iteration")
        bench.ranks.barrier()
        torch.cuda.synchronize()  # the barrier's kernel is an all-reduce, too
        began_unix_ns = time.time_ns()
        bench.recorder.start(ITERATION)
        bench.run(iterations, "per_iteration")
        window = bench.recorder.stop()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return Profiled(window, began_unix_ns, path)


def kernels_of(judged: Profiled) -> dict[str, float]:
    """Kineto's own account of the iterations whose pieces were timed."""
    timeline = read_kineto(judged.path).timeline
    begin_ms = (judged.began_unix_ns - timeline.origin_unix_ns) / 1e6
    later = timeline.start_ms >= begin_ms
    comm = timeline.intervals(later & (timeline.kind == Kind.COMM))
    hidden = intersect(union(comm), union(timeline.intervals(later & (timeline.kind == Kind.COMPUTE))))
    num = len({piece.iteration for piece in judged.window.pieces})
    return {
        "num_kernels": len(comm),
        "kineto_comm_ms": length_ms(union(comm)) / num,
        "kineto_hidden_ms": length_ms(hidden) / num,
    }


def shown_error(row: dict[str, Any]) -> str:
    comm, hidden = (row[f"raw_{name}_error_of_comm_pct"] for name in ("comm", "hidden"))
    return f"off by {comm:+.1f} %, hidden {hidden:+.1f} % of comm"


def agreement(low: float, high: float, share: float) -> str:
    """What an interval of a ratio says of "equal within that share"."""
    if 1 - share <= low and high <= 1 + share:
        return "holds"
    if high < 1 - share or low > 1 + share:
        return "misses"
    return "cannot tell"


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    parts = {"truth": part_of("queue_truth", "truth"), "waiting": part_of("queue_truth", "waiting")}
    choose(__doc__, {"evaluation": evaluation, **parts})
