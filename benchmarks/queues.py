"""Queue workloads on GPUs: every one at full size, and what the harness says held against other evidence.

    python benchmarks/queues.py --output FOLDER                                   # one GPU
    torchrun --nproc_per_node 2 benchmarks/queues.py --output FOLDER [--budget-s 130]

Parts, each written to FOLDER/queues_<GPUs>.json as soon as it is done:

modes       a GPU-bound workload under the three sync modes, in turn: throughput of each, and how much of the
            time the device had no piece of work
overlap     hidden time of comms_compute_overlap by the harness and by Kineto, of the same iterations (2 ranks
            or more)
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
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from aorta.hw_queue_eval.core.bench import Bench, Plan, bench  # noqa: E402
from aorta.hw_queue_eval.core.concurrency import concurrency  # noqa: E402
from aorta.hw_queue_eval.core.loop import SYNC_MODES, SyncMode  # noqa: E402
from aorta.hw_queue_eval.core.pieces import Window  # noqa: E402
from aorta.hw_queue_eval.core.points import document, measure_point, refusal  # noqa: E402
from aorta.hw_queue_eval.core.results import Document, Metric, Point, write_document  # noqa: E402
from aorta.hw_queue_eval.core.scaling import scalings  # noqa: E402
from aorta.hw_queue_eval.core.switch import switch_metrics  # noqa: E402
from aorta.hw_queue_eval.options import read_options  # noqa: E402
from aorta.hw_queue_eval.ranks import Ranks, choose_device, process_group, ranks_from_environment  # noqa: E402
from aorta.hw_queue_eval.registry import find, workloads  # noqa: E402
from aorta.timeline.intervals import intersect, length_ms, union  # noqa: E402
from aorta.timeline.types import Kind  # noqa: E402
from aorta.traces.kineto import read_kineto  # noqa: E402

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Part = Literal["modes", "overlap", "capacity", "switch", "workloads"]
TIMEOUT = timedelta(seconds=90)
"""Of collectives: a rank that fails alone leaves the others waiting."""
Flags = dict[str, str | bool]
PARTS: tuple[Part, ...] = ("modes", "overlap", "capacity", "switch", "workloads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("artifacts/queues"), help="folder")
    parser.add_argument("--budget-s", type=float, default=130.0, help="after which nothing new is started")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", help="default: all")
    parser.add_argument("--streams", default="4,1,16,8", help="in this order, where workloads can")
    parser.add_argument("--point-s", type=float, default=0.5, help="of timed iterations at a point")
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
    ) -> Plan:
        workload = find(name)
        return Plan(workload, read_options(workload.Options, options or {}), streams, self.size, **more)

    # ---- sync modes ------------------------------------------------------------------------------

    def modes(self) -> None:
        """The same GPU-bound workload under each mode in turn, block by block."""
        with bench(self.plan("large_gemm_only", 4), self.ranks) as ready:
            each_ms = ready.run(3, "per_iteration").iteration_ms[-1]
            each_ms = max(self.ranks.gather(each_ms))
            num = max(int(400 / each_ms), 2)
            rates: dict[SyncMode, list[float]] = {mode: [] for mode in SYNC_MODES}
            for turn in range(6):
                for place in range(len(SYNC_MODES)):
                    mode = SYNC_MODES[(turn + place) % len(SYNC_MODES)]
                    self.ranks.barrier()
                    rates[mode].append(1e3 * num / ready.run(num, mode).device_ms)
            idle = {mode: self._idle(ready, mode) for mode in SYNC_MODES}
        reference = np.array(rates["per_iteration"])
        rows = {}
        self.say(f"iterations of {each_ms:.1f} ms, {num} a block")
        for mode, some in rates.items():
            middle, low, high = ratio_interval(np.array(some), reference)
            rows[mode] = {
                "iterations_per_s": some,
                "over_per_iteration": [middle, low, high],
                "idle_share": idle[mode],
            }
            self.say(
                f"  {mode:14s} {np.median(some):8.2f} /s   {middle:.4f} of per_iteration "
                f"[{low:.4f}, {high:.4f}]   idle {100 * idle[mode]:.2f} %"
            )
        self.result["modes"] = self.ranks.gather({"iteration_ms": each_ms, "per_block": num, "modes": rows})

    def _idle(self, ready: Bench, mode: SyncMode) -> float:
        found = concurrency(ready.run_pieces(6, mode=mode), Window([], {}))
        assert found is not None
        return found.idle_share

    # ---- hidden time -----------------------------------------------------------------------------

    def overlap(self) -> None:
        """Harness and Kineto on the same iterations of comms_compute_overlap."""
        if self.ranks.world_size < 2 or self.ranks.device.type == "cpu":
            self.say("  needs 2 GPUs")
            return
        self.result["overlap"] = []
        for asynchronous in (False, True):
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
        plan = self.plan("comms_compute_overlap", 2, options, piece_iterations=0, leg_rounds=12)
        with bench(plan, self.ranks) as ready, tempfile.TemporaryDirectory() as folder:
            ready.run(5)
            mine = compared(ready, Path(folder) / f"rank{self.ranks.rank}.json")
        gathered = self.ranks.gather(
            {"collective": collective, "async_op": asynchronous, "rank": self.ranks.rank, **mine}
        )
        self.result["overlap"] += gathered
        for row in gathered:
            self.say(
                f"  {collective:15s} {'async' if asynchronous else 'sync ':5s} rank {row['rank']}"
                f"   comm {row['comm_ms']:.3f} / {row['kineto_comm_ms']:.3f} ms"
                f"   hidden {row['hidden_ms']:.3f} / {row['kineto_hidden_ms']:.3f} ms"
                f"   off by {row['hidden_error_of_comm_pct']:+.1f} % of comm"
                + ("" if row["num_kernels"] == row["num_pieces"] else "   KERNELS DO NOT MATCH PIECES")
            )

    # ---- all workloads ---------------------------------------------------------------------------

    def workloads(self) -> None:
        names = self.given.workloads or list(workloads())
        points: list[Point] = []
        done: set[tuple[str, int]] = set()
        self.result["not_run"] = []
        # Every workload at one stream count before any of them at the next: time may run out.
        for asked in (int(part) for part in self.given.streams.split(",")):
            for name in names:
                kind = find(name)
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
        plan = self.plan(
            name, count, warmup=3, budget_s=self.given.point_s, piece_iterations=8, leg_rounds=10
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
        with bench(self.plan("tiny_kernel_stress", 40), self.ranks) as ready:
            handles = {ready.streams.raw(stream).cuda_stream for stream in range(40)}  # type: ignore[attr-defined]
            ready.run(5)
            check = ready.workload.validate_correctness()
        self.result["capacity"] = {"distinct": len(handles), "ok": check.ok, "check": check.detail}
        correct = "correct" if check.ok else "WRONG"
        self.say(f"  40 streams, {len(handles)} distinct, {correct}: {check.detail}")

    def switch(self) -> None:
        """Queue switch overhead at a few stream counts, on rank 0."""
        found = {}
        for count in (2, 4, 8, 16) if self.ranks.is_first else ():
            cost = switch_metrics(self.ranks.device, count)["queue_switch_us"]
            found[count] = msgspec.to_builtins(cost)
            self.say(f"  {count:2d} streams: {number(cost)}")
        self.result["switch"] = found


def number(metric: Metric) -> str:
    """A metric with its interval, or why there is none."""
    if metric.value is None:
        return f"not measured: {metric.reason}"
    ends = metric.interval
    return f"{metric.value:.4g} {metric.unit}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")


def compared(ready: Bench, path: Path, iterations: int = 10, lead: int = 3) -> dict[str, float]:
    """Per iteration: communication, hidden and exposed time by timed pieces, and by Kineto's kernels.

    The profiler misses kernels at its start, so that the first `lead` iterations are left out of both.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        ready.run(lead, "per_iteration")
        window = ready.run_pieces(iterations, mode="per_iteration")
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    ours = concurrency(window, Window([], {}))
    assert ours is not None
    timeline = read_kineto(path).timeline
    num = sum(piece.name.startswith("comm") for piece in window.pieces)
    comm = timeline.intervals(timeline.kind == Kind.COMM)
    num_kernels = len(comm)
    comm = union(comm[np.argsort(comm[:, 0])][-num:])
    hidden = intersect(comm, timeline.intervals(timeline.kind == Kind.COMPUTE))
    comm_ms, hidden_ms = float(np.mean(ours.comm_ms_each)), float(np.mean(ours.hidden_ms_each))
    kineto_comm_ms, kineto_hidden_ms = length_ms(comm) / iterations, length_ms(hidden) / iterations
    return {
        "comm_ms": comm_ms,
        "kineto_comm_ms": kineto_comm_ms,
        "hidden_ms": hidden_ms,
        "kineto_hidden_ms": kineto_hidden_ms,
        "exposed_ms": comm_ms - hidden_ms,
        "kineto_exposed_ms": kineto_comm_ms - kineto_hidden_ms,
        "num_pieces": num * (lead + iterations) / iterations,
        "num_kernels": num_kernels,
        "hidden_error_of_comm_pct": 100 * (hidden_ms - kineto_hidden_ms) / kineto_comm_ms,
    }


def ratio_interval(some: Any, reference: Any) -> tuple[float, float, float]:
    """Median of the blocks' rate over the reference's, of neighbouring blocks, and its 95 % interval."""
    ratios = some / reference
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    main()
