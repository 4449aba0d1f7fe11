"""Overlapped matrix multiplies on 2 to 8 GPUs: does what lint and the simulator say hold, and which way wins.

    PYTHONPATH=. python benchmarks/programs.py --gpus 2 --output FOLDER --budget-s 200
    PYTHONPATH=. python benchmarks/programs.py --judge FOLDER          # no GPU: the verdicts of a FOLDER
    PYTHONPATH=. python benchmarks/programs.py --judge FOLDER --pack FILE.json    # one small file of it

The first form starts one set of ranks per number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS must be set
before a process touches its GPU), each with a part of the budget; every section is written as soon as it is
done, and what did not fit is listed as skipped. Sections:

orders      ag_gemm in four orders x S tiles x n streams, beside: serial; the same S tiles one after the other
            on one stream (what S tiles cost without any overlap); slices alone, and under the other kind
graphs      the captured graph of each order against the order that lint derives from the program
timelines   what the device ran and when, of one call of each order and of the copy engine
strategies  aorta.programs' comparison for the shapes of SHAPES
threads     without GPUs: programs on threads and gloo, slices of a known length, against the simulator

Needs torch, numpy and msgspec.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from programs_judged import FACTORIZED, configuration, judged, pack

DEFAULT_QUEUES = 8
QUEUES = (8, 1, 2, 32)
"""The default first: it also runs graphs and strategies."""
ORDERS_SHAPE = (65536, 4096, 1024)
"""m, k, n: communication and multiply take about as long."""
CONFIGURATIONS = ((1, 1), (2, 2), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (16, 2), (16, 4), (16, 8))
"""Tiles and streams."""
ORDER_ROUNDS, FEWEST_ROUNDS = 24, 8
AFTER_ORDERS_S, ROUND_MARGIN = 3.0, 1.1
"""For what follows the rounds of orders; rounds that take longer than the first ones."""
CONTENTION_ROUNDS = 8
SHAPES: tuple[tuple[str, str, tuple[int, int, int], int], ...] = (
    ("ag_gemm", "balanced", (65536, 4096, 1024), 30),
    ("ag_gemm", "second headline", (16384, 8192, 2048), 30),
    ("gemm_rs", "balanced", (65536, 4096, 1024), 30),
    ("gemm_rs", "second headline", (16384, 8192, 2048), 30),
    ("ag_gemm", "latency-bound", (4096, 4096, 1024), 30),
    ("gemm_ar", "balanced", (65536, 4096, 1024), 30),
    ("ag_gemm", "compute-bound", (16384, 16384, 8192), 12),
)
"""Operation, name, (m, k, n), rounds; the most wanted first."""
STRATEGY_TILES, STRATEGY_STREAMS = (2, 4, 8), (1, 2, 4)
STRATEGY_S = 12.0
"""A comparison is not begun with less left."""
START_S = 14.0
"""Importing, process groups, first kernels: a set of ranks is not started with less left."""
OTHER_QUEUES_S = 19.0
"""Of the budget, for each number of queues beside the default."""
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
THREAD_SLICE_S = 0.02
TIMELINE_CALLS = 5
TIMELINE_SPIN_CYCLES = 4_000_000
LEAST_SPIN_US = 500.0
MAIN_STREAM = -1
"""aorta.device.streams.MAIN, which needs torch to import."""


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--queues", type=int, nargs="+", default=list(QUEUES))
    parser.add_argument("--sections", nargs="+", default=["orders", "graphs", "timelines", "strategies"])
    parser.add_argument("--judge", type=Path, nargs="+", help="FOLDERs of an earlier run, or its packed FILE")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="instead of verdicts: these runs, small")
    parser.add_argument("--note", default="", help="for the packed FILE")
    parser.add_argument("--small", action="store_true", help="tiny shapes: the program, not the figures")
    options = parser.parse_args()
    if options.judge is not None and options.pack is not None:
        pack(options.judge, options.pack, options.note)
    elif options.judge is not None:
        print(*map(judged, options.judge), sep="\n")
    elif options.output is None:
        parser.error("give --output FOLDER or --judge FOLDER")
    elif "RANK" in os.environ:
        rank_main(options)
    else:
        drive(options)


# The driver: one set of ranks after the other.


def drive(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + options.budget_s
    others = [q for q in options.queues if q != DEFAULT_QUEUES]
    for queues in options.queues:
        left_s = ends_s - time.monotonic()
        reserved_s = OTHER_QUEUES_S * len(others) if queues == DEFAULT_QUEUES else 0.0
        share_s = min(left_s - reserved_s, OTHER_QUEUES_S if queues in others else left_s)
        if share_s < START_S:
            print(f"{queues} queues: skipped, {left_s:.0f} s left")
            continue
        sections = options.sections if queues == DEFAULT_QUEUES else ["orders"]
        if "orders" in options.sections or queues == DEFAULT_QUEUES:
            run_ranks(options, queues, share_s, sections)
    print(judged(options.output, simulated=False))


def run_ranks(options: argparse.Namespace, queues: int, budget_s: float, sections: Sequence[str]) -> None:
    """All ranks as children of this process; ended at the latest a little after their budget."""
    command = [sys.executable, __file__, "--output", str(options.output), "--budget-s", str(budget_s)]
    command += ["--sections", *sections, *(["--small"] if options.small else [])]
    shared = os.environ | ENVIRONMENT | {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    shared |= {"WORLD_SIZE": str(options.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.gpus)
    ]
    deadline_s = time.monotonic() + budget_s + 5
    try:
        while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
            time.sleep(0.1)
            if any(child.poll() not in (None, 0) for child in children):
                deadline_s = min(deadline_s, time.monotonic() + 8)  # the others cannot go on
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    codes = [child.returncode for child in children]
    if any(codes):
        print(f"{queues} queues: ranks ended with {codes}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# One rank.


class Results:
    """What a set of ranks found, written by rank 0 after every section."""

    def __init__(self, folder: Path, rank: int, budget_s: float) -> None:
        self.ends_s = time.monotonic() + budget_s
        self.rank = rank
        self.queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", DEFAULT_QUEUES))
        self.folder = folder
        self.path = folder / f"queues_{self.queues}.json"
        self.found: dict[str, Any] = {"queues": self.queues, "sections": [], "skipped": [], "failed": []}

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def add(self, section: dict[str, Any]) -> None:
        self.found["sections"].append(section)
        self.write()

    def write(self) -> None:
        if self.rank:
            return
        temporary = self.path.with_suffix(".part")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self.found), indent=1))
        temporary.replace(self.path)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A failure becomes a text; the ranks agree on it before they go on."""
        from aorta.programs.execute.timing import Stuck

        started_s = time.monotonic()
        try:
            yield
        except Stuck as error:
            self.fail(name, error)
            os._exit(3)  # the device does not answer: nothing after it would run
        except Exception as error:
            self.fail(name, error)
            raise
        if self.rank == 0:
            print(f"[{self.queues} queues] {name}: {time.monotonic() - started_s:.1f} s", flush=True)

    def fail(self, name: str, error: Exception) -> None:
        last = "".join(traceback.format_exception(error)[-2:]).strip()
        self.found["failed"].append({"section": name, "rank": self.rank, "error": last})
        print(f"[{self.queues} queues] rank {self.rank}: {name} failed: {error}", flush=True)
        self.write()
        if self.rank:
            path = self.folder / f"queues_{self.queues}_rank{self.rank}_failed.txt"
            path.write_text(f"{name}\n{last}\n")


def rank_main(options: argparse.Namespace) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    started_s = time.monotonic()
    watchdog = threading.Timer(options.budget_s + 3, lambda: os._exit(4))
    watchdog.daemon = True
    watchdog.start()
    import torch
    import torch.distributed as dist

    from aorta.programs.execute.compare import environment, versions
    from aorta.programs.execute.session import control_group, local_device

    options.output.mkdir(parents=True, exist_ok=True)
    device = local_device()
    on_gpu = device.type == "cuda"
    timeout = timedelta(seconds=max(30.0, options.budget_s))
    # Without device_id: other groups would be split off one communicator, and share its settings.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    results = Results(options.output, dist.get_rank(), options.budget_s - (time.monotonic() - started_s))
    control = control_group()
    results.found |= {
        "gpus": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "versions": versions(),
        "environment": environment(),
    }
    results.write()
    work: dict[str, Callable[[], None]] = {
        "orders": lambda: orders_section(results, device, options.small),
        "graphs": lambda: graphs_section(results, device, options.small),
        "strategies": lambda: strategies_section(results, device, control, options.small),
        "timelines": lambda: timelines_section(results, device, options.small),
        "threads": lambda: threads_section(results, device),
    }
    for name in options.sections:
        work[name]()
    results.write()
    dist.barrier(group=control)
    # Communicators of several groups take seconds to take down in order, and nothing is left to lose.
    sys.stdout.flush()
    os._exit(0)


def problem_of(op: str, shape: tuple[int, int, int], small: bool) -> Any:
    import torch
    import torch.distributed as dist

    from aorta.programs.execute.problem import Problem

    ranks = dist.get_world_size()
    m, k, n = (64 * ranks, 16 * ranks, 16) if small else shape
    return Problem(op, m, n, k, torch.bfloat16, ranks)


def orders_section(results: Results, device: Any, small: bool) -> None:
    from programs_apart import Slices, repeated

    from aorta.programs.execute.session import Family, StrategySession
    from aorta.programs.execute.strategies import Chunked, Serial
    from aorta.programs.execute.timing import Leg
    from aorta.programs.language.emit import ORDERS

    op = "ag_gemm"
    with results.section(f"orders of {op}"):
        side = max(n for _, n in CONFIGURATIONS)
        session = StrategySession(problem_of(op, ORDERS_SHAPE, small), device, side + 1)
        all_tiles = sorted({tiles for tiles, _ in CONFIGURATIONS})
        families = [Family("serial", [Serial])]
        for tiles in all_tiles:
            one = chunked_maker(Chunked, "both_hoisted", tiles, 1, asynchronous=False)
            families.append(Family(f"seq/S{tiles}", [one]))
        for order in ORDERS:
            for tiles, streams in CONFIGURATIONS:
                made = chunked_maker(Chunked, order, tiles, streams)
                families.append(Family(f"{order}/S{tiles}/n{streams}", [made]))
        built: dict[str, Any] = {name: of[0] for name, of in session.build(families).items()}
        legs = [Leg(name, strategy.submit) for name, strategy in built.items()]
        legs += chain_legs(built, side, session.control)
        legs += edge_legs(session.bench.streams, device, side)
        serial = built["serial"]
        assert isinstance(serial, Serial)
        legs += [Leg("comm", serial.communicate), Leg("gemm", serial.multiply)]
        slices = {
            tiles: Slices(strategy.execution, side, session.control)
            for tiles in all_tiles
            if (strategy := built.get(f"both_hoisted/S{tiles}/n{min(tiles, 2)}")) is not None
        }
        for tiles, parts in slices.items():
            legs += [Leg(f"comm/S{tiles}", parts.comm), Leg(f"gemm/S{tiles}", parts.gemm)]
        rounds = 8 if small else rounds_that_fit(results, session, legs)
        times = session.measure(legs, rounds, num_warmup=1)
        beside = []
        for tiles, parts in slices.items():
            comm, gemm = (float(np.median(times.slowest(f"{kind}/S{tiles}"))) for kind in ("comm", "gemm"))
            beside.append(Leg(f"comm_beside/S{tiles}", repeated(parts.beside_gemm, comm, gemm)))
            beside.append(Leg(f"gemm_beside/S{tiles}", repeated(parts.beside_comm, gemm, comm)))
        contended = session.measure(beside, CONTENTION_ROUNDS)
        problem = session.problem
        results.add(
            {
                "name": "orders",
                "op": op,
                "m": problem.m,
                "k": problem.k,
                "n": problem.n,
                "ms": {leg.name: times.slowest(leg.name).tolist() for leg in legs}
                | {leg.name: contended.slowest(leg.name).tolist() for leg in beside},
                "late": {name: count for name, count in times.late.items() if count},
                "unavailable": session.unavailable,
            }
        )
        session.close()


def rounds_that_fit(results: Results, session: Any, legs: Sequence[Any]) -> int:
    """Up to ORDER_ROUNDS, fewer where the time left allows no more; the same on all ranks."""
    from aorta.programs.execute.collectives import gathered

    started_s = time.monotonic()
    session.measure(legs, 1, num_warmup=1)
    round_s = (time.monotonic() - started_s) / 2
    possible = int((results.left_s - AFTER_ORDERS_S) / (ROUND_MARGIN * round_s))
    rounds: int = min(gathered(min(possible, ORDER_ROUNDS), session.control))
    return max(FEWEST_ROUNDS, rounds)


def chain_legs(built: dict[str, Any], side: int, control: Any) -> list[Any]:
    """The programs of fork and join in the loop with every tile made to follow the one before it."""
    from programs_apart import Slices

    from aorta.programs.execute.timing import Leg

    return [
        Leg(name.replace(FACTORIZED, "chain"), Slices(strategy.execution, side, control).chained)
        for name, strategy in built.items()
        if name.startswith(f"{FACTORIZED}/") and configuration(name)[0] > 1
    ]


def edge_legs(streams: Any, device: Any, side: int) -> list[Any]:
    """What the edges of a chain cost without its work: the same edges around kernels that do next to nothing
    (edges/S/n), and as many such kernels on one stream (no_edges/S)."""
    import torch

    from aorta.programs.execute.timing import Leg

    tokens = list(torch.zeros(2, device=device))

    def follow(stream: int, other: int) -> None:
        streams.wait(stream, streams.record(other))

    def tiny(stream: int, number: int) -> None:
        streams.submit(stream, lambda: tokens[number].add_(1))

    def with_edges(tiles: int, num_streams: int) -> None:
        for tile in range(tiles):
            worker = tile % num_streams
            follow(worker, MAIN_STREAM)
            follow(side, worker)
            tiny(side, 0)
            follow(worker, side)
            tiny(worker, 1)
            follow(MAIN_STREAM, worker)

    def without(tiles: int) -> None:
        for _ in range(tiles):
            tiny(MAIN_STREAM, 0)
            tiny(MAIN_STREAM, 1)

    several = [(tiles, num) for tiles, num in CONFIGURATIONS if tiles > 1]
    legs = [Leg(f"edges/S{tiles}/n{num}", partial(with_edges, tiles, num)) for tiles, num in several]
    numbers = sorted({tiles for tiles, _ in several})
    return legs + [Leg(f"no_edges/S{tiles}", partial(without, tiles)) for tiles in numbers]


def chunked_maker(chunked: Any, order: str, tiles: int, streams: int, **given: Any) -> Any:
    return lambda bench: chunked(bench, order, tiles, streams, **given)


def graphs_section(results: Results, device: Any, small: bool) -> None:
    import torch
    from programs_apart import captured_graph

    from aorta.programs.execute.collectives import failures
    from aorta.programs.execute.problem import bind
    from aorta.programs.execute.session import StrategySession
    from aorta.programs.execute.timing import Leg
    from aorta.programs.language.emit import ORDERS, emit_named
    from aorta.programs.lint.one_rank import lint
    from aorta.programs.lint.recorded import lint_file

    if device.type != "cuda":
        results.found["skipped"].append("graphs: no GPU")
        return
    rows: list[dict[str, Any]] = []
    for op in ("ag_gemm", "gemm_rs"):
        with results.section(f"graphs of {op}"):
            session = StrategySession(problem_of(op, ORDERS_SHAPE, small), device, 4)
            bench, legs, kept = session.bench, [], []
            for order in ORDERS:
                program = emit_named(
                    order, op=op, num_tiles=8, num_streams=4, num_ranks=bench.problem.num_ranks
                )
                tensors = bind(program, bench.operands, bench.arena)
                row: dict[str, Any] = {"op": op, "order": order, "tiles": 8, "streams": 4}
                problem = None
                try:
                    found, graph = captured_graph(
                        program, tensors, {"comm": bench.group}, device, session.control
                    )
                    path = results.folder / f"graph_{op}_{order}_rank{results.rank}.json"
                    path.write_bytes(msgspec.json.encode(found))
                    compared = lint_file(path, program, is_graph=True, rank=results.rank)
                    row |= {
                        "nodes": len(found["nodes"]),
                        "edges": len(found["edges"]),
                        "unexpected": len(compared.unexpected),
                        "absent": len(compared.absent),
                        "false_edges_of_lint": len(lint(program).false_edges),
                        "file": path.name,
                    }
                except Exception as error:  # the other ranks are asked below
                    problem = f"{type(error).__name__}: {error}"
                    row["error"] = problem
                if not failures(problem, session.control):
                    graph.replay()
                    torch.cuda.synchronize(device)
                    legs.append(Leg(order, graph.replay))
                    kept.append(graph)
                rows.append(row)
            times = session.measure(legs, 12) if legs else None
            for row in rows:
                if times is not None and row["op"] == op and row["order"] in times.ms:
                    row["replay_ms"] = times.slowest(row["order"]).tolist()
            session.close()
    results.add({"name": "graphs", "rows": rows})


def threads_section(results: Results, device: Any) -> None:
    """Slices that sleep, so that two cores can overlap them: the orderings are real, the work is not."""
    from aorta.programs.execute.executor import Execution
    from aorta.programs.execute.problem import bind
    from aorta.programs.execute.session import StrategySession
    from aorta.programs.execute.timing import Leg
    from aorta.programs.language.emit import OPS, ORDERS, emit_named
    from aorta.programs.simulator import Costs, duration_us, simulate

    if device.type != "cpu":
        results.found["skipped"].append("threads: for machines without GPUs")
        return
    rows = []
    costs = Costs(comm_us=1e6 * THREAD_SLICE_S, gemm_us=1e6 * THREAD_SLICE_S)
    for op in OPS:
        with results.section(f"threads of {op}"):
            session = StrategySession(problem_of(op, ORDERS_SHAPE, True), device, 4)
            bench = session.bench
            collective = {"ag_gemm": "all_gather", "gemm_rs": "reduce_scatter", "gemm_ar": "all_reduce"}[op]
            pause_s = {"gemm": THREAD_SLICE_S, collective: THREAD_SLICE_S}
            for order in ORDERS:
                program = emit_named(
                    order, op=op, num_tiles=8, num_streams=4, num_ranks=bench.problem.num_ranks
                )
                tensors = bind(program, bench.operands, bench.arena)
                lanes = {"comm": bench.group}
                run = Execution(
                    program, tensors, bench.streams, lanes, pause_s=pause_s, control=session.control
                )
                times = session.measure([Leg("run", run.run)], 5, num_warmup=1)
                predicted = duration_us(simulate(program, costs)) / 1e3
                rows.append(
                    {"op": op, "order": order, "ms": times.slowest("run").tolist(), "predicted_ms": predicted}
                )
            session.close()
    results.add({"name": "threads", "rows": rows})


def timelines_section(results: Results, device: Any, small: bool) -> None:
    """What the device ran and when: one call of each of TIMELINES, all ranks, from torch's profiler.

    A failure here is written down and ends nothing.
    """
    import torch

    from aorta.programs.execute.collectives import failures, gathered
    from aorta.programs.execute.session import StrategySession

    if device.type != "cuda":
        results.found["skipped"].append("timelines: no GPU")
        return
    with results.section("timelines"):
        for op in ("ag_gemm", "gemm_rs"):
            session = StrategySession(problem_of(op, ORDERS_SHAPE, small), device, 4)
            submits = timeline_submits(session)
            for submit in submits.values():  # warm
                session.watch.finish()
                submit()
            session.watch.finish()
            problem, profiler = None, None
            try:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profiler.start()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            spans: Any = None
            if not failures(problem, session.control):
                assert profiler is not None
                for submit in submits.values():
                    for _ in range(TIMELINE_CALLS):
                        profiled_call(session, device, submit)
                try:
                    profiler.stop()
                    spans = spans_of(profiler, list(submits))
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
            shape = {"op": op, "m": session.problem.m, "k": session.problem.k, "n": session.problem.n}
            of_rank = {
                "failed": gathered(problem, session.control),
                "of_rank": gathered(spans, session.control),
            }
            results.add({"name": "timelines", **shape, **of_rank})
            session.close()


def timeline_submits(session: Any) -> dict[str, Callable[[], None]]:
    """What is shown, by name; those that cannot run here are left out on all ranks."""
    from aorta.programs.execute.copy_engine import GatherByCopy, ReduceByCopy
    from aorta.programs.execute.session import Family
    from aorta.programs.execute.strategies import Chunked, FusedGather, FusedScatter, Serial
    from aorta.programs.language.emit import ORDERS

    families = [Family("serial", [Serial])]
    families += [Family(order, [chunked_maker(Chunked, order, 8, 4)]) for order in ORDERS]
    breadth = chunked_maker(Chunked, "both_hoisted", 4, 1, tile_order="breadth")
    families.append(Family("breadth", [breadth]))
    if session.problem.gathers:
        families.append(Family("copy engine", [lambda bench: GatherByCopy(bench, 4, taper=True)]))
        families.append(Family("torch fused", [FusedGather]))
    else:
        families.append(Family("copy engine", [lambda bench: ReduceByCopy(bench, 2)]))
        families.append(Family("torch fused", [FusedScatter]))
    return {name: of[0].submit for name, of in session.build(families).items()}


def profiled_call(session: Any, device: Any, submit: Callable[[], None]) -> None:
    """As in a measured round: a spin while the host submits, and a tiny all-reduce that lets all ranks start
    together; the device is idle before and after."""
    import torch
    import torch.distributed as dist

    session.watch.finish()
    torch.cuda._sleep(TIMELINE_SPIN_CYCLES)
    dist.all_reduce(session.watch.token, group=session.bench.group)
    submit()
    session.watch.finish()


def spans_of(profiler: Any, names: Sequence[str]) -> dict[str, Any]:
    """Of each name the call of median length: [[stream, start us, end us, kind], …], from its first span."""
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    device_events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return calls_by_name(device_events, names)


def calls_by_name(events: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Calls are told apart by the spins before them; what follows a spin first is the tiny all-reduce."""
    calls: list[list[dict[str, Any]]] = []
    for event in sorted(events, key=lambda event: float(event["ts"])):
        # torch's fused scatter has a spin of its own, a short one.
        if "spin" in event["name"] and float(event["dur"]) > LEAST_SPIN_US:
            calls.append([])
        elif calls:
            calls[-1].append(event)
    if len(calls) != len(names) * TIMELINE_CALLS:
        raise ValueError(f"{len(calls)} calls in the trace, {len(names) * TIMELINE_CALLS} were made")
    found = {}
    for number, name in enumerate(names):
        rows = [compact(call[1:]) for call in calls[number * TIMELINE_CALLS : (number + 1) * TIMELINE_CALLS]]
        found[name] = sorted(rows, key=lambda row: max((span[2] for span in row), default=0.0))[
            len(rows) // 2
        ]
    return found


def compact(events: Sequence[dict[str, Any]]) -> list[list[Any]]:
    if not events:
        return []
    begins_us = min(float(event["ts"]) for event in events)
    streams: dict[Any, int] = {}
    rows = []
    for event in events:
        start_us = float(event["ts"]) - begins_us
        stream = streams.setdefault(event.get("args", {}).get("stream", event.get("tid")), len(streams))
        rows.append([stream, round(start_us, 3), round(start_us + float(event["dur"]), 3), kind_of(event)])
    return rows


def kind_of(event: dict[str, Any]) -> str:
    name = event["name"].lower()
    if event["cat"] == "gpu_memcpy":
        return "copy"
    if "nccl" in name:
        return "comm"
    if any(word in name for word in ("gemm", "nvjet", "cutlass", "matmul", "xmma", "splitk")):
        return "gemm"
    return "other"


def strategies_section(results: Results, device: Any, control: Any, small: bool) -> None:
    import torch

    from aorta.programs.execute.collectives import gathered
    from aorta.programs.execute.compare import compare, comparison_text

    for op, name, shape, rounds in SHAPES:
        # All ranks must decide alike, and their clocks do not agree to the last moment.
        if min(gathered(results.left_s, control)) < STRATEGY_S:
            results.found["skipped"].append(f"strategies: {op} {name}")
            continue
        with results.section(f"strategies of {op} {name}"):
            problem = problem_of(op, shape, small)
            found = compare(problem, device, STRATEGY_TILES, STRATEGY_STREAMS, 8 if small else rounds)
            if results.rank == 0:
                print(comparison_text(found), flush=True)
            results.add({"name": "strategies", "shape": name, "comparison": msgspec.to_builtins(found)})
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
