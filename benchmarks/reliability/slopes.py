"""Does a long run with aorta grow or slow down more than the same run without it?

    python benchmarks/reliability/slopes.py --ranks 8 --steps 20000 --output slopes_gloo.csv
    python benchmarks/reliability/slopes.py --backend nccl --ranks 2 --steps 5000 --output slopes_nccl.csv

Each case (DDP, fully_shard) runs with aorta and without: below torchrun, `slopes.py rank`. On CPUs all runs
go at the same time, so that both see the same machine; on GPUs one after another. A slope is that of a rank's
resident memory (kB a step) or CPU (ms a step, per 1000 steps) over the second half of the run. The difference
is that of the means over ranks. Its interval is the wider of two: Welch's 95 % between the ranks, and that of
a bootstrap in time (residuals of the means' line, drawn in blocks), since ranks of one machine share its
noise and a line through a saw-tooth or a load that changes has a slope that means nothing. Within noise where
the interval holds 0. Exit status 1 where a run failed or a slope with aorta is higher beyond the interval.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import arguments, choose, write  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import aorta  # noqa: E402
from aorta.record.interception.works import TimedWork  # noqa: E402

KINDS = {
    "resident_kb": 1.0,
    "children_resident_kb": 1.0,
    "main_thread_cpu_ms": 1000.0,
    "process_cpu_ms": 1000.0,
}
"""Slopes that are compared, and per how many steps its slope is shown."""

SAMPLES = 200
SLOPES = ("resident_kb", "children_resident_kb", "main_thread_cpu_ms", "process_cpu_ms")
"""Columns whose slopes are given, from rows every `steps / SAMPLES` steps."""
BLOCKS, DRAWS = 8, 2000
"""Blocks that the second half of a run is cut into, and how often they are drawn."""
END_S = 8.0
"""Time from a run's last step to its end."""
GRACE_S = 60.0
"""After which a run that has not ended is ended."""


def compare() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--limit-s", type=float, default=190.0, help="for all together; fewer steps then")
    parser.add_argument("--in-turn", action="store_true", help="one run after another on CPUs too")
    options = parser.parse_args()
    start_s = time.time()
    in_turn = options.in_turn or options.backend == "nccl"
    run_s = options.limit_s / (2 * len(options.cases) if in_turn else 1)
    documents: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        started: list[Run] = []
        for case in options.cases:
            for is_on in (False, True):
                until_s = start_s + run_s * (len(started) + 1 if in_turn else 1)
                started.append(Run(case, is_on, until_s, Path(name), options))
                if in_turn:
                    documents[started[-1].name] = started[-1].document()
        if not in_turn:
            documents = {run.name: run.document() for run in started}
    results = [compared(case, documents) for case in options.cases]
    for result in results:
        print(*lines(result), sep="\n", flush=True)
    write(options.output, results)
    return 0 if all(result["within_noise"] for result in results) else 1


class Run:
    """One run of ranks, started at once."""

    def __init__(
        self, case: str, is_on: bool, until_s: float, folder: Path, options: argparse.Namespace
    ) -> None:
        self.name = f"{case}_{'on' if is_on else 'off'}"
        self._until_s = until_s
        self._output, self._log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(options.ranks), __file__, "rank",
            "--case", case, "--steps", str(options.steps), "--backend", options.backend,
            "--until-unix-s", str(until_s - END_S), "--output", str(self._output),
            *([] if is_on else ["--off"]),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)

    def document(self) -> dict[str, Any]:
        """Wait for the run's end; return its document, or its fault."""
        try:
            status = self._process.wait(max(1.0, self._until_s + GRACE_S - time.time()))
        except subprocess.TimeoutExpired:
            self._process.terminate()  # torchrun ends its ranks
            self._process.wait(30)
            log = self._log.read_text(errors="replace")
            return {"fault": "did not end in time", "log": log[:4000]}
        if status != 0 or not self._output.exists():
            log = self._log.read_text(errors="replace")
            return {"fault": f"status {status}", "log": log if len(log) < 8000 else log[:6000] + log[-2000:]}
        document: dict[str, Any] = json.loads(self._output.read_text())
        return document


def compared(case: str, documents: dict[str, Any]) -> dict[str, Any]:
    """Means of each slope with and without aorta, their difference and its 95 % interval."""
    from scipy import stats  # here, since it would be half of the memory of a rank

    on, off = documents.get(f"{case}_on", {}), documents.get(f"{case}_off", {})
    faults = {name: run["fault"] for name, run in (("on", on), ("off", off)) if "fault" in run}
    if faults:
        return {"case": case, "faults": faults, "within_noise": False}
    result: dict[str, Any] = {"case": case, "steps": on["steps"], "ranks": on["ranks"]}
    for kind, factor in KINDS.items():
        with_aorta, without = (
            factor * np.array([slopes[kind] for slopes in run["slopes_of_ranks"]]) for run in (on, off)
        )
        between_ranks = stats.ttest_ind(with_aorta, without, equal_var=False).confidence_interval(0.95)
        drawn = factor * (drawn_slopes(on, kind) - drawn_slopes(off, kind))
        in_time = np.percentile(drawn, (2.5, 97.5))
        result[kind] = {
            "with": round(float(with_aorta.mean()), 5),
            "without": round(float(without.mean()), 5),
            "difference": round(float(with_aorta.mean() - without.mean()), 5),
            # Equal in all ranks (no child processes, say): no interval, no noise.
            "low": round(min(float(np.nan_to_num(between_ranks.low)), float(in_time[0])), 5),
            "high": round(max(float(np.nan_to_num(between_ranks.high)), float(in_time[1])), 5),
            "between_ranks": [round(float(np.nan_to_num(bound)), 5) for bound in between_ranks],
            "in_time": [round(float(bound), 5) for bound in in_time],
        }
    result["main_thread_cpu_percent"] = relative_growth(on, off)
    result["within_noise"] = all(result[kind]["low"] <= 0.0 for kind in KINDS)
    for name in ("cpu_ms_first_tenth", "cpu_ms_last_tenth"):
        result[name] = {"with": on[name], "without": off[name]}
    result["last"] = on["last"]
    return result


def relative_growth(on: dict[str, Any], off: dict[str, Any]) -> dict[str, Any]:
    """CPU a step per 1000 steps in percent of the run's own: what slows the machine down slows both alike."""
    drawn, means = {}, {}
    for name, run in (("with", on), ("without", off)):
        values = run["means_of_ranks"]["main_thread_cpu_ms"]
        mean = float(np.mean(values[len(values) // 2 :]))
        drawn[name] = drawn_slopes(run, "main_thread_cpu_ms") * 1e5 / mean
        means[name] = float(np.mean([s["main_thread_cpu_ms"] for s in run["slopes_of_ranks"]])) * 1e5 / mean
    low, high = np.percentile(drawn["with"] - drawn["without"], (2.5, 97.5))
    return {
        **{name: round(mean, 3) for name, mean in means.items()},
        "difference": round(means["with"] - means["without"], 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
    }


def drawn_slopes(run: dict[str, Any], kind: str) -> NDArray[np.float64]:
    """Slopes of the second half of the ranks' means, with residuals drawn anew in blocks (moving blocks)."""
    half = len(run["means_of_ranks"]["step"]) // 2
    steps, values = (np.array(run["means_of_ranks"][name][half:]) for name in ("step", kind))
    line = np.polynomial.Polynomial.fit(steps, values, 1)
    residuals = values - line(steps)
    length = max(1, len(steps) // BLOCKS)
    chance = np.random.default_rng(0)
    starts = chance.integers(0, len(steps) - length + 1, (DRAWS, -(-len(steps) // length)))
    blocks = residuals[starts[:, :, None] + np.arange(length)].reshape(DRAWS, -1)[:, : len(steps)]
    centred = steps - steps.mean()
    slopes: NDArray[np.float64] = (line(steps) + blocks) @ centred / (centred @ centred)
    return slopes


def lines(result: dict[str, Any]) -> list[str]:
    if "faults" in result:
        return [f"{result['case']}: FAILED {result['faults']}"]
    verdict = "within noise" if result["within_noise"] else "GROWS"
    texts = [f"{result['case']}, {result['ranks']} ranks x {result['steps']} steps: {verdict}"]
    for kind, factor in KINDS.items():
        row = result[kind]
        per = "a step" if factor == 1.0 else f"a step, per {factor:g} steps"
        texts.append(
            f"  {kind} {per}: {row['with']:+.4f} with, {row['without']:+.4f} without,"
            f" difference {row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        )
    row = result["main_thread_cpu_percent"]
    texts.append(
        f"  main_thread_cpu_ms, per 1000 steps in percent of its own: {row['with']:+.2f} with,"
        f" {row['without']:+.2f} without, difference {row['difference']:+.2f}"
        f" ({row['low']:+.2f} to {row['high']:+.2f})"
    )
    first, last = result["cpu_ms_first_tenth"], result["cpu_ms_last_tenth"]
    texts.append(
        f"  CPU of the main thread, first and last tenth: {first['with']:.3f} and {last['with']:.3f} ms with,"
        f" {first['without']:.3f} and {last['without']:.3f} without"
    )
    return texts


# ---- one rank of a run ---------------------------------------------------------------------------


def rank() -> None:
    """One rank of a run: rows every so many steps, and the slopes of all ranks as JSON."""
    parser = argparse.ArgumentParser(description="Memory and CPU time a step of a long run of short steps.")
    parser.add_argument("--case", choices=sorted(CASES), default="ddp")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--off", action="store_true", help="without the instrument")
    parser.add_argument("--until-unix-s", type=float, default=float("inf"), help="the steps end then")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    device = torch.device("cuda", dist.get_rank()) if options.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    step = CASES[options.case](device)
    with tempfile.TemporaryDirectory() as folder:
        recorder = None if options.off else aorta.instrument(folder)
        with recorder or contextlib.nullcontext():
            rows = measure(step, options.steps, recorder, options.until_unix_s)
    slopes = slopes_of(rows)
    slopes_of_ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(slopes_of_ranks, slopes)
    sums = torch.tensor([[row[name] for name in SLOPES] for row in rows], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    means = (sums / dist.get_world_size()).T.tolist()
    document = summary(rows) | {
        "case": options.case,
        "instrument": not options.off,
        "steps": rows[-1]["step"],
        "ranks": dist.get_world_size(),
        "backend": options.backend,
        "torch": str(torch.__version__),
        "slopes_of_ranks": slopes_of_ranks,
        "means_of_ranks": {"step": [row["step"] for row in rows]} | dict(zip(SLOPES, means, strict=True)),
    }
    if dist.get_rank() == 0:
        print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
        if options.output is not None:
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    dist.destroy_process_group()


def ddp(device: torch.device) -> Callable[[], None]:
    """Four buckets, whose futures the reducer takes in C++."""
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device), bucket_cap_mb=0.016
    )
    inputs = torch.ones(2, 64, device=device)
    return lambda: model(inputs).sum().backward()


def fsdp(device: torch.device) -> Callable[[], None]:
    """Two units of fully_shard. The default mesh would be of GPUs wherever there are some."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)]).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = torch.ones(2, 64, device=device)
    return lambda: model(inputs).sum().backward()


CASES: dict[str, Callable[[torch.device], Callable[[], None]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
}


def measure(
    step: Callable[[], None], num_steps: int, recorder: Any, until_unix_s: float
) -> list[dict[str, float]]:
    """A row every `num_steps / SAMPLES` steps, until that time on rank 0."""
    store = dist.distributed_c10d._get_default_store()
    rows = []
    every = max(1, num_steps // SAMPLES)
    cpu_s, process_cpu_s = time.thread_time(), time.process_time()
    began_s = time.monotonic()
    for number in range(num_steps):
        with recorder.step() if recorder is not None else contextlib.nullcontext():
            step()
        if number % every == every - 1:
            now_cpu_s, now_process_cpu_s = time.thread_time(), time.process_time()
            now_s = time.monotonic()
            rows.append(
                {
                    "step": number + 1,
                    "main_thread_cpu_ms": (now_cpu_s - cpu_s) * 1e3 / every,
                    "process_cpu_ms": (now_process_cpu_s - process_cpu_s) * 1e3 / every,
                    "step_ms": (now_s - began_s) * 1e3 / every,
                    "resident_kb": resident_kb(),
                    "children_resident_kb": sum(map(resident_kb, children())),
                    "threads": threading.active_count(),
                }
                | held(recorder)
            )
            if dist.get_rank() == 0:
                store.set(f"row/{number}", "last" if time.time() > until_unix_s else "")
            if store.get(f"row/{number}"):
                break
            cpu_s, process_cpu_s, began_s = now_cpu_s, now_process_cpu_s, now_s
    return rows


def held(recorder: Any) -> dict[str, float]:
    if recorder is None:
        return {}
    journal = recorder.journal
    return {
        "works_alive": len(TimedWork._alive),
        "in_flight": len(journal._in_flight),
        "steps_waiting": len(journal.closed),
        "groups": len(journal.groups()),
    }


def children() -> list[int]:
    """Processes that this one has started: on GPUs the one that writes the records."""
    paths = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text().split()]


def resident_kb(pid: int | None = None) -> int:
    try:
        statm = Path(f"/proc/{pid or 'self'}/statm").read_text()
    except OSError:  # it has ended
        return 0
    return int(statm.split()[1]) * 4


def slopes_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Slopes per step of lines through the second half: resident memory in kB, CPU in ms."""
    half = rows[len(rows) // 2 :]
    steps = [row["step"] for row in half]
    return {name: float(np.polyfit(steps, [row[name] for row in half], 1)[0]) for name in SLOPES}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "resident_kb_per_step": round(slopes_of(rows)["resident_kb"], 4),
        "cpu_ms_first_tenth": _median(rows[: max(1, len(rows) // 10)], "main_thread_cpu_ms"),
        "cpu_ms_last_tenth": _median(rows[-max(1, len(rows) // 10) :], "main_thread_cpu_ms"),
        "process_cpu_ms_first_tenth": _median(rows[: max(1, len(rows) // 10)], "process_cpu_ms"),
        "process_cpu_ms_last_tenth": _median(rows[-max(1, len(rows) // 10) :], "process_cpu_ms"),
        "last": rows[-1],
        "rows": rows[:: max(1, len(rows) // 20)],
        "python": sys.version.split()[0],
    }


def _median(rows: list[dict[str, float]], name: str) -> float:
    return round(float(np.median([row[name] for row in rows])), 4)


if __name__ == "__main__":
    sys.exit(choose(__doc__, {"compare": compare, "rank": rank}))
